"""The flags that the extension adds to the greeting of a mount."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs.fuse.control import ask
from moonclipfs.fuse.initflags import (
    CACHE_SYMLINKS,
    DIRECT_IO_ALLOW_MMAP,
    HANDLE_KILLPRIV_V2,
    PARALLEL_DIROPS,
)
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, eventually, patched_server

extension = pytest.importorskip("moonclipfs._fuseinit")

ALL = PARALLEL_DIROPS | CACHE_SYMLINKS | HANDLE_KILLPRIV_V2 | DIRECT_IO_ALLOW_MMAP
EXT = 1 << 30
INIT = 26


def request(opcode: int, body: bytes, unique: int = 7) -> bytes:
    return struct.pack("<IIQQIIIHH", 40 + len(body), opcode, unique, 1, 0, 0, 0, 0, 0) + body


def init_request(offered: int, unique: int = 7) -> bytes:
    return request(INIT, struct.pack("<5I", 7, 40, 0, offered & 0xFFFFFFFF, offered >> 32) + bytes(44), unique)


def reply(
    flags: int, flags2: int = 0, unique: int = 7, error: int = 0, length: int = 64
) -> tuple[bytearray, bytearray]:
    body = struct.pack("<4I2H2I2H8I", 7, 38, 0, flags, 0, 0, 0, 0, 0, 0, flags2, 0, 0, 0, 0, 0, 0, 0)
    return bytearray(struct.pack("<IiQ", 16 + length, error, unique)), bytearray(body[:length])


def flags_of(body: bytearray) -> int:
    low = int(struct.unpack_from("<I", body, 12)[0])
    return low | (int(struct.unpack_from("<I", body, 32)[0]) << 32 if low & EXT and len(body) >= 36 else 0)


def greet(wanted: int, offered: int, flags: int = 0, **changes: int) -> tuple[int, bytearray]:
    """Arm, let the kernel offer and libfuse answer; return what the kernel gets."""
    extension.arm(wanted)
    extension.feed_request(init_request(offered))
    head, body = reply(flags, **changes)
    extension.feed_reply(head, body)
    return flags_of(body), body


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_only_what_the_kernel_offers_is_added(wanted: int, offered: int, flags: int) -> None:
    flags &= ~EXT
    got, _ = greet(wanted, offered, flags)
    if not offered & EXT:
        offered &= 0xFFFFFFFF
    assert got & ~EXT == (flags | wanted & offered) & ~EXT
    assert extension.granted() == got


def test_an_old_kernel_or_libfuse_gets_what_it_knows() -> None:
    assert greet(ALL, PARALLEL_DIROPS)[0] == PARALLEL_DIROPS
    assert greet(ALL, ALL | EXT, length=24)[0] == ALL & 0xFFFFFFFF  # a short reply has no room for the upper half
    assert greet(ALL, ALL | EXT, flags=EXT, flags2=1 << 3)[0] == ALL | EXT | 1 << 35
    assert greet(ALL, ALL | EXT, flags=5, error=-71)[0] == 5


def test_only_the_reply_to_the_greeting_changes() -> None:
    assert greet(ALL, ALL | EXT, unique=9)[0] == 0
    greet(ALL, ALL | EXT)
    head, body = reply(0)
    extension.feed_reply(head, body)  # answered once already
    assert flags_of(body) == 0


@given(st.binary(max_size=120), st.binary(max_size=40), st.binary(max_size=100))
def test_any_bytes_pass(read: bytes, head: bytes, body: bytes) -> None:
    extension.arm(ALL)
    extension.feed_request(init_request(ALL | EXT, unique=int.from_bytes(head[8:16], "little")))
    extension.feed_request(read)
    extension.feed_reply(bytearray(head), bytearray(body))


def getxattr_request(name: bytes, unique: int = 7) -> bytes:
    return request(22, struct.pack("<II", 24, 0) + name + b"\0", unique)


@pytest.mark.parametrize("name", [b"security.capability", b"security.selinux", b"system.posix_acl_access", b"system."])
def test_attributes_that_no_mount_has_are_refused_at_once(name: bytes) -> None:
    assert extension.refusal(getxattr_request(name, 99)) == struct.pack("<IiQ", 16, -errno.EOPNOTSUPP, 99)


@pytest.mark.parametrize("name", [b"user.security.x", b"trusted.x", b"security", b"system", b"s", b"", b"Security.x"])
def test_other_attributes_are_asked_for(name: bytes) -> None:
    assert extension.refusal(getxattr_request(name)) is None


@given(st.integers(0, 2**32 - 1).filter(lambda opcode: opcode != 22))
def test_other_requests_are_not_refused(opcode: int) -> None:
    assert extension.refusal(request(opcode, bytes(8) + b"security.capability\0")) is None


@given(st.binary(max_size=120), st.integers(0, 80))
def test_any_bytes_may_be_asked_about(data: bytes, length: int) -> None:
    extension.refusal(data)
    assert extension.refusal(getxattr_request(b"security.capability")[: min(length, 57)]) is None


_LONG_REPLY = """
import os, threading
from moonclipfs import _fuseinit

