"""`watch`: checkpoints of a plain directory, absorbed as they are finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run, checkpoint

ROOT = Path(__file__).parent.parent.parent
PROGRAM = [sys.executable, "-c", "import sys; from moonclipfs.cli.main import main; sys.exit(main())", "watch"]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output directory with the checkpoints step-1 and step-2."""
    for step in (1, 2):
        checkpoint(tmp_path / "out" / f"step-{step}", step)
        os.utime(tmp_path / "out" / f"step-{step}" / "model.safetensors", (step, step))
    return tmp_path / "out"


def names(run: Run, store: Path) -> list[str]:
    return [one["name"] for one in run("ls", "--json", store).json]


def test_once(run: Run, tmp_path: Path, output: Path) -> None:
    assert run("init", tmp_path / "store").code == 0
    done = run("watch", "--once", "--quiet", "0", output, tmp_path / "store")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"{output}/step-{step}: stored and verified as out/step-{step}@1" for step in (1, 2)
    ]
    assert run("diff", f"{tmp_path}/store:out/step-2", output / "step-2").code == 0
    again = run("watch", "--once", "--quiet", "0", "--as", "out", output, tmp_path / "store")
    assert [line.split(": ")[1][:13] for line in again.out.splitlines()] == ["there already"] * 2
    command = run("log", "--json", f"{tmp_path}/store:out/step-2").out
    assert "moonclipfs watch --once" in command


def test_keep_plain_and_a_name(run: Run, tmp_path: Path, output: Path) -> None:
    assert run("init", tmp_path / "store").code == 0
    done = run("watch", "--once", "--quiet", "0", "--keep-plain", "1", output, f"{tmp_path}/store:team/run1")
    assert done.code == 0, done.err
    assert [path.name for path in output.iterdir()] == ["step-2"]
    assert f"{output}/step-1: deleted, team/run1/step-1@1 has it" in done.out.splitlines()
    assert names(run, tmp_path / "store") == ["team/run1/step-1", "team/run1/step-2"]
    assert run("verify", tmp_path / "store").code == 0


def test_what_is_not_finished_is_told(run: Run, tmp_path: Path, output: Path) -> None:
    assert run("init", tmp_path / "store").code == 0
    model = output / "step-2" / "model.safetensors"
    os.truncate(model, model.stat().st_size - 100)
    done = run("watch", "--once", "--quiet", "0", "--keep-plain", "0", output, tmp_path / "store")
    assert done.code == 1
    assert done.err.startswith(f"not finished: {output}/step-2: ")
    assert [path.name for path in output.iterdir()] == ["step-2"]
    assert names(run, tmp_path / "store") == ["out/step-1"]


def start(tmp_path: Path, output: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, "--quiet", "0.2", output, tmp_path / "store"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_waits_for_the_directory(run: Run, tmp_path: Path) -> None:
    """It may be started before the training that makes it."""
    assert run("init", tmp_path / "store").code == 0
    for is_made in (False, True):
        process = start(tmp_path, tmp_path / "out")
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == f"{tmp_path}/out does not exist yet: waiting for it\n"
        if is_made:
            checkpoint(tmp_path / "out" / "step-1", 1)
            assert process.stdout.readline().split()[-1] == "out/step-1@1"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_goes_on_until_a_signal(run: Run, tmp_path: Path, output: Path, number: signal.Signals) -> None:
    assert run("init", tmp_path / "store").code == 0
    process = start(tmp_path, output)
    assert process.stdout is not None
    assert [process.stdout.readline().split()[-1] for _ in range(2)] == ["out/step-1@1", "out/step-2@1"]
    checkpoint(output / "step-3", 3)
    assert process.stdout.readline().split()[-1] == "out/step-3@1"
    began = time.monotonic()
    process.send_signal(number)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0
    assert time.monotonic() - began < 10


def test_mistakes(run: Run, filled: Path, tmp_path: Path) -> None:
    assert run("watch", "--once", tmp_path / "absent", filled).code == 3
    assert run("watch", filled / "config.json", filled).code == 3
    assert run("watch", "--once", tmp_path / "src", f"{filled}:a@1").code == 2
    assert run("watch", "--once", tmp_path / "src", f"{filled}:a", "--as", "b").code == 2
    assert run("watch", "--once", tmp_path / "src", filled, "--as", "@b").code == 2
    assert run("watch", "--once", tmp_path / "src", filled, "--keep-plain", "-1").code == 2
    assert run("watch", "--once", tmp_path / "src", tmp_path).code == 9
    assert run("watch", tmp_path / "src").code == 2
