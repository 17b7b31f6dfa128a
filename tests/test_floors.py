"""Imports go down the floors only, in no circle, and a name comes from the module that defines it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "moonclipfs"
FLOORS = {
    "_codec": 0, "_fuseinit": 0, "errors": 0, "limits": 0, "types": 0,
    "codec": 1, "formats": 1,
    "store": 2,
    "layers": 3,
    "fuse": 4, "torch": 4,
    "cli": 5, "compat": 5, "api": 5, "overlayplaces": 5, "overlayapi": 5, "dryrun": 5, "tidying": 5, "": 5,
    "expertsapi": 5,
}  # fmt: skip
PICKLES = "moonclipfs.torch.pickled"
"""Where values are pickled for those who asked for it by `allow_pickle=True`, and nowhere else."""
STANDALONE = {"rescue"}
"""Single files that import nothing of the package."""
FORBIDDEN = {
    "codec": {"pyfuse3", "trio", "torch", "sqlite3"},
    "formats": {"pyfuse3", "trio", "torch", "os", "pickle", "sqlite3"},
    "store": {"pyfuse3", "trio", "torch", "pickle"},
    "layers": {"pyfuse3", "trio", "torch", "errno"},
    "fuse": {"torch", "sqlite3"},
    "torch": {"pyfuse3", "trio"},
    "cli": {"torch"},
    "api": {"pyfuse3", "trio"},
    "overlayapi": {"pyfuse3", "trio", "torch"},
    "dryrun": {"pyfuse3", "trio", "torch"},
    "tidying": {"pyfuse3", "trio", "torch"},
}
"""What a room never knows. `api` may import torch inside a function that is only called where torch is installed."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[str, str | None, int]]:
    """(module, imported name or None, line) of every import, at any depth."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.module or "", alias.name, node.lineno


def own_imports(path: Path) -> Iterator[tuple[str, str | None, int]]:
    for module, name, line in imports(path):
        if module.split(".")[0] != "moonclipfs":
            continue
        if name is not None and (f"{module}.{name}" in MODULES or name == "_codec"):
            yield f"{module}.{name}", None, line
        else:
            yield module, name, line


@pytest.mark.parametrize("module", MODULES)
def test_every_room_has_a_floor(module: str) -> None:
    assert room(module) in FLOORS or room(module) in STANDALONE, f"{module} is in no room of the house"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    if room(module) in STANDALONE:
        assert not list(own_imports(MODULES[module])), f"{module} must stand alone"
        return
    for target, _, line in own_imports(MODULES[module]):
        if room(target) != room(module):
            below = FLOORS[room(target)] < FLOORS[room(module)]
            same_top = FLOORS[room(target)] == FLOORS[room(module)] == 5
            assert below or same_top, f"{module}:{line} imports {target} from a floor that is not below"


@pytest.mark.parametrize("module", MODULES)
def test_rooms_do_not_know_what_is_above(module: str) -> None:
    never = FORBIDDEN.get(room(module), set())
    for target, _, line in imports(MODULES[module]):
        assert target.split(".")[0] not in never, f"{module}:{line} imports {target}"


def test_no_circles() -> None:
    graph = {module: {target for target, _, _ in own_imports(path)} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in graph.get(module, ()):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@functools.cache
def defined_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("module", MODULES)
def test_names_come_from_where_they_are_defined(module: str) -> None:
    for target, name, line in own_imports(MODULES[module]):
        if name is not None and target in MODULES and target != "moonclipfs":
            assert name in defined_names(MODULES[target]), f"{module}:{line}: {name} is not defined in {target}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module: str) -> None:
    # The rescue reader promises to be one file.
    most = 700 if room(module) in STANDALONE else 500
    assert len(MODULES[module].read_text().splitlines()) <= most, f"{module} is two modules"


def test_nothing_unpickles() -> None:
    for module, path in MODULES.items():
        if module == PICKLES:
            continue
        for target, name, line in imports(path):
            assert target.split(".")[0] not in {"pickle", "cloudpickle", "dill", "joblib"}, f"{module}:{line}"
            assert (target, name) != ("torch", "load"), f"{module}:{line}"
        assert "torch.load(" not in path.read_text().replace("`torch.load(", ""), module
