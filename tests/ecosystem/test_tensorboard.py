"""TensorBoard's event files on a mount: appended to by one program while another reads them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.ecosystem.conftest import Workspace

READER = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
for line in sys.stdin:
    events.Reload()
    tags = events.Tags()["scalars"]
    print(*(int(event.value) for event in events.Scalars("loss")) if "loss" in tags else (), flush=True)
"""


def test_events_are_read_while_they_are_appended(workspace: Workspace) -> None:
    """One reader keeps its file open throughout, while what is there already is encoded, too."""
    place = workspace.path / "run/logs"
    with (
        SummaryWriter(str(place)) as writer,
        subprocess.Popen(
            [sys.executable, "-c", READER, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reader,
    ):
        assert reader.stdin is not None and reader.stdout is not None
        for step in range(30):
            writer.add_scalar("loss", step, step)
            writer.flush()
            if step % 10 == 5:
                workspace.flush()
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline().split() == [str(number) for number in range(step + 1)]
        writer.add_histogram("weights", np.arange(1000), 30)
    assert reader.returncode == 0
    workspace.stays_without_snapshot()

    def check() -> None:
        events = EventAccumulator(str(place)).Reload()
        assert [event.value for event in events.Scalars("loss")] == list(range(30))
        assert events.Tags()["histograms"] == ["weights"]

    workspace.everywhere(check)