reading, writing = os.pipe()
head, body, sent = b"h" * 16, os.urandom(1 << 20), []
sender = threading.Thread(target=lambda: sent.append(_fuseinit.send(writing, head, body)))
sender.start()
got = b""
while len(got) < len(head + body):
    got += os.read(reading, 1 << 16)
sender.join()
assert got == head + body and sent == [len(got)]
"""


def test_other_threads_go_on_while_a_long_reply_is_copied() -> None:
    """A pipe that is full waits for the reader, who is one of them."""
    subprocess.run([sys.executable, "-c", _LONG_REPLY], check=True, timeout=60)


def test_a_mount_is_not_asked_for_capabilities_before_each_write(live: Mounted) -> None:
    for number in range(20):
        (live.path / f"{number}").write_bytes(b"x")
        with pytest.raises(OSError) as caught:
            os.getxattr(live.path / f"{number}", "security.capability")
        assert caught.value.errno == errno.EOPNOTSUPP
    requests = live.stats()["requests"]
    assert "getxattr" not in requests
    assert requests["write"] == 20
    os.setxattr(live.path / "0", "user.x", b"1")
    assert os.getxattr(live.path / "0", "user.x") == b"1"


@pytest.mark.parametrize("early", [True, False])
def test_the_extension_is_used_only_where_it_comes_first(early: bool) -> None:
    """In an interpreter of its own: pyfuse3, once loaded, is bound to libfuse's own function."""
    lines = ["from moonclipfs.fuse import initflags\ninitflags.load()", "import pyfuse3"]
    code = "\n".join([*(lines if early else lines[::-1]), "print(initflags._extension is not None)"])
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(early)


def test_it_can_be_switched_off() -> None:
    code = "from moonclipfs.fuse import initflags as f\nf.load()\nf.arm(writable=True)\nprint(f.active(), f.granted())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MOONCLIPFS_INIT_FLAGS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "0"]


SLOW_TO_READ = """
from moonclipfs.fuse import initflags
initflags.load()
import os, time, trio
real = trio.lowlevel.wait_readable
async def wait_readable(fd):
    await real(fd)
    while isinstance(fd, int) and os.path.exists({slow!r}):
        time.sleep(0.01)
trio.lowlevel.wait_readable = wait_readable
"""


def test_a_request_that_is_taken_back_stops_nothing(store: Store, tmp_path: Path, fuse: None) -> None:
    """Who asks is killed between the moment when the server learns of the request and that when it reads it."""
    slow, place = tmp_path / "slow", tmp_path / "mnt"
    with patched_server(store.path, place, SLOW_TO_READ.format(slow=str(slow))):
        slow.touch()
        asking = subprocess.Popen([sys.executable, "-c", f"import os; os.statvfs({str(place)!r})"])
        eventually(lambda: "request_wait" in Path(f"/proc/{asking.pid}/wchan").read_text())
        time.sleep(0.1)
        asking.kill()
        asking.wait()
        slow.unlink()
        time.sleep(0.1)
        assert ask(str(place), "ping")["mountpoint"] == str(place)
