"""The README tells what the program does: its commands, exit codes, extras and targets exist."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import moonclipfs
from moonclipfs import errors
from moonclipfs.cli.main import ALIASES, COMMANDS, EXIT_BUG, cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
COMMAND_TABLE = README.split("## Commands")[1].split("Exit codes")[0]


def test_every_command_is_told() -> None:
    told = set(re.findall(r"`([a-z-]+)", COMMAND_TABLE))
    assert set(COMMANDS) | set(ALIASES) <= told


def test_every_command_that_is_told_exists() -> None:
    used = set(re.findall(r"(?:^\$ |`)moonclipfs ([a-z-]+)", README, re.MULTILINE))
    assert used
    assert used <= set(COMMANDS) | set(ALIASES)


@pytest.mark.parametrize("row", [row for row in COMMAND_TABLE.splitlines() if row.startswith("| `")])
def test_options_that_are_told_exist(row: str) -> None:
    name = re.match(r"\| `([a-z-]+)", row)
    assert name is not None
    command = importlib.import_module(f"moonclipfs.cli.{name[1].replace('-', '_')}").command
    known = {option for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", row)) <= known


def test_exit_codes_are_those_of_the_errors() -> None:
    text = README.split("Exit codes: ")[1].split("\n\n")[0]
    told = {int(number) for number in re.findall(r"\b(\d+) [a-z]", text)}
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MoonclipError)
    ]
    assert told == {kind.exit_code for kind in kinds} | {0, EXIT_BUG}


def test_extras_that_are_told_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = README.split("Extras: ")[1].split("\n\n")[0]
    assert set(re.findall(r"`([a-z]+)`", text)) <= set(extras)


def test_targets_that_are_told_exist() -> None:
    for target in set(re.findall(r"`make ([a-z-]+)`", README)):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_apt_packages_are_those_of_set_up() -> None:
    line = re.search(r"apt-get install (.*)", README)
    assert line is not None
    script = (ROOT / "tests" / "setup.sh").read_text()
    for package in line[1].split():
        assert re.search(rf"\b{package}\b", script), package


def test_the_first_screen_holds_what_a_newcomer_needs() -> None:
    screen = "\n".join(README.splitlines()[:45])
    for text in ("moonclipfs mount", "torch.load", "make demo", "make test", "fp32 pre-training", "bf16 fine-tune"):
        assert text in screen


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_blocks_import_what_they_use(block: str) -> None:
    names = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Name | ast.alias)]
    used = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {node.asname or node.name.split(".")[0] for node in names if isinstance(node, ast.alias)}
    of_the_reader = {"train", "model", "optimizer", "scheduler", "steps"}
    assert used <= made | imported | of_the_reader | set(vars(builtins))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"moonclipfs\.([A-Za-z_]+)\(", README))))
def test_functions_that_are_told_exist(name: str) -> None:
    assert callable(getattr(moonclipfs, name))


def test_the_help_has_the_exit_codes_too() -> None:
    text = " ".join((cli.help or "").split())
    told = {int(number) for number in re.findall(r"\b(\d+) [a-z]", text.split("Exit codes: ")[1])}
    assert told == {
        int(number) for number in re.findall(r"\b(\d+) [a-z]", README.split("Exit codes: ")[1].split("\n\n")[0])
    }
