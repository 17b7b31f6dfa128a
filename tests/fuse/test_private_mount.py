"""A private store, mounted: its overlays over a base store that is only read, through the kernel, killed and all."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.alternates import make_private_store
from moonclipfs.store.check import verify
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounter, eventually
from tests.store.kit import noise, publish, series
from tests.store.test_alternates import digests


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A base store with one snapshot, on a read-only mount where that can be made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = tmp_path / "base"
    with Store.create(store) as opened:
        publish(opened, "run/1", {"m.safetensors": series(1)[0], "n": noise(1), "gone": noise(2)})
    bound = not subprocess.run(["mount", "--bind", store, store], capture_output=True, check=False).returncode
    if bound:
        subprocess.run(["mount", "-o", "remount,bind,ro", store], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (store / "x").touch()
    yield store
    if bound:
        subprocess.run(["umount", store], check=True)


def test_an_overlay_of_a_mounted_private_store_survives_a_kill(
    mounter: Mounter, tmp_path: Path, base: Path, expect_log: Callable[[str], None]
) -> None:
    expect_log("cleared a dead mount")
    before = digests(base)
    with make_private_store(tmp_path / "state", base) as private, Overlays(private) as overlays:
        overlays.create("x", "run/1")
    mounted = mounter(tmp_path / "state", read_only=False, seal_after=None)
    root = mounted.path / "@overlays/x"
    assert sorted(os.listdir(root)) == ["gone", "m.safetensors", "n"]
    tensors = load_file(root / "m.safetensors")
    tensors["w"] = tensors["w"] * np.float32(1.00001)
    save_file(tensors, root / "m.safetensors")
    (root / "gone").unlink()
    with open(root / "n", "r+b") as file:
        file.seek(10_000)
        file.write(b"changed")
        file.flush()
        os.fsync(file.fileno())
    for name in ("m.safetensors", "n"):
        fd = os.open(root / name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    directory = os.open(root, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    os.kill(mounted.pid, signal.SIGKILL)
    eventually(
        lambda: not Path(f"/proc/{mounted.pid}").exists() or "Z" in Path(f"/proc/{mounted.pid}/stat").read_text()
    )
    assert digests(base) == before

    mounted = mounter(tmp_path / "state", read_only=False, seal_after=None)
    changed = bytearray(noise(1))
    changed[10_000:10_007] = b"changed"
    assert sorted(os.listdir(root)) == ["m.safetensors", "n"]
    assert (root / "n").read_bytes() == changed
    assert np.array_equal(load_file(root / "m.safetensors")["w"], tensors["w"])
    mounted.flush()
    subprocess.run(["fusermount3", "-u", mounted.path], check=True)
    eventually(lambda: not Path(f"/proc/{mounted.pid}").exists())
    with Store.open(tmp_path / "state", write=True) as private, Overlays(private) as overlays:
        overlays.get("x").commit("mine")
        assert verify(private).problems == []
        assert sum(path.stat().st_size for path in (tmp_path / "state/packs").iterdir()) < 60_000, "what changed"
    assert digests(base) == before
