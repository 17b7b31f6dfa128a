"""The small parts of the fuse room: the table of nodes, streams, the list of mounts, the control socket."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.errors import MountError, NotFoundError, PermissionDeniedError, TooManyOpenError, UsageError
from moonclipfs.fuse import mount as mount_module
from moonclipfs.fuse import mounts, nodes
from moonclipfs.fuse.control import ask, runtime_directory, runtime_path, server_pid
from moonclipfs.fuse.handles import FileHandle
from moonclipfs.fuse.holders import Holder, find_holders
from moonclipfs.fuse.mount import mount
from moonclipfs.fuse.mounts import mount_at, mount_source
from moonclipfs.fuse.nodes import NodeTable
from moonclipfs.layers.names import Area
from moonclipfs.layers.tree import ROOT_INODE, Node, inode_number
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, Entry, EntryType
from tests.fuse.conftest import Mounted


def node(path: str) -> Node:
    return Node(Area.LIVE, path.encode(), Entry(b"", EntryType.DIRECTORY, Attributes(0o755)))


def test_a_node_stays_until_it_is_forgotten_as_often_as_it_was_named() -> None:
    table = NodeTable(node(""))
    inode = table.remember(node("a"))
    assert table.remember(node("a")) == inode
    table.forget(inode, 1)
    assert table[inode].path == b"a"
    table.forget(inode, 1)
    assert table.find(node("a")) is None
    assert len(table) == 1
    table.forget(inode, 1)
    table.forget(ROOT_INODE, 99)
    assert table[ROOT_INODE].path == b""


def test_two_files_never_share_an_inode_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files whose inode numbers collide get different ones while both are known."""
    own = node("a").identity.count(b"\0")
    monkeypatch.setattr(nodes, "inode_number", lambda text: 77 if text.count(b"\0") == own else inode_number(text))
    table = NodeTable(node(""))
    first, second = table.remember(node("a")), table.remember(node("b"))
    assert first == 77
    assert second != first
    assert table.remember(node("b")) == second
    assert (table[first].path, table[second].path) == (b"a", b"b")
    table.forget(first, 1)
    assert table[second].path == b"b"
    assert table.find(node("b")) == second
    table.forget(second, 2)
    assert table.find(node("b")) is None
    assert table.remember(node("b")) == 77


def test_the_table_of_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NODES", 3)
    table = NodeTable(node(""))
    table.remember(node("a"))
    table.remember(node("b"))
    with pytest.raises(TooManyOpenError, match="knows 3 names"):
        table.remember(node("c"))
    assert table.remember(node("a"))
    assert [known.path for known in table.oldest(5)] == [b"a", b"b"]


def test_what_the_kernel_keeps_does_not_stand_in_the_way_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is known is offered in turn, however much of it, files or directories, the kernel does not give up."""
    table, file = NodeTable(node("")), node("file")
    file = file._replace(entry=Entry(b"", EntryType.FILE, Attributes(0o644)))
    kept = table.remember(file)
    directories = [table.remember(node(f"d{number}")) for number in range(40)]
    offered = [known.path for _ in range(12) for known in table.oldest(8)]
    assert {f"d{number}".encode() for number in range(40)} <= set(offered)
    for inode in directories[20:]:
        table.forget(inode, 1)
    assert table[kept] == file
    assert len(table) == 22


class NoReader(FileReader):
    """A reader that is not read."""

    def __init__(self) -> None:
        self.size = 1 << 40


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=40))
def test_streams_are_told_apart(reads: list[tuple[int, int]]) -> None:
    """Reads of several sequential readers, in any mixture, are each told as continuing their own."""
    handle = FileHandle(node("f"), NoReader(), 1)
    places = {reader: reader << 30 for reader in range(6)}
    started = set()
    for reader, size in reads:
        stream = handle.follow(places[reader], size)
        assert (stream is not None) == (reader in started or reader == 0)
        started.add(reader)
        places[reader] += size
    assert len(handle.streams) <= limits.STREAMS


def test_many_random_reads_keep_no_streams() -> None:
    handle = FileHandle(node("f"), NoReader(), 1)
    for number in range(1000):
        assert handle.follow(1 + number * 100_000, 4096) is None
    assert len(handle.streams) == limits.STREAMS


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_store_paths_survive_the_list_of_mounts(path: str) -> None:
    source = mount_source("/" + path)
    assert source.isascii()
    assert not set(source) & set(", \\\n\t")
    line = f"1 2 0:40 / /mnt rw - {mounts.FILE_SYSTEM} {source} rw"
    parsed = mounts._parse(line)
    assert parsed is not None
    assert parsed.store == "/" + path


def test_the_list_of_mounts_is_read() -> None:
    line = r"36 35 0:45 / /mnt/a\040b\134c ro,nosuid shared:1 - fuse.moonclipfs /data/s%20t ro,user_id=0"
    found = mounts._parse(line)
    assert found == mounts.Mount(36, "0:45", "/mnt/a b\\c", "fuse.moonclipfs", "/data/s%20t", owner=0)
    assert found.is_ours
    assert found.store == "/data/s t"
    assert mounts._parse("garbage") is None
    root = mount_at("/")
    assert root is not None
    assert not root.is_ours


def test_holders_are_found_without_touching_the_mount(tmp_path: Path) -> None:
    """Here for an ordinary mount: whoever holds a file, a map or its directory on it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs takes root")
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        found = mount_at(str(tmp_path))
        assert found is not None
        assert find_holders(found) == []
        sleeper = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
        with open(tmp_path / "x", "w"):
            holders = find_holders(found)
        sleeper.kill()
        sleeper.wait()
        assert [(holder.pid, holder.path) for holder in holders] == sorted(
            [(os.getpid(), str(tmp_path / "x")), (sleeper.pid, str(tmp_path))]
        )
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_who_unmounts_is_named_only_when_nobody_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    mount = mounts.Mount(1, "0:99999", "/mnt/x", "fuse.moonclipfs", "/data/store")
    own, other = Holder(os.getpid(), "moonclipfs", "/mnt/x"), Holder(1, "bash", "/mnt/x")
    monkeypatch.setattr(mount_module, "find_holders", lambda _: [own, other])
    assert mount_module._busy(mount).splitlines()[1:] == ["  pid 1 (bash): /mnt/x"]
    monkeypatch.setattr(mount_module, "find_holders", lambda _: [own])
    assert f"pid {own.pid} " in mount_module._busy(mount)


