"""`torch.distributed.checkpoint` on a mount: two processes save and load, at once and in the background."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.ecosystem.conftest import Workspace
from tests.ecosystem.distributed import whole
from tests.ecosystem.models import same

PROGRAM = Path(__file__).with_name("distributed.py")


def torchrun(action: str, directory: Path, step: int, processes: int = 2) -> None:
    """Run the program in so many processes."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*run, PROGRAM, action, directory, str(step)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def test_save_and_load_in_two_processes(workspace: Workspace, tmp_path: Path) -> None:
    torchrun("save", workspace.path / "run/step-1", 1)
    torchrun("async", workspace.path / "run/step-2", 2)
    workspace.await_snapshots("run/step-1", "run/step-2")
    workspace.flush()
    torchrun("load", workspace.path / "run/step-1", 1)
    workspace.remount()
    torchrun("load", workspace.path / "run/step-2", 2)
    torchrun("load", workspace.path / "run/step-2", 2, processes=1)
    dcp_to_torch_save(workspace.path / "run/step-1", tmp_path / "whole.pt")
    assert same(torch.load(tmp_path / "whole.pt", weights_only=True)["model"], whole(1))


def test_saved_over_the_checkpoint_before(workspace: Workspace, tmp_path: Path) -> None:
    """The same directory at each save: a version of each."""
    place = workspace.path / "run/last"
    for step in (1, 2):
        torchrun("save", place, step)
        workspace.await_version("run/last", step)
    torchrun("load", place, 2)
    workspace.remount()
    for number in (1, 2):
        dcp_to_torch_save(workspace.path / f"@versions/run/last/{number}", tmp_path / "whole.pt")
        assert same(torch.load(tmp_path / "whole.pt", weights_only=True)["model"], whole(number))


def test_R037_another_mount_sees_the_files_of_a_save_whole_or_not_at_all(workspace: Workspace, tmp_path: Path) -> None:
    other = workspace.second(tmp_path / "other")
    place, seen, done = other / "run/step-1", [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append({path.name: path.stat().st_size for path in place.glob("*")} if place.exists() else {})
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        torchrun("save", workspace.path / "run/step-1", 1)
        workspace.await_snapshots("run/step-1")
        sizes = {path.name: path.stat().st_size for path in (workspace.path / "run/step-1").iterdir()}
        deadline = time.monotonic() + 10
        while (not seen or not seen[-1]) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        done.set()
        watcher.join()
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} == sizes.keys()
    assert seen[-1] == sizes
    assert all(one in ({}, sizes) for one in seen)
    assert FileSystemReader(place).read_metadata().state_dict_metadata
    torchrun("load", place, 1)
