"""What a layout weighs beside the memory that it takes."""

from __future__ import annotations

import gc
import math
import tracemalloc

import pytest

from moonclipfs.formats.layout import opaque
from moonclipfs.formats.sniff import parse
from moonclipfs.types import BytesSource
from tests.formats.samples import Opcodes, entry, safetensors, torch_zip, zip_bytes


def many(count: int, name: str, shape: list[int]) -> bytes:
    size = math.prod(shape)
    header = {f"{number}{name}": entry("U8", shape, number * size, (number + 1) * size) for number in range(count)}
    return safetensors(header, bytes(count * size))


def strided(count: int) -> bytes:
    program = Opcodes().op(b"](")
    for number in range(count):
        program.tensor("0", 5000, (9, 1000 + number), (1, 1 + number % 2))
    return zip_bytes(torch_zip(program.op(b"e").done(), {"0": 40_000}))


@pytest.mark.parametrize(
    "data",
    [
        many(500, "short", [1]),
        many(500, "k" * 900, [2, 3]),
        many(300, "\U0001f600" * 200, [1]),
        many(500, "w", [1] * 31 + [999]),
        safetensors({"__metadata__": {f"k{number}": "v" for number in range(2000)}}),
        safetensors({"__metadata__": {f"k{number}": f"{number:04000}" for number in range(50)}}),
        strided(500),
    ],
    ids=["tensors", "long names", "wide names", "dimensions", "keys", "metadata", "strides"],
)
def test_the_weight_bounds_the_memory(data: bytes) -> None:
    source = BytesSource(data)
    parse(source)  # what parsers keep of their own is made now
    tracemalloc.start()
    try:
        layout = parse(source)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert layout.format != "opaque"
    assert held / 1.1 < layout.weight < 8 * held


def test_the_reason_weighs_too() -> None:
    assert opaque(1, "x" * 5000).weight > 5000 > opaque(1, "x").weight
