"""`run`: a mount for one command, whatever becomes of the command, of the mount or of `run` itself."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs.cli.run import _descendants
from moonclipfs.fuse.attached import SIGNALS, AttachedMount
from moonclipfs.fuse.mounts import find_mounts
from moonclipfs.fuse.namespace import Isolation
from moonclipfs.fuse.prepare import MountOptions, check_device
from tests.cli.conftest import Run

ROOT = Path(__file__).parent.parent.parent
PROGRAM = [sys.executable, "-c", "import sys; from moonclipfs.cli.main import main; sys.exit(main())", "run"]


@pytest.fixture(autouse=True)
def fuse() -> None:
    try:
        check_device()
    except Exception as error:
        pytest.skip(str(error))


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a command; its runtime and temporary directories are empty again in the end."""
    places = {"XDG_RUNTIME_DIR": tmp_path / "r", "TMPDIR": tmp_path / "temporary"}
    for path in places.values():
        path.mkdir(mode=0o700)
    yield {
        **os.environ,
        **{name: str(path) for name, path in places.items()},
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    assert not find_mounts_below(tmp_path)
    assert not list((tmp_path / "temporary").iterdir())
    assert not list((tmp_path / "r").glob("moonclipfs/*"))
    deadline = time.monotonic() + 10
    while _descendants(os.getpid(), 0):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.02)


