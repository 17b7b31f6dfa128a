"""A mount beside a plain directory, where every user of the host can reach both."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from moonclipfs.fuse.mount import unmount
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, empty_overlay, fuse, mounter, overlays

__all__ = ["empty_overlay", "fuse", "mounted", "mounter", "overlays", "shared", "writable"]


class Shared(NamedTuple):
    """Two directories of mode 1777: one of a mount that lets all users in, one of the disk."""

    mounted: Mounted
    mount: Path
    plain: Path


@pytest.fixture
def mounted(store: Store, mounter: Mounter) -> Mounted:
    """An empty mount that can be written to."""
    return mounter(store.path, read_only=False)


@pytest.fixture(params=["mounted", "empty_overlay"])
def writable(request: pytest.FixtureRequest) -> Mounted:
    """An empty place to write to: a mount, or an overlay of one."""
    found: Mounted = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def shared(store: Store, mounter: Mounter) -> Iterator[Shared]:
    """A mount for all users, and a plain directory."""
    if os.geteuid() != 0:
        pytest.skip("being another user takes root")
    base = Path(tempfile.mkdtemp(prefix="moonclipfs-posix-"))
    base.chmod(0o755)
    try:
        mounted = mounter(store.path, base / "mnt", read_only=False, allow_other=True)
        place = Shared(mounted, base / "mnt/side", base / "side")
        for path in place[1:]:
            path.mkdir()
            path.chmod(0o1777)
        yield place
        assert "ERROR" not in mounted.log_text()
        unmount(base / "mnt")
    finally:
        if not os.path.ismount(base / "mnt"):
            shutil.rmtree(base)
