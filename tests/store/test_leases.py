"""Leases: who is alive, what each has seen and holds; stopped, killed, forked and foreign owners."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.errors import LeaseLostError, LimitError, PermissionDeniedError
from moonclipfs.store import hostfs, leases, ofd
from moonclipfs.store.leases import Lease, LeaseState, live_leases


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "leases").mkdir()
    return tmp_path


@pytest.fixture
def lease(root: Path) -> Iterator[Lease]:
    lease = Lease.acquire(root, "test", 0)
    yield lease
    lease.release()


_OTHER = """
import sys
from pathlib import Path
from moonclipfs.store.leases import Lease
lease = Lease.acquire(Path(sys.argv[1]), "other", 5)
lease.hold(3)
print(lease.name, flush=True)
for line in sys.stdin:
    if line == "seen\\n":
        lease.seen(9)
        print("done", flush=True)
    elif line == "check\\n":
        try:
            lease.check()
            print("ours", flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
"""


class Other:
    """Another process with a lease, perhaps in a pid namespace of its own, as a container has."""

    def __init__(self, root: Path, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", _OTHER, str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.name = self.process.stdout.readline().strip()

    def ask(self, question: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other(root: Path) -> Iterator[Other]:
    other = Other(root)
    yield other
    other.end()


def only(root: Path) -> LeaseState:
    (state,) = live_leases(root)
    return state


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root / "leases"))


def test_a_lease_tells_what_it_has_seen_and_holds(root: Path, lease: Lease) -> None:
    state = only(root)
    assert (state.name, state.seen, state.hold, state.pid, state.purpose) == (lease.name, 0, None, os.getpid(), "test")
    lease.seen(7)
    lease.seen(5)
    assert only(root).seen == 7, "what was seen stays seen"
    with lease.hold(4) as hold, lease.hold(6):
        assert only(root).hold == 4
        hold.release()
        hold.release()
        assert only(root).hold == 6
    assert only(root).hold is None
    lease.check()


def test_when_a_condemned_pack_may_go() -> None:
    def state(seen: int, hold: int | None) -> LeaseState:
        return LeaseState("0" * 32, seen, hold, 1, "", "", "", 0)

    assert state(5, None).allows(5) and state(6, 5).allows(5)
    assert not state(4, None).allows(5) and not state(6, 4).allows(5)


def test_release_removes_the_file_and_can_be_repeated(root: Path) -> None:
    lease = Lease.acquire(root, "", 0)
    lease.release()
    lease.release()
    assert names(root) == [] and live_leases(root) == []
    for use in (lease.check, lambda: lease.seen(1), lambda: lease.hold(1)):
        with pytest.raises(LeaseLostError):
            use()


def test_a_hold_released_after_its_lease_is_harmless(root: Path) -> None:
    lease = Lease.acquire(root, "", 0)
    hold = lease.hold(1)
    lease.release()
    hold.release()


def test_a_lease_whose_file_vanished_is_lost(root: Path, lease: Lease) -> None:
    os.unlink(lease.path)
    with pytest.raises(LeaseLostError, match="open the store again"):
        lease.check()
    lease.path.write_bytes(b"another's")
    with pytest.raises(LeaseLostError):
        lease.check()
    lease.release()
    assert names(root) == [lease.path.name], "it is not ours to remove"
    os.unlink(lease.path)


def test_R081_a_killed_owner_is_cleared_at_once_and_a_live_one_is_not(root: Path, other: Other) -> None:
    state = only(root)
    assert (state.name, state.seen, state.hold, state.pid) == (other.name, 5, 3, other.process.pid)
    os.kill(other.process.pid, signal.SIGKILL)
    other.process.wait()
    assert live_leases(root) == [] and names(root) == []


def test_R083_a_stopped_owner_stays_alive(root: Path, other: Other) -> None:
    os.kill(other.process.pid, signal.SIGSTOP)
    assert only(root).name == other.name
    os.kill(other.process.pid, signal.SIGCONT)
    assert other.ask("check") == "ours"
    assert other.ask("seen") == "done" and only(root).seen == 9


def test_R083_an_owner_that_was_taken_for_dead_finds_out(root: Path, other: Other) -> None:
    os.kill(other.process.pid, signal.SIGSTOP)
    os.unlink(root / "leases" / f"{other.name}.lease")
    os.kill(other.process.pid, signal.SIGCONT)
    assert other.ask("check") == "LeaseLostError"


def test_owners_in_other_pid_namespaces(root: Path) -> None:
    """Pids mean nothing there: each is 1 in its own. The lock tells who is alive."""
    prefix = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make a pid namespace")
    first, second = Other(root, *prefix), Other(root, *prefix)
    try:
        states = {state.name: state.pid for state in live_leases(root)}
        assert states == {first.name: 1, second.name: 1}
        first.end()
        deadline = time.monotonic() + 10
        while len(live_leases(root)) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert only(root).name == second.name and second.ask("check") == "ours"
    finally:
        first.end()
        second.end()


def test_a_forked_child_has_no_lease_and_does_not_keep_its_parents(root: Path) -> None:
    """A lock belongs to the open file, which a child would share."""
    script = """
import os, sys, time
from pathlib import Path
from moonclipfs.errors import LeaseLostError
from moonclipfs.store.leases import Lease
lease = Lease.acquire(Path(sys.argv[1]), "parent", 0)
if os.fork() == 0:
    try:
        lease.check()
    except LeaseLostError:
        print("lost", os.getpid(), flush=True)
    lease.release()
    time.sleep(60)
os.kill(os.getpid(), 9)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.wait() == -signal.SIGKILL and process.stdout is not None
    word, child = process.stdout.readline().split()
    assert word == "lost" and live_leases(root) == [] and names(root) == []
    os.kill(int(child), signal.SIGKILL)
    process.stdout.close()


def test_a_childs_release_leaves_the_parents_lease(root: Path, lease: Lease) -> None:
    pid = os.fork()
    if pid == 0:
        lease.release()
        os._exit(0)
    os.waitpid(pid, 0)
    lease.check()
    assert only(root).name == lease.name


def test_release_unlocks_although_a_descriptor_was_inherited(root: Path) -> None:
    lease = Lease.acquire(root, "", 0)
    copy = os.dup(lease._fd)
    lease.release()
    assert not ofd.is_locked(copy) and ofd.lock(copy)
    os.close(copy)


def test_a_torn_or_foreign_file_counts_as_one_that_has_seen_nothing(root: Path, lease: Lease) -> None:
    for content in (b"", b"x" * 5000, b"\0" * 4096, b"0" * 64 + b" []\n"):
        os.truncate(lease.path, 0)
        os.pwrite(lease._fd, content, 0)
        state = only(root)
        assert (state.name, state.seen, state.hold) == (lease.name, 0, 0) and not state.allows(1)
    (root / "leases" / f"{'0' * 32}.lease").touch()
    (root / "leases" / "README").touch()
    assert only(root).name == lease.name
    assert names(root) == sorted([lease.path.name, "README"]), "without a lock it is a dead one's"


@given(content=st.binary(max_size=300))
def test_any_content_is_told_from_a_lease(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("any")
    (root / "leases").mkdir()
    path = root / "leases" / f"{'1' * 32}.lease"
    path.write_bytes(content)
    assert live_leases(root) == [] and not path.exists()


def test_a_reader_never_sees_half_a_lease(root: Path, lease: Lease) -> None:
    stop = threading.Event()

    def rewrite() -> None:
        for number in range(100_000):
            if stop.is_set():
                return
            lease.seen(number)
            with lease.hold(number):
                pass

    thread = threading.Thread(target=rewrite)
    thread.start()
    last = 0
    for _ in range(300):
        state = only(root)
        assert state.purpose == "test" and state.seen >= last
        last = state.seen
    stop.set()
    thread.join()


def test_nothing_is_written_when_nothing_changes(root: Path, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    lease.seen(3)
    writes: list[int] = []
    real = lease._write

    def counting() -> None:
        writes.append(1)
        real()

    monkeypatch.setattr(lease, "_write", counting)
    for _ in range(10):
        lease.seen(3)
    with lease.hold(2), lease.hold(2), lease.hold(3):
        pass
    assert len(writes) == 2, "the oldest hold came and went"


def test_a_file_cleared_before_its_owner_locked_it_is_made_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ofd.lock
    cleared: list[str] = []

    def slow(fd: int) -> bool:
        if not cleared:
            cleared.extend(names(root))
            assert live_leases(root) == []
        return real(fd)

    monkeypatch.setattr(ofd, "lock", slow)
    lease = Lease.acquire(root, "", 0)
    monkeypatch.undo()
    assert cleared and lease.path.name not in cleared and only(root).name == lease.name
    lease.release()


def test_limits_and_permissions(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LimitError):
        Lease.acquire(root, "x" * 3000, 0)
    for purpose in ("\udcff" * 341, "x" * 2046):
        longest = Lease.acquire(root, purpose, 0)
        assert only(root).purpose == purpose
        longest.release()

    def refuse(*arguments: object) -> int:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionDeniedError):
        Lease.acquire(root, "", 0)


def test_a_failed_write_leaves_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Exception, match="full"):
        Lease.acquire(root, "", 0)
    assert names(root) == [] and len(os.listdir("/proc/self/fd")) == before


# Where locks do not reach


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfs, "is_local", lambda path: False)
    monkeypatch.setattr(limits, "LEASE_REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(limits, "LEASE_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(leases, "_observed", {})


def foreign(root: Path) -> Lease:
    """A lease of another host: our lock on it is given up, and its boot id is another."""
    lease = Lease.acquire(root, "foreign", 4)
    with lease._lock:
        ofd.unlock(lease._fd)
    return lease


@pytest.mark.usefixtures("shared")
def test_a_foreign_owner_that_counts_is_alive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_boot_id", lambda: "another")
    lease = foreign(root)
    monkeypatch.setattr(leases, "_boot_id", lambda: "ours")
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        assert only(root).name == lease.name
    lease.release()


@pytest.mark.usefixtures("shared")
def test_a_foreign_owner_is_dead_after_long_silence_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_boot_id", lambda: "another")
    lease = foreign(root)
    lease._stop.set()
    time.sleep(0.1)
    monkeypatch.setattr(leases, "_boot_id", lambda: "ours")
    assert only(root).seen == 4
    assert len(live_leases(root)) == 1, "one look is not a long silence"
    assert live_leases(root, patience=5.0) == [] and names(root) == []
    with pytest.raises(LeaseLostError):
        lease.check()
    lease.release()


@pytest.mark.usefixtures("shared")
def test_where_there_are_no_locks_the_count_alone_tells(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int) -> Callable[..., bool]:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(ofd, "lock", unsupported)
    monkeypatch.setattr(ofd, "is_locked", unsupported)
    monkeypatch.setattr(ofd, "unlock", unsupported)
    lease = Lease.acquire(root, "", 0)
    assert len(live_leases(root, patience=0.8)) == 1
    lease.check()
    lease._stop.set()
    assert live_leases(root, patience=5.0) == []
    lease.release()
