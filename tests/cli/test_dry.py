"""`run --dry-run`: a command works on checkpoints as if they were its own; what it changed is told, and is gone."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.overlaydirs import overlay_names
from moonclipfs.store.store import Store
from tests.cli.conftest import Run
from tests.cli.test_run import PROGRAM, environment, fuse, ready

__all__ = ["environment", "fuse"]


@pytest.fixture
def store(filled: Path) -> Iterator[Path]:
    """A store that is the same in the end, and in which nothing is left of any dry run once it is worked with."""
    before = bound(filled)
    yield filled
    assert bound(filled) == before
    with Store.open(filled, write=True) as opened:
        assert not verify(opened).problems
        collect(opened)
    assert overlay_names(filled) == [] and not list((filled / "layers").glob("overlay.*"))


def bound(store: Path) -> dict[str, tuple[int, bytes]]:
    with Store.open(store) as opened:
        return {name: (version.number, version.root) for name, version in opened.names().bound().items()}


def dry(environment: dict[str, str], store: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run with a script for sh as the last word."""
    *options, script = map(str, words)
    command = [*PROGRAM, "--dry-run", str(store), *options, "--", "sh", "-c", script, "sh", "{dir}"]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60, check=False)


def test_what_would_change_is_told_and_nothing_is_kept(environment: dict[str, str], store: Path) -> None:
    """run --dry-run tells what its command changed, and keeps nothing of it."""
    script = (
        'test "$1" = "$MOONCLIPFS_DRY_RUN" && cd "$1" && ls && rm config.json && echo x > new'
        " && printf y | dd of=model.safetensors bs=1 seek=100000 conv=notrunc 2>/dev/null; exit 5"
    )
    done = dry(environment, store, "--base", "run1/step-2", script)
    assert done.returncode == 5
    assert done.stdout.split() == ["config.json", "latest", "model.safetensors", "notes"]
    lines = done.stderr.splitlines()
    assert lines[:4] == ["- config.json", "~ model.safetensors", "+ new", "tensors:"]
    assert "head" in lines[4] or "frozen" in lines[4]
    assert lines[-1] == "3 paths: 1 removed, 1 changed, 1 added; 1 tensor: 1 changed"


def test_the_whole_store(environment: dict[str, str], store: Path) -> None:
    """Without a base, all snapshots are there, at their names, and can be removed, moved and written to."""
    script = (
        'cd "$1" && rm -r run1/step-1 && mv run1/step-2 moved && mkdir new && echo x > new/f && echo y > other/more'
    )
    done = dry(environment, store, script)
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert "- run1/step-1/" in lines and "+ moved/" in lines and "+ new/f" in lines and "+ other/more" in lines
    assert "- run1/step-10/" not in lines


def test_nothing_gets_out_of_it_by_accident(environment: dict[str, str], store: Path, tmp_path: Path) -> None:
    """Sealing, storing, committing or forgetting something of a dry run is an error that says so."""
    one = [
        ["seal", "DIR"], ["flush", "DIR"], ["add", store, "DIR"], ["watch", "--once", "DIR", store],
        ["overlay", "commit", "DIR"],
    ]  # fmt: skip
    whole = [
        ["seal", "DIR/run1/step-2"], ["forget", "DIR/run1/step-2"], ["clone", "DIR/run1/step-2", "DIR/copy"],
        ["add", "DIR/run1", tmp_path / "src" / "step-1"],
    ]  # fmt: skip
    for options, commands in ((["--base", "run1/step-2"], one), ([], whole)):
        lines = [[str(word).replace("DIR", "{dir}") for word in command] for command in commands]
        program = f"from moonclipfs.cli.main import main\nfor line in {lines}: print(main(line))"
        done = subprocess.run(
            [*PROGRAM, "--dry-run", str(store), *options, "--", sys.executable, "-c", program],
            env=environment, text=True, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout.split() == ["2"] * len(commands)
        said = done.stderr.splitlines()[: len(commands)]
        assert all("dry run" in line for line in said), said


def test_commit(environment: dict[str, str], filled: Path, tmp_path: Path, run: Run) -> None:
    """run --dry-run --commit makes a snapshot of what its command left, when that succeeds, and only then."""
    script = 'echo x > "$1/new"'
    report = tmp_path / "report.json"
    words = ("--base", "run1/step-2", "--commit", "--as", "kept", "--report", report)
    failed = dry(environment, filled, *words, script + "; exit 3")
    assert failed.returncode == 3 and "nothing is committed" in failed.stderr
    assert "kept" not in bound(filled)
    done = dry(environment, filled, *words, script)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[-1].startswith("kept@1: 4 files")
    assert [one["path"] for one in json.loads(report.read_text())["files"]] == ["new"]
    assert run("diff", f"{filled}:kept", f"{filled}:run1/step-2").out.startswith("removed  file new")
    assert overlay_names(filled) == []


@pytest.mark.slow
def test_quota(environment: dict[str, str], store: Path) -> None:
    script = 'head -c 3000000 /dev/zero > "$1/big"; rm "$1/big"; head -c 200000 /dev/urandom > "$1/small" && echo fits'
    done = dry(environment, store, "--base", "run1/step-2", "--quota", "1M", script)
    assert "uota exceeded" in done.stderr and done.stdout == "fits\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dry-run", "--commit"], "--base"),
        (["--dry-run", "--base", "run1/step-2", "--as", "x"], "--commit"),
        (["--dry-run", "--layer", "x"], "exclude"),
        (["--dry-run", "--base", "/etc"], "in no mount"),
        (["--base", "run1/step-2"], "--dry-run"),
        (["--report", "x"], "--dry-run"),
    ],
)
def test_what_does_not_go_together(run: Run, filled: Path, words: list[str], says: str) -> None:
    found = run("run", filled, *words, "--", "true")
    assert found.code == 2 and says in found.err and found.err.count("\n") == 1


