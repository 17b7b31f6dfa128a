"""Torch files of before the zip format."""

from __future__ import annotations

import io

import pytest

from moonclipfs.formats.layout import RegionKind
from tests.formats.samples import Opcodes, by_name, bytes_of, check_pieces, layout_of, torch_legacy
from tests.formats.test_torchzip import assert_same


def test_a_state_dict_and_a_module_of_the_real_writer() -> None:
    torch = pytest.importorskip("torch", reason="torch writes the file here")
    weight = torch.randn(4, 6)
    model = torch.nn.Linear(2, 3, dtype=torch.bfloat16)
    state = {"weight": weight, "t": weight.t(), "steps": torch.arange(3), "f8": weight.to(torch.float8_e5m2)}
    for protocol in range(2, 6):
        buffer = io.BytesIO()
        torch.save(state | {"model": model}, buffer, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
        data = buffer.getvalue()
        layout = layout_of(data)
        assert layout.format == "torch-legacy" and not layout.reason
        assert_same(torch, data, layout, state | {"model.weight": model.weight, "model.bias": model.bias})
        check_pieces(data, layout)


PICKLE = Opcodes().op(b"}").text("b").tensor("k1", 2, (2,), (1,)).op(b"s")
PICKLE = PICKLE.text("a").tensor("k0", 4, (4,), (1,), storage="HalfStorage").op(b"s")
DATA = torch_legacy(PICKLE.done(), ["k0", "k1"], [b"01234567", b"abcdefgh"], [4, 2])


def test_the_order_of_the_keys_is_that_of_the_storages() -> None:
    found = by_name(layout_of(DATA + b"tail"))
    assert {name: bytes_of(DATA, tensor) for name, tensor in found.items()} == {"a": b"01234567", "b": b"abcdefgh"}


def test_R051_a_short_file_keeps_the_storages_that_are_whole() -> None:
    layout = layout_of(DATA[:-1])
    assert layout.truncated and layout.reason == "data short by 1 byte" and list(by_name(layout)) == ["a"]
    for length in range(20, len(DATA)):
        assert layout_of(DATA[:length]).truncated


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (torch_legacy(PICKLE.done(), ["k0", "x"], [b"01234567", b""], [4, 0]), "storage 1 has no known element type"),
        (torch_legacy(PICKLE.done(), ["k0", "k0"], [b"01234567", b""], [4, 0]), "storage 1 has no known element type"),
        (torch_legacy(PICKLE.done(), ["k0", "k1"], [b"01234567", b"abcdefgh"], [4, 3]), "another length"),
        (DATA.replace(Opcodes().op(b"](").data, Opcodes().op(b"}(").data), "not a list"),
        (DATA.replace(b"little_endian\x88", b"little_endian\x89"), "little-endian"),
        (DATA.replace(b"M\xe9\x03", b"M\xea\x03"), "protocol version"),
    ],
)
def test_what_does_not_fit_is_opaque(data: bytes, reason: str) -> None:
    layout = layout_of(data)
    assert layout.format == "opaque" and reason in layout.reason


def test_views_of_old_files_start_inside_their_storage() -> None:
    pickle = Opcodes().op(b"}").text("v").name("torch._utils", "_rebuild_tensor").op(b"((")
    pickle.text("storage").name("torch", "FloatStorage").text("k").text("cpu").number(4)
    pickle.op(b"(").text("view").number(2).number(2).op(b"ttQ").number(1).sizes((1,)).sizes((1,)).op(b"tRs")
    data = torch_legacy(pickle.done(), ["k"], [b"aaaabbbbccccdddd"], [4])
    layout = layout_of(data)
    assert bytes_of(data, by_name(layout)["v"]) == b"dddd"
    assert [r.length for r in layout.regions if r.kind is RegionKind.TENSOR] == [16]
