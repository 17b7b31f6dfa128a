"""git on a mount, and more files than the kernel may know of."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually, patched_server


@pytest.fixture
def mounted(store: Store, mounter: Mounter) -> Mounted:
    """An empty mount that can be written to."""
    return mounter(store.path, read_only=False)


def run(*command: object, cwd: Path | None = None) -> None:
    """Run a program; it has to succeed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_git_clones_packs_and_checks(mounted: Mounted, tmp_path: Path) -> None:
    """git clone, gc and fsck work on a mount."""
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    source = tmp_path / "source"
    run("git", "init", "-q", source)
    for number in range(30):
        (source / f"f{number}").write_bytes(os.urandom(5000))
        run("git", "add", ".", cwd=source)
        run("git", *identity, "commit", "-q", "-m", str(number), cwd=source)
    clone = mounted.path / "clone"
    run("git", "clone", "-q", "--no-local", source, clone)
    run("git", "gc", "-q", cwd=clone)
    run("git", *identity, "commit", "-q", "--allow-empty", "-m", "more", cwd=clone)
    run("git", "repack", "-adfq", cwd=clone)
    run("git", "fsck", "--no-progress", "--strict", cwd=clone)
    run("git", "diff", "--exit-code", cwd=clone)
    assert "ERROR" not in mounted.log_text()


def test_what_the_kernel_knows_of_the_layer_is_bounded(store: Store, tmp_path: Path) -> None:
    """Inodes of the layer that the kernel keeps for long are taken back from it, those in use stay."""
    patch = "from moonclipfs import limits\nlimits.NODES = 8000"
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=False) as mounted:
        with (mounted.path / "open").open("w+b", buffering=0) as file:
            file.write(b"kept")
            for number in range(20):
                (mounted.path / f"d{number}").mkdir()
                for name in range(300):
                    (mounted.path / f"d{number}/{name}").touch()
            eventually(lambda: mounted.stats()["known"] <= 2500)
            assert os.pread(file.fileno(), 4, 0) == b"kept"
        assert len(os.listdir(mounted.path / "d7")) == 300
        assert (mounted.path / "open").read_bytes() == b"kept"
