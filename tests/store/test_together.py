"""Processes that add, read and collect garbage at the same time, one in a container, one stopped in between."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from moonclipfs.store.check import verify
from moonclipfs.store.store import Store
from tests.store import kit

ROOT = Path(__file__).parent.parent.parent
ROUNDS = 30
WORKER = """
import sys, time
from pathlib import Path
from moonclipfs.errors import BusyError, NotFoundError
from moonclipfs.store.forget import forget
from moonclipfs.store.gc import collect
from moonclipfs.store.retention import Rules, plan
from moonclipfs.store.store import Store
from tests.store import kit

role, path, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def content(name, step):
    model = kit.series(step % 3 + 1, 40_000, seed=hash_of(name))[-1]
    return {"model.safetensors": model, "noise": kit.noise(step, 9000)}

def hash_of(name):
    return sum(name.encode())

def adder(store):
    for step in range(rounds):
        kit.publish(store, f"{role}/s{step}", content(role, step))

def reader(store):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not Path(sys.argv[4]).exists():
        for name in list(store.names().bound()):
            run, step = name.split("/s")
            try:
                got = kit.contents(store, name)
            except NotFoundError:
                continue  # forgotten between the listing and the look
            assert got == content(run, int(step)), name

def collector(store):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not Path(sys.argv[4]).exists():
        names = store.names()
        if len(names.bound()) > 8:
            forget(store, plan(names, Rules(keep_last=3)).drop)
        collect(store, wait_seconds=0.1)

with Store.open(path, write=True) as store:
    {"a": adder, "b": adder, "c": adder, "reader": reader, "gc": collector}[role](store)
print("done")
"""


def start(role: str, store: Path, stop: Path, *, contained: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, role, str(store), str(ROUNDS), str(stop)]
    if contained:
        command = ["unshare", "--pid", "--fork", "--kill-child", *command]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def can_contain() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode == 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_adders_a_reader_and_a_collector_at_once(tmp_path: Path) -> None:
    path, stop = tmp_path / "store", tmp_path / "stop"
    Store.create(path).close()
    helpers = [start("reader", path, stop), start("gc", path, stop)]
    adders = [start("a", path, stop), start("b", path, stop, contained=can_contain()), start("c", path, stop)]
    try:
        with Store.open(path) as store:
            wait_for(lambda: "c/s2" in store.names().bound())
            os.killpg(adders[2].pid, signal.SIGSTOP)  # as a laptop that sleeps, or a debugger, does
            outputs = [adder.communicate(timeout=120)[0] for adder in adders[:2]]
            assert f"c/s{ROUNDS - 1}" not in store.names().bound(), "it was not stopped in its work"
        os.killpg(adders[2].pid, signal.SIGCONT)
        outputs.append(adders[2].communicate(timeout=120)[0])
        stop.touch()
        outputs += [helper.communicate(timeout=120)[0] for helper in helpers]
    finally:
        for process in [*helpers, *adders]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert [output.strip().splitlines()[-1] for output in outputs] == ["done"] * 5, outputs
    with Store.open(path, write=True) as store:
        names = store.names()
        published = list(names.all_versions())
        assert {version.path.split("/")[0] for version in published} == {"a", "b", "c"}
        for run in "abc":
            assert f"{run}/s{ROUNDS - 1}" in names.bound(), "the newest of a line is never forgotten"
        for name in names.bound():
            assert kit.contents(store, name)["noise"] == kit.noise(int(name.split("/s")[1]), 9000)
        assert verify(store).problems == []
