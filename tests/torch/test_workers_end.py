"""The threads that hash and decode end before the interpreter does."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import time, torch
from moonclipfs.torch.workers import Workers

def work():
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        [torch.ones(100) for _ in range(50)]
    print("done", flush=True)

workers = Workers(2)
workers.submit(work)
workers.submit(work)
"""


def test_a_worker_that_is_busy_with_tensors_when_the_program_ends_is_waited_for() -> None:
    """A thread that gives a tensor back while the interpreter goes would abort the process."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\ndone\n", "")
