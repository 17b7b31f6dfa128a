"""The ground that tests stand on must be able to fail: log lines, mounts and processes that nobody declared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
PREAMBLE = "import logging, subprocess, sys\nlog = logging.getLogger('moonclipfs.somewhere')\n"


def run(directory: Path, test: str) -> str:
    """The output of a session of its own, with this project's conftest, over one test."""
    (directory / "conftest.py").write_text(CONFTEST.read_text())
    (directory / "test_inner.py").write_text(PREAMBLE + test)
    (directory / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", directory / "temp"]
    done = subprocess.run([*command, directory], cwd=directory, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize(
    ("test", "closing"),
    [
        ("def test_it():\n    log.info('fine')\n", "1 passed"),
        ("def test_it():\n    log.warning('disk is odd')\n", "1 passed, 1 error"),
        ("def test_it(expect_log):\n    expect_log('disk .* odd')\n    log.warning('disk is odd')\n", "1 passed in"),
        ("def test_it(expect_log):\n    expect_log('disk is odd')\n", "1 passed, 1 error"),
        ("def test_it(expect_log):\n    expect_log('disk')\n    log.error('disk')\n    log.error('x')\n", "1 error"),
    ],
    ids=["info", "undeclared", "declared", "absent", "one of two"],
)
def test_log_lines(tmp_path: Path, test: str, closing: str) -> None:
    assert closing in run(tmp_path, test)


def test_a_process_that_is_left_behind_fails_the_session_and_is_ended(tmp_path: Path) -> None:
    test = (
        "def test_it(tmp_path):\n"
        "    left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(left.pid))\n"
        "    left.returncode = 0\n"
    )
    output = run(tmp_path, test)
    assert "1 passed, 1 error" in output
    assert "left behind: mounts [], processes" in output
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text()
