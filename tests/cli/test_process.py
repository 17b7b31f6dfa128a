"""Commands as processes: pipes, terminals, signals, mounts, and every kind of mistake."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

import moonclipfs
from moonclipfs.cli.main import COMMANDS
from moonclipfs.fuse.control import server_pid
from moonclipfs.fuse.mounts import mount_at
from moonclipfs.fuse.prepare import check_device
from tests.cli.conftest import Run

ROOT = Path(__file__).parent.parent.parent
PROGRAM = [sys.executable, "-c", "import sys; from moonclipfs.cli.main import main; sys.exit(main())"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found.pop("MOONCLIPFS_STORE", None)
    return found


def spawn(environment: dict[str, str], *arguments: object, **options: int) -> subprocess.Popen[bytes]:
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, **options)


def test_the_output_of_a_pipe_has_no_progress(environment: dict[str, str], filled: Path, tmp_path: Path) -> None:
    for command in (["export", f"{filled}:run1", tmp_path / "out"], ["verify", filled], ["gc", filled]):
        process = spawn(environment, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate()
        assert (process.returncode, err) == (0, b""), out


def test_a_terminal_sees_progress_with_the_ratio(environment: dict[str, str], filled: Path, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    (tmp_path / "more").mkdir()
    for number in range(8):
        (tmp_path / "more" / f"{number}.bin").write_bytes(bytes([number]) * (4 << 20))
    process = spawn(
        {**environment, "TQDM_MININTERVAL": "0"},
        *("add", filled, tmp_path / "more"),
        stdout=subprocess.PIPE,
        stderr=follower,
    )
    os.close(follower)
    seen = b""
    while select.select([leader], [], [], 60)[0]:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        seen += data
    assert process.wait() == 0
    assert process.stdout is not None
    assert b"more@1: 8 files, 32.0 MiB stored in " in process.stdout.read()
    process.stdout.close()
    os.close(leader)
    text = seen.decode(errors="replace")
    assert "adding" in text
    assert re.search(r"B/s", text)
    assert re.search(r"ratio \d", text), text[-400:]


@pytest.mark.parametrize("command", [["ls", "-R", "STORE:long"], ["log", "STORE"], ["show", "--json", "STORE:long"]])
def test_a_reader_that_goes_away(
    environment: dict[str, str], run: Run, filled: Path, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "long").mkdir()
    for number in range(3000):
        (tmp_path / "long" / f"{number:0200}").touch()
    assert run("add", filled, tmp_path / "long").code == 0
    arguments = [word.replace("STORE", str(filled)) for word in command]
    process = spawn(environment, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 128 + signal.SIGPIPE


def test_ctrl_c_is_one_line_and_leaves_nothing_visible(
    environment: dict[str, str], run: Run, filled: Path, tmp_path: Path
) -> None:
    with open(tmp_path / "big", "wb") as file:
        for _ in range(24):
            file.write(os.urandom(8 << 20))
    process = spawn(environment, "add", filled, tmp_path / "big", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list((filled / "tmp").iterdir()) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"moonclipfs: interrupted\n")
    assert [one["name"] for one in run("ls", "--json", filled).json] == [
        "other",
        *(f"run1/step-{n}" for n in (1, 2, 10)),
    ]
    assert run("verify", filled).code == 0


def test_warnings_are_lines_of_their_own(environment: dict[str, str], filled: Path) -> None:
    record = max((filled / "log").iterdir())
    record.chmod(0o600)
    record.write_bytes(b"{}")
    process = spawn(environment, "ls", filled, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert process.returncode == 0
    assert b"run1/step-2 " in out
    assert b"run1/step-10" not in out
    assert re.fullmatch(rb"moonclipfs: .*" + record.name.encode() + rb".*left out\n", err), err


def test_the_console_script_is_declared() -> None:
    assert 'moonclipfs = "moonclipfs.cli.main:main"' in (ROOT / "pyproject.toml").read_text()


class TestMount:
    """mount, umount, and paths inside a mount."""

    @pytest.fixture
    def mounted(self, run: Run, filled: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
        try:
            check_device()
        except Exception as error:
            pytest.skip(str(error))
        place = tmp_path / "mnt"
        place.mkdir()
        done = run("mount", "--log", tmp_path / "mount.log", filled, place)
        assert done.code == 0, done.err
        assert done.out == f"mounted {filled} at {place}\n"
        pid = server_pid(str(place))
        yield place
        if mount_at(str(place)) is not None:
            subprocess.run(["fusermount3", "-uz", str(place)], check=True)
        if pid is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def test_paths_in_a_mount_are_targets(self, run: Run, mounted: Path, filled: Path, tmp_path: Path) -> None:
        assert run("ls", mounted).out == run("ls", filled).out
        assert next(one["name"] for one in run("ls", "--json", mounted / "run1").json) == "run1/step-1"
        model = "run1/step-2/model.safetensors"
        assert run("show", mounted / model).out == run("show", f"{filled}:{model}").out
        assert run("show", mounted / "@latest" / "run1" / "notes").out.startswith("notes/a b.txt  ")
        versions = mounted / "@versions" / "run1" / "step-2" / "1"
        assert run("ls", versions / "notes").out == run("ls", f"{filled}:run1/step-2@1/notes").out
        assert run("ls", f"{mounted}:other").code == 0
        same = run("diff", mounted / "run1" / "step-2", tmp_path / "src" / "step-2")
        assert (same.code, same.out) == (0, "3 tensors: 3 unchanged\n")
        assert run("du", "--json", mounted / "run1").json["snapshots"][0]["name"] == "run1/step-1"
        assert run("stats", mounted).code == 0
        with moonclipfs.open(versions) as snapshot:
            assert (snapshot.name, snapshot.version.number) == ("run1/step-2", 1)
        with moonclipfs.open(mounted) as reader:
            assert "other" in reader.snapshots()
        assert run("add", mounted, tmp_path / "other.bin", "--as", "new").code == 0
        deadline = time.monotonic() + 10
        while not (mounted / "new").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert run("export", mounted / "new", tmp_path / "exported").code == 0
        assert run("show", mounted / "absent").code in (3, 9)

    def test_doctor_sees_the_mount(self, run: Run, mounted: Path) -> None:
        told = [one for one in run("doctor", "--json", mounted).json if one["what"] == "mount"]
        assert any(str(mounted) in one["text"] and one["state"] == "ok" for one in told)

    def test_umount(self, run: Run, mounted: Path, filled: Path) -> None:
        assert run("mount", filled, mounted).code == 8
        with open(mounted / "run1" / "step-1" / "config.json"):
            busy = run("umount", mounted)
            assert busy.code == 8
            first, second = busy.err.splitlines()
            assert first.startswith("moonclipfs: ")
            assert second.startswith(f"  pid {os.getpid()} ")
            assert "config.json" in second
            assert run("umount", "--lazy", mounted).code == 0
        assert run("umount", mounted).code == 3

    def test_mistakes(self, run: Run, filled: Path, tmp_path: Path) -> None:
        assert run("mount", filled).code == 2
        assert run("mount", filled, tmp_path / "absent").code == 3
        assert run("mount", f"{filled}:other", tmp_path).code == 2
        assert run("mount", filled, tmp_path, "third").code == 2
        assert run("umount", tmp_path).code == 3


WRONG = [
    *("absent", "FILE", "DIRECTORY", "STORE", "STORE:", "STORE:absent", "STORE:run1", "STORE:run1/step-1@99"),
    *(
        "STORE:run1/step-1@1/absent",
        "STORE:../..",
        "STORE:@versions",
        "STORE:\x1b[2J",
        "STORE:" + "n" * 5000,
        ":x",
        "a:b:c",
    ),
    *(
        "",
        "-",
        "--",
        "--bogus",
        "STORE:run1/step-1/config.json/x",
        "UNREADABLE",
        "BROKEN",
        "/dev/null",
        "/proc/self/mem",
    ),
]


@pytest.fixture
def wrong(filled: Path, tmp_path: Path) -> dict[str, str]:
    """What the words of `WRONG` stand for."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "directory").mkdir()
    (tmp_path / "unreadable").mkdir(0o000)
    broken = tmp_path / "broken"
    (broken / "packs").mkdir(parents=True)
    (broken / "config.json").write_text('{"format": "moonclipfs-store", "version": 99}')
    names = {"STORE": filled, "FILE": "file", "DIRECTORY": "directory", "UNREADABLE": "unreadable", "BROKEN": broken}
    return {word: str(tmp_path / path) for word, path in names.items()}


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name not in ("completion", "init", "mount", "wait", "watch")]
)
def test_no_mistake_gives_a_traceback(
    run: Run, wrong: dict[str, str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in WRONG:
        for word, path in wrong.items():
            text = text.replace(word, path) if text.startswith(word) else text
        for arguments in ([text], [text, text], [text, "directory/out"]):
            before = {path.name for path in tmp_path.iterdir()}
            done = run(command, *arguments)
            assert done.code in {*range(15)}, (command, arguments, done)
            assert done.err.isprintable() or "\x1b" not in done.err
            if done.code not in (0, 1):
                assert done.err.startswith("moonclipfs: "), (command, arguments, done)
                assert {path.name for path in tmp_path.iterdir()} == before
    assert json.loads(run("ls", "--json", wrong["STORE"]).out) is not None
