"""Commands and Python beside a mount that writes: status, flush, seal, restore, clone, wait and run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moonclipfs
from moonclipfs import errors
from moonclipfs.cli.run import _descendants
from moonclipfs.fuse.control import server_pid
from moonclipfs.fuse.mounts import mount_at
from moonclipfs.fuse.prepare import check_device
from tests.cli.conftest import Run, checkpoint

ROOT = Path(__file__).parent.parent.parent
PROGRAM = [sys.executable, "-c", "import sys; from moonclipfs.cli.main import main; sys.exit(main())"]


@pytest.fixture(autouse=True)
def fuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        check_device()
    except Exception as error:
        pytest.skip(str(error))
    (tmp_path / "r").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))


@pytest.fixture
def mounted(run: Run, filled: Path, tmp_path: Path) -> Iterator[Path]:
    """The filled store, mounted to write; it seals by itself only what `seal` says."""
    place = tmp_path / "mnt"
    place.mkdir()
    done = run("mount", "--seal-after", "off", "--layer", "test", "--log", tmp_path / "mount.log", filled, place)
    assert done.code == 0, done.err
    pid = server_pid(str(place))
    yield place
    if mount_at(str(place)) is not None:
        subprocess.run(["fusermount3", "-uz", str(place)], check=True)
    if pid is not None:
        eventually(lambda: not Path("/proc", str(pid)).exists(), 30)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def names(run: Run, store: Path) -> list[str]:
    return [one["name"] for one in run("ls", "--json", store).json]


def test_write_seal_flush_status(run: Run, mounted: Path, filled: Path) -> None:
    checkpoint(mounted / "run2" / "step-1", 5)
    about = run("status", "--json", mounted).json
    assert (about["read_only"], about["layer"], about["store"]) == (False, "test", str(filled))
    assert about["staged_files"] + about["encoding_files"] >= 1
    done = run("status", mounted / "run2")
    assert done.code == 0
    assert re.search(r"^staged +\d", done.out, re.MULTILINE)
    assert "run2/step-1" not in names(run, filled)
    done = run("seal", mounted / "run2" / "step-1")
    assert (done.code, done.out, done.err) == (0, "run2/step-1@1\n", "")
    assert run("diff", f"{filled}:run2/step-1", mounted / "run2" / "step-1").code == 0
    assert run("seal", mounted / "run2" / "step-1").out == "run2/step-1@1\n"
    (mounted / "loose").write_bytes(os.urandom(200_000))
    assert run("flush", mounted).code == 0
    about = run("status", "--json", mounted).json
    assert (about["staged_files"], about["encoding_files"], about["failed_files"]) == (0, 0, {})
    assert about["encoder"]["encoded_bytes"] > 200_000


def test_diff_sees_what_is_not_sealed(run: Run, mounted: Path, tmp_path: Path) -> None:
    checkpoint(mounted / "run2" / "step-1", 5)
    assert run("diff", mounted / "run2" / "step-1", tmp_path / "src" / "step-2").code == 1
    assert run("diff", mounted / "run1" / "step-2", tmp_path / "src" / "step-2").code == 0
    (mounted / "run1" / "step-2" / "config.json").write_text("{}")
    done = run("diff", mounted / "run1" / "step-2", mounted / "@versions" / "run1" / "step-2" / "1")
    assert (done.code, "config.json" in done.out) == (1, True)


def test_from_python(run: Run, mounted: Path, filled: Path) -> None:
    checkpoint(mounted / "run2" / "step-1", 5)
    assert moonclipfs.seal(mounted / "run2" / "step-1") == "run2/step-1@1"
    with moonclipfs.open(filled, "run2/step-1@1") as snapshot:
        assert snapshot.read("config.json") == b'{"step": 5}'
        assert snapshot.metadata["automatic"] is False
    (mounted / "run2" / "step-1" / "more").write_text("more")
    assert moonclipfs.seal(mounted / "run2" / "step-1", wait=False) is None
    (mounted / "loose").write_bytes(os.urandom(100_000))
    moonclipfs.flush(mounted)
    assert len(run("log", "--json", f"{filled}:run2/step-1").json) == 2
    status = moonclipfs.status(mounted)
    assert (status["staged_files"], status["encoding_files"], status["captures"]) == (0, 0, 0)
    for call in (moonclipfs.seal, moonclipfs.flush, moonclipfs.status):
        with pytest.raises(errors.UsageError, match="is not inside a mount"):
            call(filled)


def test_mistakes(run: Run, mounted: Path, filled: Path, tmp_path: Path) -> None:
    for path, code, text in (
        (tmp_path / "src", 2, "is not inside a mount: `moonclipfs add`"),
        (mounted, 2, "is the whole mount"),
        (mounted / "@versions" / "other" / "1", 2, "sealed already"),
        (mounted / "absent", 3, "absent"),
        (mounted / "run1" / "step-1" / "config.json", 2, "cannot be a snapshot"),
    ):
        done = run("seal", path)
        assert (done.code, text in done.err, done.err.count("\n")) == (code, True, 1), done
    with open(mounted / "run1" / "step-1" / "open", "w") as file:
        file.write("x")
        file.flush()
        busy = run("seal", mounted / "run1" / "step-1")
        assert (busy.code, "open is open for writing" in busy.err) == (8, True)
    assert run("status", tmp_path).code == 2
    assert run("flush", filled).code == 2
    done = run("mount", "--layer", "test", filled, tmp_path / "src" / "step-1" / "notes")
    assert done.code == 2
    (tmp_path / "second").mkdir()
    held = run("mount", "--layer", "test", filled, tmp_path / "second")
    assert (held.code, "--layer" in held.err, str(mounted) in held.err) == (8, True, True)


def test_a_read_only_mount_has_nothing_to_tell(run: Run, filled: Path, tmp_path: Path) -> None:
    place = tmp_path / "only"
    place.mkdir()
    assert run("mount", "--read-only", "--log", tmp_path / "log", filled, place).code == 0
    try:
        assert run("status", place).out == f"{place}: {filled}, read-only\n"
        assert run("status", "--json", place).json["read_only"] is True
        assert run("flush", place).code == 0
        assert run("seal", place / "other").code == 7
        assert run("clone", place / "other", place / "again").out == "again@1\n"
        eventually((place / "again").exists)
    finally:
        assert run("umount", place).code == 0


def test_restore_in_a_mount(run: Run, mounted: Path) -> None:
    """A restored version is the newest one of its name, and what was the newest before stays a version."""
    config = mounted / "run1" / "step-1" / "config.json"
    config.write_text('{"step": "other"}')
    assert run("seal", mounted / "run1" / "step-1").out == "run1/step-1@2\n"
    assert run("restore", mounted / "run1" / "step-1@1").out == "run1/step-1@3\n"
    eventually(lambda: config.read_text() == '{"step": 1}')
    done = run("restore", mounted / "@versions" / "run1" / "step-1" / "2", "--to", mounted / "old" / "one")
    assert (done.code, done.out) == (0, "old/one@1\n")
    eventually(lambda: (mounted / "old" / "one").exists())
    assert json.loads((mounted / "old" / "one" / "config.json").read_text()) == {"step": "other"}


def test_what_is_open_outlives_a_restore(run: Run, mounted: Path) -> None:
    """A restored directory has new files: what is open goes on as it was."""
    config = mounted / "run1" / "step-1" / "config.json"
    config.write_text("second")
    assert run("seal", mounted / "run1" / "step-1").code == 0
    with open(config) as file:
        before = config.stat().st_ino
        assert run("restore", mounted / "run1" / "step-1@1").code == 0
        eventually(lambda: config.read_text() == '{"step": 1}')
        assert file.read() == "second"
        assert config.stat().st_ino != before == os.fstat(file.fileno()).st_ino


def test_clone_in_a_mount(run: Run, mounted: Path, filled: Path) -> None:
    """A clone shares every byte with its source, and each changes apart."""
    before = sorted(path.name for path in (filled / "packs").iterdir())
    assert run("clone", mounted / "run1" / "step-2", mounted / "tune" / "start").out == "tune/start@1\n"
    eventually(lambda: (mounted / "tune" / "start").exists())
    assert sorted(path.name for path in (filled / "packs").iterdir()) == before
    (mounted / "tune" / "start" / "config.json").write_text("mine")
    assert (mounted / "run1" / "step-2" / "config.json").read_text() == '{"step": 2}'
    assert run("clone", mounted / "run1" / "step-2", "/outside").code == 2


def test_restore_keeps_what_was_written_since_the_last_seal(run: Run, mounted: Path) -> None:
    """What was written since the last seal becomes a version before an older one is restored."""
    config = mounted / "run1" / "step-1" / "config.json"
    config.write_text("unsealed")
    assert run("restore", mounted / "run1" / "step-1@1").out == "run1/step-1@3\n"
    eventually(lambda: config.read_text() == '{"step": 1}')
    eventually((mounted / "@versions" / "run1" / "step-1" / "2").exists)
    assert (mounted / "@versions" / "run1" / "step-1" / "2" / "config.json").read_text() == "unsealed"
    assert run("status", "--json", mounted).json["conflicts"] == []


def test_names_that_live_files_have_are_taken(run: Run, mounted: Path) -> None:
    """No restore and no clone takes a name at which live files lie."""
    (mounted / "mine").mkdir()
    (mounted / "file").write_text("x")
    for name in ("mine", "file", "run1/step-2"):
        assert run("restore", mounted / "run1" / "step-1@1", "--to", mounted / name).code == 4
        assert run("clone", mounted / "run1" / "step-1", mounted / name).code == 4
    assert run("clone", mounted / "run1" / "step-1", mounted / "file" / "below").code == 1


def test_what_was_removed_comes_back(run: Run, mounted: Path, filled: Path) -> None:
    """What is removed in one mount is gone in the store within a second, and comes back by restore."""
    subprocess.run(["rm", "-r", mounted / "run1"], check=True)
    eventually(lambda: names(run, filled) == ["other"], 1.5)
    assert run("restore", mounted / "run1" / "step-1").out == "run1/step-1@2\n"
    assert "run1/step-1" in names(run, filled)
    eventually(lambda: (mounted / "run1" / "step-1" / "config.json").exists())


def test_wait_sees_seals(run: Run, mounted: Path) -> None:
    def later() -> None:
        time.sleep(0.5)
        checkpoint(mounted / "run3" / "step-7", 7)
        moonclipfs.seal(mounted / "run3" / "step-7")

    thread = threading.Thread(target=later)
    thread.start()
    done = run("wait", "--timeout", "30", mounted / "run3")
    thread.join()
    assert (done.code, done.out) == (0, "run3/step-7@1\n")


def test_mounts_show_what_wait_tells(run: Run, mounted: Path, filled: Path) -> None:
    """Whoever goes on from `wait` to the files in a mount finds them there."""
    for number in range(4):
        live, version = mounted / f"copy-{number}", mounted / "@versions" / f"copy-{number}" / "1"
        assert not live.exists() and not version.exists()
        assert run("clone", f"{filled}:run1/step-1", f"{filled}:copy-{number}").code == 0
        assert run("wait", f"{filled}:copy-{number}@1").out == f"copy-{number}@1\n"
        assert live.exists() and version.exists()


def test_an_evaluator_in_a_loop(mounted: Path, filled: Path, tmp_path: Path) -> None:
    program = tmp_path / "moonclipfs"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom moonclipfs.cli.main import main\nsys.exit(main())\n")
    program.chmod(0o700)
    script = """
        "$0" wait --follow "$1:run4" | while read -r name; do
            cat "$2/@versions/${name%@*}/${name##*@}/config.json"; echo
        done
    """
    loop = subprocess.Popen(
        ["bash", "-c", script, program, filled, mounted],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert loop.stdout is not None
    time.sleep(2)
    for step in (1, 2):
        checkpoint(mounted / "run4" / f"step-{step}", step)
        moonclipfs.seal(mounted / "run4" / f"step-{step}")
        assert json.loads(loop.stdout.readline()) == {"step": step}
    os.killpg(loop.pid, signal.SIGTERM)
    loop.communicate()


def test_run_stores_what_the_command_wrote(run: Run, filled: Path, tmp_path: Path) -> None:
    """What the command of `run` wrote is stored and sealed before `run` returns, and what could not be is told."""
    script = (
        'mkdir -p "$MOONCLIPFS_MOUNT/run9" && cp -r "$0/step-2" "$MOONCLIPFS_MOUNT/run9/step-1" && '
        'echo loose > "$MOONCLIPFS_MOUNT/loose"; exit 4'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [*PROGRAM, "run", str(filled), "--layer", "job", "--", "sh", "-c", script, str(tmp_path / "src")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (4, "", "")
    assert run("diff", f"{filled}:run9/step-1", tmp_path / "src" / "step-2").code == 0
    check = [*PROGRAM, "run", str(filled), "--layer", "job", "--", "sh", "-c", 'cat "$MOONCLIPFS_MOUNT/loose"']
    done = subprocess.run(check, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "loose\n")
    assert not list((tmp_path / "r" / "moonclipfs").iterdir())


def test_run_is_told_to_end_while_the_command_saves(run: Run, filled: Path, tmp_path: Path) -> None:
    """As a scheduler does it: SIGTERM to everybody, and the command saves once more."""
    script = (
        # It may be told twice, by us and by `run`.
        'trap \'trap "" TERM; cp -r "$0/step-2" "$MOONCLIPFS_MOUNT/last"; exit 0\' TERM; '
        "echo ready; while :; do sleep 0.05; done"
    )
    process = subprocess.Popen(
        [*PROGRAM, "run", str(filled), "--layer", "job", "--", "sh", "-c", script, str(tmp_path / "src")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for pid in [*_descendants(process.pid, 0), process.pid]:
        os.kill(pid, signal.SIGTERM)
    assert process.communicate(timeout=60)[1] in ("", "Terminated\n")
    assert process.returncode == 0
    assert run("diff", f"{filled}:last", tmp_path / "src" / "step-2").code == 0


def test_run_tells_what_could_not_be_stored(run: Run, tmp_path: Path) -> None:
    """On a full disk the exit code is not 0, and what was written is stored once there is room."""
    (tmp_path / "small").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", tmp_path / "small"], check=False).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        assert run("init", tmp_path / "small" / "store").code == 0
        (tmp_path / "staging").mkdir()
        (tmp_path / "data").write_bytes(os.urandom(60 << 20))

        def attempt(script: str) -> subprocess.CompletedProcess[str]:
            store, staging = tmp_path / "small" / "store", tmp_path / "staging"
            command = [
                *PROGRAM,
                "run",
                str(store),
                "--staging",
                str(staging),
                "--layer",
                "job",
                "--",
                "sh",
                "-c",
                script,
            ]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
            return subprocess.run(
                [*command, str(tmp_path / "data")],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )

        done = attempt('cp "$0" "$MOONCLIPFS_MOUNT/data"')
        assert done.returncode == 14
        assert done.stderr.count("\n") == 1
        assert re.match(r"moonclipfs: not everything is stored.*No space left on device", done.stderr)
        done = attempt('cmp "$0" "$MOONCLIPFS_MOUNT/data" && exit 5')
        assert done.returncode == 5
        subprocess.run(["mount", "-o", "remount,size=200m", tmp_path / "small"], check=True)
        done = attempt('cmp "$0" "$MOONCLIPFS_MOUNT/data"')
        assert (done.returncode, done.stderr) == (0, "")
        assert not list((tmp_path / "staging").rglob("0*"))
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)
