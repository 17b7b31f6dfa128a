"""Type stubs say what the code does, and type checkers get to see them."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "moonclipfs"
STUBS = sorted(PACKAGE.rglob("*.pyi"))


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Name of each parameter, and whether it has a default."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    optional = len(function.args.defaults)
    found = [(name, at >= len(names) - optional) for at, name in enumerate(names)]
    keyword = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return found + [(argument.arg, default is not None) for argument, default in keyword]


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.stem)
def test_a_stub_names_what_its_module_has(stub: Path) -> None:
    """Case 26."""
    module = importlib.import_module(".".join(stub.relative_to(PACKAGE.parent).with_suffix("").parts))
    tree = ast.parse(stub.read_text())
    told = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)} | {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    there = {
        name for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", module.__name__) == module.__name__
        and not inspect.ismodule(value)
    }  # fmt: skip
    assert told == there


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.stem)
def test_a_stub_has_the_parameters_of_the_code(stub: Path) -> None:
    """Case 26."""
    module = importlib.import_module(".".join(stub.relative_to(PACKAGE.parent).with_suffix("").parts))
    tree = ast.parse(stub.read_text())
    compared = 0
    places = [(module, functions(tree.body))]
    places += [
        (getattr(module, node.name), functions(node.body)) for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    for place, stubs in places:
        for name, function in stubs.items():
            if name == "__init__":
                continue
            try:
                signature = inspect.signature(getattr(place, name))
            except ValueError:
                continue  # compiled without one
            real = [(one.name, one.default is not one.empty) for one in signature.parameters.values()]
            assert parameters(function) == real, f"{stub.name}: {name}"
            compared += 1
    assert compared


def test_inline_types_are_for_everybody() -> None:
    assert (PACKAGE / "py.typed").exists()