def test_the_control_socket_answers_its_owner(small: Mounted) -> None:
    """The control socket is of mode 0600, answers one JSON object a line, and survives nonsense."""
    path = runtime_path(str(small.path), "sock")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ask(str(small.path), "ping") == {"pid": small.pid, "store": str(small.store), "mountpoint": str(small.path)}
    assert server_pid(str(small.path)) == small.pid
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        lines = client.makefile("rb")
        for nonsense in (b"{}", b"nonsense", b'{"op": "rm"}', b"[1]", b'{"op": ["x"]}', b"\xff", b"[" * 50_000):
            client.sendall(nonsense + b"\n")
            answer = json.loads(lines.readline())
            assert answer["error"] == "UsageError"
            assert "ping" in answer["message"]
        client.sendall(b'{"op": "ping"}\n{"op": "pi')
        assert json.loads(lines.readline())["pid"] == small.pid
        client.sendall(b"x" * (limits.CONTROL_LINE_BYTES + 1))
        try:
            assert lines.readline() == b""
        except ConnectionResetError:
            pass
        lines.close()
    with pytest.raises(UsageError, match="a request is"):
        ask(str(small.path), "nonsense")
    with pytest.raises(NotFoundError, match="nothing answers for the mount at"):
        ask(str(small.path) + "x", "ping")


def test_silent_clients_starve_nobody(live: Mounted) -> None:
    """Past the bound, who is silent for the longest time is dropped, and whoever asks is answered."""
    clients = [socket.socket(socket.AF_UNIX) for _ in range(limits.CONTROL_CONNECTIONS)]
    try:
        for client in clients:
            client.settimeout(10)
            client.connect(str(runtime_path(str(live.path), "sock")))
        for _ in range(3):
            assert ask(str(live.path), "ping")["pid"] == live.pid
            assert ask(str(live.path), "status")["staged_files"] == 0
        assert clients[0].recv(1) == b""
        clients[-1].sendall(b'{"op": "ping"}\n')
        assert json.loads(clients[-1].recv(4096))["pid"] == live.pid
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "restore", "name": 5},
        {"op": "restore", "name": "run1/a", "number": "1"},
        {"op": "restore", "name": "run1/a", "number": True},
        {"op": "restore", "name": "run1/a", "to": ["x"]},
        {"op": "restore"},
        {"op": "clone", "source": "run1/a", "target": 5},
        {"op": "clone", "source": {}, "target": "x"},
        {"op": "seal", "path": 5},
        {"op": "seal", "path": None},
        {"op": "seal", "path": "run1/a", "wait": "no"},
    ],
    ids=str,
)
def test_arguments_of_another_type_are_told(live: Mounted, request_: dict[str, object]) -> None:
    name = request_.pop("op")
    with pytest.raises(UsageError, match="is to be a JSON value of type"):
        ask(str(live.path), str(name), **request_)
    assert "ERROR" not in live.log_text()


def test_another_users_runtime_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets and logs lie in a directory of this user alone, never in one that another may have made."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert stat.S_IMODE(runtime_directory().stat().st_mode) == 0o700
    (tmp_path / "moonclipfs").chmod(0o777)
    with pytest.raises(PermissionDeniedError, match="yours alone"):
        runtime_directory()
    (tmp_path / "moonclipfs").rmdir()
    os.symlink("/tmp", tmp_path / "moonclipfs")
    with pytest.raises(PermissionDeniedError, match="yours alone"):
        runtime_directory()
    (tmp_path / "moonclipfs").unlink()
    (tmp_path / "moonclipfs").write_bytes(b"")
    with pytest.raises(PermissionDeniedError):
        runtime_directory()


def test_a_socket_path_that_is_too_long_is_told(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / ("x" * 100)
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    (tmp_path / "mnt").mkdir()
    with pytest.raises(MountError, match="XDG_RUNTIME_DIR"):
        mount(store.path, tmp_path / "mnt")
