"""The demo itself: it ends well, compares what it says, and leaves nothing when it is interrupted at any point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.demo import session
from tests.demo.loading import Count, compare

torch = pytest.importorskip("torch", reason="the demo trains with torch")

ROOT = Path(__file__).resolve().parents[2]
CAN_MOUNT = os.access("/dev/fuse", os.R_OK | os.W_OK)


def start(directory: Path, *wrapper: str) -> subprocess.Popen[str]:
    """A quick demo in a session of its own, as from a terminal."""
    return subprocess.Popen(
        [*wrapper, sys.executable, "-u", "-m", "tests.demo", "--quick", "--directory", directory],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def servers(directory: Path) -> list[str]:
    """Command lines of other processes that name the directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if str(directory).encode() in line:
            found.append(line.replace(b"\0", b" ").decode())
    return found


def wait_until_nothing_is_left(directory: Path) -> None:
    deadline = time.monotonic() + 10
    while (left := servers(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert not session.is_mounted(directory / "mount")


def test_the_demo_loads_everything_and_finds_it_equal(tmp_path: Path) -> None:
    demo = start(tmp_path / "demo")
    output, _ = demo.communicate(timeout=240)
    assert demo.returncode == 0, output
    assert "All equal." in output
    ways = ["torch.load", "safetensors load_file", "numpy.load"] if CAN_MOUNT else ["torch.load(file)"]
    for way in ways:
        assert way in output
    assert (tmp_path / "demo" / "store" / "config.json").exists()
    assert not (tmp_path / "demo" / "checkpoints").exists()
    wait_until_nothing_is_left(tmp_path / "demo")


def test_without_fuse_the_demo_reads_through_python(tmp_path: Path) -> None:
    hide = ["unshare", "-m", "sh", "-c", 'mount --bind /dev/null /dev/fuse && exec "$@"', "sh"]
    if subprocess.run([*hide, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot hide /dev/fuse in a mount namespace")
    demo = start(tmp_path / "demo", *hide)
    output, _ = demo.communicate(timeout=240)
    assert demo.returncode == 0, output
    assert "No FUSE here" in output
    assert "torch.load(file)" in output
    assert "All equal." in output
    wait_until_nothing_is_left(tmp_path / "demo")


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("Training a small", signal.SIGINT),
        ("$ moonclipfs add", signal.SIGINT),
        ("$ moonclipfs mount", signal.SIGINT),
        ("loaded with", signal.SIGINT),
        ("loaded with", signal.SIGTERM),
    ],
)
def test_an_interrupted_demo_leaves_no_mount_and_no_process(tmp_path: Path, line: str, number: int) -> None:
    if not CAN_MOUNT and line == "loaded with":
        pytest.skip("/dev/fuse cannot be opened, so nothing is mounted at this point")
    demo = start(tmp_path / "demo")
    assert demo.stdout is not None
    for text in demo.stdout:
        if text.startswith(line):
            break
    else:
        pytest.fail(f"the demo ended without {line!r}")
    os.killpg(demo.pid, number)  # Ctrl-C goes to the whole foreground group
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    wait_until_nothing_is_left(tmp_path / "demo")


def test_a_failing_demo_unmounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not CAN_MOUNT:
        pytest.skip("/dev/fuse cannot be opened")
    session.moonclipfs("init", tmp_path / "store", show=False)
    with pytest.raises(RuntimeError, match="loader failed"), session.mounted(tmp_path / "store", tmp_path / "mount"):
        assert session.is_mounted(tmp_path / "mount")
        raise RuntimeError("loader failed")
    wait_until_nothing_is_left(tmp_path / "mount")


def test_a_directory_of_something_else_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    demo = start(tmp_path)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "in use for something else" in output
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("left", "right", "different"),
    [
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0])}, 0),
        ({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}, 1),
        ({"a": torch.tensor([float("nan")])}, {"a": torch.tensor([float("nan")])}, 0),
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0], dtype=torch.float64)}, 1),
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([[1.0]])}, 1),
        ({"a": [1, torch.tensor(2)]}, {"a": [1, torch.tensor(2)]}, 0),
        ({"a": 1}, {"a": True}, 1),
        ({"a": 1, "b": 2}, {"a": 1}, 1),
    ],
)
def test_compare_is_by_bits(left: object, right: object, different: int) -> None:
    count = Count()
    compare(left, right, "file", count)
    assert len(count.different) == different