def test_a_base_that_is_not_there(environment: dict[str, str], store: Path) -> None:
    done = dry(environment, store, "--base", "run1/step-3", "echo ran")
    assert (done.returncode, done.stdout) == (3, "") and "did you mean" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("victim", ["program", "server", pytest.param("command", marks=pytest.mark.slow)])
def test_killed_at_any_place_nothing_is_left(environment: dict[str, str], store: Path, victim: str) -> None:
    """run --dry-run, its server or its command may be killed at any moment: nothing is left of it."""
    script = 'echo x > "$1/new"; head -c 500000 /dev/urandom > "$1/model.safetensors"; echo "$1"; read -r _'
    command = [*PROGRAM, "--dry-run", str(store), "--base", "run1/step-2", "--", "sh", "-c", script, "sh", "{dir}"]
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE
    )
    place = ready(process)
    server, child = children(process.pid)
    os.kill({"program": process.pid, "server": server, "command": child}[victim], signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode != 0
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in (server, child)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if victim == "program":  # its server has removed the directory that was made for it
        assert not list(Path(environment["TMPDIR"]).iterdir())
    if victim != "command":  # who was killed clears nothing away
        clear(Path(environment["TMPDIR"]), Path(environment["XDG_RUNTIME_DIR"]))
    assert not Path(place).exists()


def children(pid: int) -> list[int]:
    """Of `run`: its server, and the command."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(map(int, listed))


def clear(*directories: Path) -> None:
    for directory in directories:
        for path in sorted(directory.rglob("*"), reverse=True):
            if not path.is_dir():
                path.unlink()
            elif path.name != "moonclipfs":
                path.rmdir()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signals_go_to_the_command_and_what_it_changed_is_told(
    environment: dict[str, str], store: Path, number: signal.Signals
) -> None:
    script = 'trap "exit 9" INT TERM; echo x > "$1/new"; echo there; while :; do sleep 0.1; done'
    command = [*PROGRAM, "--dry-run", str(store), "--base", "run1/step-2", "--", "sh", "-c", script, "sh", "{dir}"]
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert ready(process) == "there"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 9
    assert said.splitlines()[:2] == ["+ new", "1 path: 1 added"]


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("kept\n", True),
        pytest.param("\n", False, marks=pytest.mark.slow),
        pytest.param("\x03", False, marks=pytest.mark.slow),
    ],
)
def test_a_person_is_asked(environment: dict[str, str], filled: Path, answer: str, kept: bool) -> None:
    """On a terminal: a name keeps it; an empty line and Ctrl-C do not."""
    command = [*PROGRAM, "--dry-run", str(filled), "--base", "run1/step-2", "--", "sh", "-c", "echo x > {dir}/new"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, environment)
    said = read_until(terminal, b"discard)")
    assert b"+ new" in said
    os.write(terminal, answer.encode())
    rest = read_until(terminal, None)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, (said, rest)
    assert ("kept" in bound(filled)) == kept
    assert (b"kept@1: 4 files" in rest) == kept
    assert overlay_names(filled) == []


def read_until(terminal: int, mark: bytes | None) -> bytes:
    """What is said on a terminal up to a mark, or its end."""
    said, deadline = b"", time.monotonic() + 40
    while time.monotonic() < deadline and (mark is None or mark not in said):
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                data = os.read(terminal, 4096)
            except OSError:  # the other end was closed
                break
            if not data:
                break
            said += data
    return said


@pytest.mark.slow
def test_beside_a_mount_of_the_same_store(environment: dict[str, str], store: Path, tmp_path: Path) -> None:
    """A dry run needs no layer that a mount has, and sees what is sealed."""
    from moonclipfs.fuse.mount import mount, unmount

    place = tmp_path / "mnt"
    place.mkdir()
    mount(store, place)
    try:
        done = dry(environment, store, "--base", "run1/step-2", 'echo x > "$1/new"')
        assert (done.returncode, done.stderr.splitlines()) == (0, ["+ new", "1 path: 1 added"])
        assert not (place / "run1" / "step-2" / "new").exists()
    finally:
        unmount(place)
