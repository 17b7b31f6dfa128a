"""Set-up, run in a copy of the tree where apt, sudo, Python and pip are stand-ins that write down their calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "dirname", "find", "rm", "sh", "sha256sum", "sort", "xargs")
PYTHON = """
case "$*" in
  *base_prefix*) echo /opt/python ;;
  *get_path*) echo "$TREE/include" ;;
  *-V*) echo "Python $VERSION" ;;
  *version_info*) [ "$VERSION" != 3.10.0 ] ;;
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"-m pip"*) touch moonclipfs/_codec.so ;;
esac
"""


class Tree:
    """A small copy of the project, and a PATH that has only what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin, self.calls = root / "tree", root / "bin", root / "calls"
        for directory in ("tests", "ext", "moonclipfs", "include"):
            (self.root / directory).mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "setup.sh", self.root / "tests")
        (self.root / "pyproject.toml").write_text("[project]\n")
        (self.root / "ext" / "one.c").write_text("int one;\n")
        (self.root / "include" / "Python.h").touch()
        self.bin.mkdir()
        self.calls.touch()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        for name in ("mkdir", "cp", "touch"):
            (self.bin / name).symlink_to(shutil.which(name) or name)
        for name in ("gcc", "pkg-config", "fusermount3"):
            self.command(name)
        self.command("python3", PYTHON)
        self.command("id", "echo ${TEST_UID:-1000}")

    def command(self, name: str, body: str = "", *, code: int | None = None) -> None:
        """Put a stand-in into the PATH: it writes down how it is called, then runs `body`."""
        end = "" if code is None else f"exit {code}\n"
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>"$CALLS"\n{body}\n{end}')
        path.chmod(0o755)

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run set-up."""
        variables = {"PATH": str(self.bin), "CALLS": str(self.calls), "TREE": str(self.root), "VERSION": "3.12.0"}
        return subprocess.run(
            ["bash", "tests/setup.sh", *words],
            cwd=self.root,
            env={**variables, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def called(self, *words: str) -> list[str]:
        """The calls so far that hold all these words."""
        return [line for line in self.calls.read_text().splitlines() if all(word in line for word in words)]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def installs(tree: Tree) -> int:
    return len(tree.called("pip", "install"))


def test_a_finished_set_up_runs_nothing(tree: Tree) -> None:
    assert tree.run().returncode == 0
    assert installs(tree) == 1
    calls = len(tree.called())
    assert tree.run().returncode == 0
    assert tree.called()[calls:] == ["python3 -V"], "only the version of the interpreter is asked for"


@pytest.mark.parametrize("changed", ["pyproject.toml", "ext/one.c", "ext/new.h", "tests/setup.sh"])
def test_a_change_of_what_it_depends_on_runs_it_again(tree: Tree, changed: str) -> None:
    tree.run()
    with (tree.root / changed).open("a") as file:
        file.write("\n")
    assert tree.run().returncode == 0
    assert installs(tree) == 2


def test_another_python_a_missing_extension_and_a_moved_tree_run_it_again(tree: Tree) -> None:
    tree.run()
    tree.run(VERSION="3.13.0")
    assert installs(tree) == 2
    (tree.root / "moonclipfs" / "_codec.so").unlink()
    tree.run(VERSION="3.13.0")
    assert installs(tree) == 3
    moved = tree.root.rename(tree.root.with_name("moved"))
    tree.root = moved
    tree.run(VERSION="3.13.0")
    assert installs(tree) == 4


def test_a_failed_install_is_not_taken_for_done(tree: Tree) -> None:
    tree.command("python3", PYTHON.replace("touch moonclipfs/_codec.so", "touch moonclipfs/_codec.so; exit 1"))
    assert tree.run().returncode != 0
    assert not (tree.root / ".venv" / ".setup-stamp").exists()
    tree.run()
    assert installs(tree) == 2


def test_missing_packages_are_installed_by_root(tree: Tree) -> None:
    (tree.bin / "fusermount3").unlink()
    (tree.bin / "pkg-config").unlink()
    tree.command("apt-get")
    tree.command("sudo")
    assert tree.run(TEST_UID="0").returncode == 0
    (call,) = tree.called("apt-get", "install")
    assert {"pkg-config", "fuse3"} <= set(call.split())
    assert not tree.called("sudo")


def test_missing_packages_are_installed_through_sudo(tree: Tree) -> None:
    (tree.bin / "fusermount3").unlink()
    tree.command("apt-get")
    tree.command("sudo", '"$@"')
    assert tree.run().returncode == 0
    assert len(tree.called("sudo")) == 1, "one password is enough"
    assert tree.called("apt-get", "install", "fuse3")


@pytest.mark.parametrize("sudo", [None, 1], ids=["no sudo", "sudo refuses"])
def test_what_cannot_be_installed_is_named_with_the_command(tree: Tree, sudo: int | None) -> None:
    (tree.bin / "fusermount3").unlink()
    tree.command("apt-get")
    if sudo is not None:
        tree.command("sudo", code=sudo)
    done = tree.run()
    assert done.returncode == 1
    assert "apt-get install -y --no-install-recommends fuse3" in done.stderr
    assert not installs(tree)


def test_without_apt_the_packages_are_named(tree: Tree) -> None:
    (tree.bin / "fusermount3").unlink()
    done = tree.run()
    assert (done.returncode, "missing: fuse3" in done.stderr) == (1, True)


def test_an_old_python_is_refused_with_what_to_do(tree: Tree) -> None:
    tree.command("apt-get")
    done = tree.run(TEST_UID="0", VERSION="3.10.0")
    assert done.returncode == 1
    assert "PYTHON=/path/to/python3.x" in done.stderr
    assert tree.called("apt-get", "python3-venv")


def test_an_interpreter_that_is_asked_for_is_used_or_refused(tree: Tree) -> None:
    tree.command("mine", PYTHON)
    assert tree.run(PYTHON="mine").returncode == 0
    assert tree.called("mine", "-m venv")
    done = tree.run(PYTHON="other", VERSION="3.13.0")
    assert (done.returncode, "PYTHON=other" in done.stderr) == (1, True)


def run_make(target: str) -> Sequence[str]:
    """The commands that a target would run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "-n", target], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("target", ["demo", "test", "test-slow", "check", "fuzz", "bench"])
def test_every_target_sets_up_first(target: str) -> None:
    assert run_make(target)[0] == "bash tests/setup.sh"


@pytest.mark.parametrize("code", [0, 1])
def test_suites_for_the_slow_tests_are_installed_where_they_can_be_had(tree: Tree, code: int) -> None:
    for name in ("fio", "git", "rsync"):
        tree.command(name)
    tree.command("apt-get", code=code)
    done = tree.run("suites", TEST_UID="0")
    assert done.returncode == 0
    (call,) = tree.called("apt-get", "install")
    packages = set(call.split())
    assert {"stress-ng", "fsmark", "inotify-tools"} <= packages
    assert not {"fio", "git", "rsync"} & packages
    assert ("skipped" in done.stderr) == bool(code)
    assert installs(tree) == 0
