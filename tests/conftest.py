"""What every test stands on: hypothesis profiles, unexpected log lines as failures, nothing left behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from moonclipfs.store.store import Store
    from tests.nobody import Nobody

hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("soak", max_examples=5000, deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

SESSION_VARIABLE = "MOONCLIPFS_TEST_SESSION"
"""In the environment of everything that a test session starts, so that what outlives it is told from the rest."""


class _Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


@pytest.fixture(autouse=True)
def expect_log() -> Iterator[Callable[[str], None]]:
    """Fail a test that logs a warning or worse which it did not declare, or declares one that never comes.

    Use: `expect_log(r"pack .* is damaged")`, before or after; the pattern is searched in "LEVEL logger: message".
    """
    recorder, patterns = _Recorder(), []
    logger = logging.getLogger("moonclipfs")
    logger.addHandler(recorder)
    yield patterns.append
    logger.removeHandler(recorder)
    unexpected = [line for line in recorder.lines if not any(re.search(pattern, line) for pattern in patterns)]
    absent = [pattern for pattern in patterns if not any(re.search(pattern, line) for line in recorder.lines)]
    if unexpected:
        pytest.fail("unexpected log lines:\n" + "\n".join(unexpected), pytrace=False)
    if absent:
        pytest.fail(f"declared log lines that did not come: {absent}; what came: {recorder.lines}", pytrace=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new, empty store, open for writing."""
    from moonclipfs.store.store import Store

    Store.create(tmp_path / "store").close()
    with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "index.sqlite") as opened:
        yield opened


@pytest.fixture
def nobody() -> Nobody:
    """A user whom permissions bind, even where the tests run as root."""
    from tests.nobody import Nobody

    return Nobody()


def _session_processes(mark: str) -> dict[int, str]:
    """Pid to command line of every other process that carries this session's mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{SESSION_VARIABLE}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # gone meanwhile, or another user's
    return {pid: command for pid, command in found.items() if command}  # a zombie has no command line


def _mounts_below(directory: Path) -> list[str]:
    """Mountpoints of moonclipfs below a directory."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        mountpoint = before.split()[4].encode().decode("unicode_escape")
        if after.split()[0].startswith("fuse") and Path(mountpoint).is_relative_to(directory):
            found.append(mountpoint)
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a session that leaves a mount or a process, after clearing it away."""
    mark = uuid.uuid4().hex
    # What nohup, or a shell for its background jobs, ignores, programs that are started here would ignore too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.environ[SESSION_VARIABLE] = mark
    yield
    mounts = _mounts_below(tmp_path_factory.getbasetemp())
    processes = _session_processes(mark)
    for mountpoint in mounts:
        subprocess.run(["fusermount3", "-uz", mountpoint], check=False)
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if mounts or processes:
        pytest.fail(f"left behind: mounts {mounts}, processes {processes}", pytrace=False)