def find_mounts_below(path: Path) -> list[str]:
    return [mount.mountpoint for mount in find_mounts() if Path(mount.mountpoint).is_relative_to(path)]


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(environment: dict[str, str], filled: Path) -> Iterator[Start]:
    """Start `run` over the filled store; the last argument is a script for sh."""
    started: list[subprocess.Popen[str]] = []

    def call(*arguments: object) -> subprocess.Popen[str]:
        *options, script = map(str, arguments)
        command = [*PROGRAM, str(filled), "--read-only", *options, "--", "sh", "-c", script]
        started.append(
            subprocess.Popen(
                command,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> str:
    """The first line that the command prints."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    return line


def test_the_command_has_the_mount_and_nobody_else(start: Start, tmp_path: Path) -> None:
    """The mount of `run` is seen by its command alone, and is gone when that has ended, however it ended."""
    process = start(
        'cat "$MOONCLIPFS_MOUNT/run1/step-2/config.json"; echo; echo "$MOONCLIPFS_MOUNT"; read -r _; exit 7'
    )
    assert ready(process) == '{"step": 2}'
    place = ready(process)
    assert Path(place).is_relative_to(tmp_path / "temporary")
    assert not list(Path(place).iterdir())
    assert not find_mounts_below(tmp_path)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 7


def test_at_a_place_of_choice(start: Start, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place in (tmp_path / "there", tmp_path / "made"):
        process = start("--at", place, f"ls {place} && pwd")
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out.split(), err) == (0, ["other", "run1", os.getcwd()], "")
    assert (tmp_path / "there").exists()
    assert not (tmp_path / "made").exists()


def test_commands_inside_find_their_own_mount(start: Start, tmp_path: Path) -> None:
    """Two at the same place do not see each other."""
    ask = f"{sys.executable} -c \"from moonclipfs.fuse.control import ask; print(ask('{tmp_path}/at', 'ping')['pid'])\""
    (tmp_path / "at").mkdir()
    both = [start("--at", tmp_path / "at", f"echo ready; read -r _; {ask}; {ask}") for _ in range(2)]
    assert [ready(process) for process in both] == ["ready", "ready"]
    told = [process.communicate("go\n", timeout=20)[0].split() for process in both]
    assert [len(set(pids)) for pids in told] == [1, 1]
    assert told[0] != told[1]


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 42", 42), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_codes(start: Start, script: str, code: int) -> None:
    process = start(script)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == code


@pytest.mark.parametrize(("words", "code"), [(["/nowhere/x"], 127), (["nowhere-x"], 127), (["/etc/passwd"], 126)])
def test_what_cannot_be_run(environment: dict[str, str], filled: Path, words: list[str], code: int) -> None:
    done = subprocess.run(
        [*PROGRAM, filled, "--read-only", "--", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert done.stderr.startswith(f"moonclipfs: cannot run '{words[0]}': ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_go_to_the_command(start: Start, number: signal.Signals) -> None:
    process = start(
        f"trap 'test -e $MOONCLIPFS_MOUNT/other && echo caught; exit 9' {number.name[3:]}; echo ready;"
        " while :; do sleep 0.05; done"
    )
    assert ready(process) == "ready"
    process.send_signal(number)
    assert process.communicate(timeout=20)[0] == "caught\n"
    assert process.returncode == 9


def test_a_scheduler_that_signals_everybody_does_not_take_the_mount_away(start: Start) -> None:
    """Signals to `run` reach the command; signals to all processes leave the mount in place."""
    script = "trap : TERM; echo ready; read -r _; test -e $MOONCLIPFS_MOUNT/other/other.bin && echo there"
    process = start(script)
    assert ready(process) == "ready"
    for pid in _descendants(process.pid, 0):
        for number in SIGNALS - {signal.SIGINT, signal.SIGALRM}:
            if number == signal.SIGTERM or b"__main__" in Path("/proc", str(pid), "cmdline").read_bytes():
                os.kill(pid, number)
    time.sleep(0.3)
    assert process.communicate("go\n", timeout=20) == ("there\n", "")
    assert process.returncode == 0


def test_ctrl_c_reaches_the_command_once(environment: dict[str, str], filled: Path) -> None:
    script = "trap 'echo caught' INT; echo ready; read -r line; sleep 0.5; echo \"$line\"; exit 6"
    on_terminal = "import os, sys; os.login_tty(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", on_terminal, str(follower), *PROGRAM, str(filled), "--read-only", "--"]
    process = subprocess.Popen([*command, "bash", "-c", script], env=environment, pass_fds=[follower])
    os.close(follower)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(leader, 1000)
    os.write(leader, b"\x03")
    time.sleep(0.5)
    os.write(leader, b"go on\n")
    assert process.wait(20) == 6
    while select.select([leader], [], [], 0.1)[0]:
        try:
            seen += os.read(leader, 1000)
        except OSError:
            break
    os.close(leader)
    assert seen.count(b"caught") == 1
    assert seen.endswith(b"go on\r\n")


def test_what_the_command_leaves_running_is_ended(start: Start) -> None:
    process = start(
        "sleep 300 & setsid sh -c 'trap \"\" TERM; cd $MOONCLIPFS_MOUNT/run1; sleep 301; sleep 302' & exit 3"
    )
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3
    assert err.startswith("moonclipfs: ended ")
    assert "that the command left running: " in err


def test_children_that_end_soon_are_waited_for(start: Start) -> None:
    process = start("(sleep 0.5; echo late) & exit 0")
    assert process.communicate(timeout=30) == ("late\n", "")


def test_run_itself_is_killed(start: Start, environment: dict[str, str]) -> None:
    process = start("echo $MOONCLIPFS_RUN; trap 'exit 0' TERM; while :; do sleep 0.05; done")
    log = Path(ready(process))
    pids = _descendants(process.pid, 0)
    assert len(pids) >= 2
    temporary = Path(environment["TMPDIR"])
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path("/proc", str(pid)).exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(temporary.iterdir())
    for path in (*log.iterdir(), log):
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_server_that_is_killed(start: Start, environment: dict[str, str]) -> None:
    process = start("echo $MOONCLIPFS_RUN; read -r _; ls $MOONCLIPFS_MOUNT/run1 2>/dev/null || echo gone")
    directory = Path(ready(process))
    for pid in _descendants(process.pid, 0):
        if b"__main__" in Path("/proc", str(pid), "cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    out, err = process.communicate("go\n", timeout=20)
    assert (process.returncode, out) == (14, "gone\n")
    assert err.startswith("moonclipfs: the mount ended before the command did: its server was killed by signal 9; see ")
    for path in (*directory.iterdir(), directory):
        path.rmdir() if path.is_dir() else path.unlink()


def test_mistakes(run: Run, filled: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    for arguments in ([filled], [filled, "true"], [filled, "--"], ["--", "true"], [f"{filled}:other", "--", "true"]):
        done = run("run", *arguments)
        assert (done.code, done.err.count("\n")) == (2, 1), done
    for arguments in ([filled, "python", "-c", "1"], [filled, "true"]):
        done = run("run", *arguments)
        assert done.code == 2
        assert "the command to run goes after `--`" in done.err
    assert run("run", tmp_path / "absent", "--", "true").code == 3
    assert run("run", filled, "--at", tmp_path / "a" / "b", "--", "true").code == 3
    assert run("run", filled, "--at", tmp_path / "src", "--", "true").code == 2
    assert run("run", filled, "--at", filled / "tmp", "--", "true").code == 2


@pytest.mark.parametrize("isolation", Isolation)
def test_every_kind_of_isolation(
    environment: dict[str, str], filled: Path, tmp_path: Path, isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, environment[name])
    place = tmp_path / "at"
    place.mkdir()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        mount = AttachedMount(str(filled), str(place), MountOptions(read_only=True), isolation=isolation)
        assert mount.isolation is isolation
        seen = f"ls {place}; id -u; readlink /proc/self/ns/mnt"
        done = subprocess.run(
            mount.command_line(["sh", "-c", seen], before),
            env=mount.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        other, run1, uid, namespace = done.stdout.split()
        assert (other, run1, uid) == ("other", "run1", str(os.getuid()))
        shared = isolation is Isolation.NONE
        assert (namespace == os.readlink("/proc/self/ns/mnt")) is shared
        assert bool(find_mounts_below(tmp_path)) is shared
        assert mount.finish() == ""
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
