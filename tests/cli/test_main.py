"""The entry point: help, errors in one line, exit codes, and what it never imports."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import moonclipfs
from moonclipfs import errors
from moonclipfs.cli import main as entry

ROOT = Path(__file__).parent.parent.parent
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MoonclipError)]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, check=False
    )


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in entry.COMMANDS:
        assert f"  {name} " in out


@pytest.mark.parametrize("name", [*entry.COMMANDS, *entry.ALIASES])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help_with_examples(name: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([name, flag]) == 0
    out = capsys.readouterr().out
    assert "Examples:\n    moonclipfs " in out or 'Examples:\n    eval "$(moonclipfs' in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_help_of_the_list_is_that_of_the_command(name: str) -> None:
    command = entry.cli.get_command(click.Context(entry.cli), name)
    assert command is not None
    assert command.help


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--version"]) == 0
    assert capsys.readouterr().out == f"moonclipfs {moonclipfs.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == moonclipfs.__version__


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["ls", "--bogus"], ["init", "a", "b"], ["--bogus"]])
def test_wrong_usage_is_2_and_no_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    if arguments:
        assert captured.err.startswith("moonclipfs: ")
        assert captured.err.count("\n") == 1
        assert "--help`)" in captured.err


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_one_line_and_the_code_of_its_kind(
    kind: type[errors.MoonclipError], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise kind("cannot read\nthis \x1b[2J")

    assert entry.guarded(fail) == kind.exit_code
    assert capsys.readouterr().err == "moonclipfs: cannot read\\x0athis \\x1b[2J\n"


def test_a_list_in_a_message_is_indented_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.complain("in use by:\n  pid 1: a\nb\n  pid 2\n", 8) == 8
    assert capsys.readouterr().err == "moonclipfs: in use by:\n  pid 1: a\\x0ab\n  pid 2\n"


def test_exit_codes_are_all_in_the_help() -> None:
    text = entry.cli.help or ""
    listed = text.partition("Exit codes:")[2]
    for kind in KINDS:
        assert f" {kind.exit_code} " in listed, kind


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.EIO, "Input/output error", "/x"), 11, "/x: Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied", b"/x\xff"), 7, "/x\\xff: Permission denied"),
        (MemoryError(), 1, "out of memory"),
        (KeyError("k"), 70, "bug: KeyError: 'k' (see where with MOONCLIPFS_TRACEBACK=1, and please report it)"),
    ],
)
def test_other_exceptions(error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert entry.guarded(fail) == code
    assert capsys.readouterr().err == f"moonclipfs: {text}\n"


def test_traceback_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCLIPFS_TRACEBACK", "1")

    def fail() -> int:
        raise errors.NotFoundError("gone")

    assert entry.guarded(fail) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet() -> None:
    script = f"{sys.executable} -c 'import sys; from moonclipfs.cli.main import main; sys.exit(main([\"--help\"]))'"
    shell = f'{{ sleep 0.5; {script}; echo "code $?" >&2; }} | true'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr == f"code {128 + signal.SIGPIPE}\n"


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    code = "import sys; from moonclipfs.cli.main import main; sys.exit(main(['--help']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert done.stderr == "moonclipfs: No space left on device\n"
    assert done.returncode == errors.NoSpaceError.exit_code


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = python("import sys, moonclipfs; print(sorted(n for n in sys.modules if n.startswith('moonclipfs') or n in "
                  "('numpy', 'click', 'torch', 'trio', 'pyfuse3', 'sqlite3')))")  # fmt: skip
    assert done.stdout == "['moonclipfs']\n", done.stderr


def test_help_imports_no_command_and_nothing_heavy() -> None:
    done = python(
        "import sys; from moonclipfs.cli.main import main; main(['--help']); "
        "print(sorted(n for n in sys.modules if n.startswith('moonclipfs.') or n in ('numpy', 'torch', 'trio')))"
    )
    loaded = done.stdout.splitlines()[-1]
    expected = [
        "moonclipfs.cli",
        "moonclipfs.cli.main",
        "moonclipfs.cli.output",
        "moonclipfs.errors",
        "moonclipfs.types",
    ]
    assert loaded == repr(expected), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_code_for_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["completion", shell]) == 0
    assert "_MOONCLIPFS_COMPLETE" in capsys.readouterr().out


def test_completion_answers_with_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert completions("moonclipfs un", capsys, monkeypatch) == [""]
    assert completions("moonclipfs um", capsys, monkeypatch) == ["plain,umount"]
    assert completions("moonclipfs verify --q", capsys, monkeypatch) == ["plain,--quick"]


def completions(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("_MOONCLIPFS_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    capsys.readouterr()
    assert entry.main() == 0
    return capsys.readouterr().out.splitlines()


def test_completion_answers_with_names_of_snapshots(
    filled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = completions(f"moonclipfs ls {filled}:run1/step-1", capsys, monkeypatch)
    assert found == [f"plain,{filled}:run1/step-1", f"plain,{filled}:run1/step-10"]
    assert completions("moonclipfs ls /absent:x", capsys, monkeypatch) == ["file,/absent:x"]
    assert completions(f"moonclipfs ls {filled}", capsys, monkeypatch) == [f"file,{filled}"]
    monkeypatch.setenv("MOONCLIPFS_STORE", str(filled))
    assert completions("moonclipfs show oth", capsys, monkeypatch) == ["plain,other"]
