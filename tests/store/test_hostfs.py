"""What the host says of a path: its file system, and where the index may lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonclipfs.store import hostfs

MOUNTS = r"""
1 0 8:1 / / rw - ext4 /dev/sda rw
2 1 0:5 / /mnt/with\040space rw shared:1 master:2 - nfs4 host:/x rw
3 1 0:6 / /mnt/with\040space/deep rw - tmpfs tmpfs rw
4 1 0:7 / /fuse rw - fuse.sshfs host rw
5 1 0:8 / /fuse rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/mnt/with space", "nfs4"),
        ("/mnt/with space/a/b", "nfs4"),
        ("/mnt/with spaces", "ext4"),
        ("/mnt/with space/deep/x", "tmpfs"),
        ("/fuse/x", "xfs"),
    ],
)
def test_file_system_of_a_path(path: str, kind: str) -> None:
    assert hostfs.file_system_type(Path(path), MOUNTS.strip()) == kind


def test_place_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hostfs, "is_local", lambda path: True)
    assert hostfs.index_path(tmp_path, "id", shared=False) == tmp_path / "index.sqlite"
    shared = hostfs.index_path(tmp_path, "id", shared=True)
    assert shared is not None and shared.parent == tmp_path / "cache" / "moonclipfs" / "id"
    monkeypatch.setattr(hostfs, "is_local", lambda path: False)
    assert hostfs.index_path(tmp_path, "id", shared=False) == shared
    assert hostfs.index_path(tmp_path / "copy", "id", shared=False) != shared
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert hostfs.index_path(tmp_path, "id", shared=False) is None
