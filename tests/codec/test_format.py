"""FORMAT.md, the stub file, and the numbers that are in C and in Python."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from pathlib import Path

import moonclipfs.codec
from moonclipfs import _codec, limits
from moonclipfs.codec import encoded
from moonclipfs.types import DType
from tests.codec.twin import Cursor, Twin, read_model

ROOM = Path(moonclipfs.codec.__file__).parent


def hex_examples() -> list[bytes]:
    """The hex dumps of FORMAT.md: of each line what stands before two spaces."""
    blocks = re.findall(r"```hex\n(.*?)```", (ROOM / "FORMAT.md").read_text(), re.DOTALL)
    return [bytes.fromhex("".join(line.split("  ")[0] for line in block.splitlines())) for block in blocks]


def test_the_example_object_of_the_format_document() -> None:
    data = hex_examples()[0]
    base, raw = bytes.fromhex("803f803f803f00bf0000"), bytes.fromhex("803f813f803f00bf0000")
    assert encoded.decode(data, base) == raw
    assert Twin(data).decode(base) == raw
    assert _codec.encode(raw, DType.BF16, encoded.TRANSFORM_DELTA, base, DType.BF16) == data


def test_the_example_model_of_the_format_document() -> None:
    cursor = Cursor(hex_examples()[1])
    model = read_model(cursor)
    assert cursor.at == len(cursor.data) and model.bits == 8
    assert [model.map[context] for context in range(4)] == [0, 0, 1, 1]
    assert [{symbol: int(f) for symbol, f in enumerate(table) if f} for table in model.tables] == [
        {0: 250, 1: 6},
        {0: 128, 2: 128},
    ]


def test_limits_and_types_are_the_same_in_c() -> None:
    assert {name: getattr(limits, name) for name in _codec.LIMITS} == dict(_codec.LIMITS)
    assert [_codec.dtype_width(dtype) for dtype in DType] == [
        0 if dtype is DType.BYTES else dtype.width for dtype in DType
    ]
    assert len(DType) == _codec.DTYPES


def test_the_format_document_quotes_the_limits() -> None:
    text = (ROOM / "FORMAT.md").read_text()
    for value in (limits.BLOCK_ELEMENTS, limits.BLOCK_BYTES):
        assert str(value) in text
    assert limits.RAW_BYTES == 1 << 30 and "2^30" in text


def test_c_floats_are_rounded_alike_on_every_machine() -> None:
    """They choose models: fused where a processor can, they would give the same object other bytes there."""
    project = tomllib.loads((ROOM.parent.parent / "pyproject.toml").read_text())
    extensions = project["tool"]["setuptools"]["ext-modules"]
    (extension,) = [one for one in extensions if one["name"] == "moonclipfs._codec"]
    assert "-ffp-contract=off" in extension["extra-compile-args"]
    assert not {"-ffast-math", "-Ofast"} & set(extension["extra-compile-args"])


def test_the_stub_lists_what_the_extension_has() -> None:
    stub = ast.parse((ROOM.parent / "_codec.pyi").read_text())
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name for node in stub.body if isinstance(node, ast.ClassDef)}
    constants = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    public = {
        name for name in vars(_codec) if not name.startswith("_") and name not in ("os", "CorruptError", "UsageError")
    }
    assert public == set(functions) | classes | constants
    for name, node in functions.items():
        wanted = [argument.arg for argument in node.args.args]
        assert wanted == list(inspect.signature(getattr(_codec, name)).parameters), name
