"""Many writers of one log: one order for all, and no record lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import BusyError, ExistsError
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.log import Log, Names
from tests.faults import CountingOps, NoLinkOps, PausingOps
from tests.store.logkit import bind, root_id


@pytest.mark.parametrize("links", [True, False])
def test_writers_race_for_numbers_and_none_is_lost(root: Path, links: bool) -> None:
    def work(name: str) -> None:
        log = Log(LocalBackend(root, None if links else NoLinkOps()))
        for number in range(10):
            bind(log, f"{name}/{number}")
            bind(log, "shared", number)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = Log(LocalBackend(root)).refresh()
    assert not names.damaged and len(names.bound()) == 31
    assert [version.number for version in names.versions("shared")] == list(range(1, 31))


def test_a_loser_sees_the_newest_names(root: Path) -> None:
    rival = Log(LocalBackend(root))

    def meanwhile() -> None:
        bind(rival, "a", 9)

    log = Log(LocalBackend(root, PausingOps("link", "log/", meanwhile)))
    seen: list[int] = []
    version = log.bind("a", root_id(1), {}, check=lambda names: seen.append(names.sequence))
    assert seen == [0, 1] and (version.number, version.sequence) == (2, 2)


def test_a_check_that_raises_gives_up(log: Log, root: Path) -> None:
    def refuse(names: Names) -> None:
        raise ExistsError("not today")

    with pytest.raises(ExistsError, match="not today"):
        log.bind("a", root_id(1), {}, check=refuse)
    assert os.listdir(root / "log") == []


def test_always_losing_ends_in_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COMMIT_ATTEMPTS", 5)
    rival = Log(LocalBackend(root))

    class Slow(CountingOps):
        def link(self, source: str, target: str) -> None:
            bind(rival, "rival")
            super().link(source, target)

    with pytest.raises(BusyError, match="5 attempts"):
        bind(Log(LocalBackend(root, Slow())), "a")


def test_a_record_waits_for_those_before_it_to_be_durable(root: Path) -> None:
    """Else a crash might keep the later one alone: a gap."""
    first, second = CountingOps(), CountingOps()
    a, b = Log(LocalBackend(root, first)), Log(LocalBackend(root, second))
    bind(a, "a")
    assert first.calls["fsync"] == 3, "packs/, the record, log/"
    bind(a, "a")
    assert first.calls["fsync"] == 6
    bind(b, "b")
    assert second.calls["fsync"] == 4, "and log/ once more, for the records of the other"


_WRITER = """
import sys
from pathlib import Path
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.log import Log
log = Log(LocalBackend(Path(sys.argv[1])))
sys.stdin.readline()
for number in range(20):
    log.bind(f"{sys.argv[2]}/{number}", bytes(32), {})
    log.bind("shared", bytes(32), {"by": sys.argv[2]})
"""


def test_processes_and_containers_race_for_numbers(root: Path) -> None:
    """One of them in a pid namespace of its own, one stopped and continued in between: no record is lost."""
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        container = []  # this user cannot make a pid namespace: a plain process races instead
    writers = [
        subprocess.Popen([*prefix, sys.executable, "-c", _WRITER, str(root), name], stdin=subprocess.PIPE)
        for name, prefix in (("a", []), ("b", container), ("c", []))
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.close()
    reader = Log(LocalBackend(root))
    while reader.refresh().sequence < 10 and writers[0].poll() is None:
        time.sleep(0.01)
    writers[0].send_signal(signal.SIGSTOP)
    before = reader.refresh().sequence
    while reader.refresh().sequence < before + 10 and writers[1].poll() is None:
        time.sleep(0.01)
    writers[0].send_signal(signal.SIGCONT)
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    names = Log(LocalBackend(root)).refresh()
    assert not names.damaged and len(names.bound()) == 61
    assert [version.number for version in names.versions("shared")] == list(range(1, 61))
