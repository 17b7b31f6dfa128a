"""The shards of distributed checkpoints: torch archives one after the other."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest

from moonclipfs.formats.layout import RegionKind
from moonclipfs.formats.sniff import parse
from moonclipfs.types import BytesSource, DType
from tests.formats.samples import check_layout, zip_bytes


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch writes the file here")


def archive(torch: Any, value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_writes(torch: Any, tmp_path: Path) -> None:
    state = {"weights": torch.randn(40, 30), "narrow": torch.randn(7).bfloat16(), "step": 3, "name": "run"}
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    layout = parse(BytesSource(data))
    check_layout(layout, len(data))
    assert layout.format == "distcp" and not layout.reason
    found = {
        (tensor.dtype, tensor.shape): data[tensor.offset : tensor.offset + tensor.length] for tensor in layout.tensors
    }
    assert found == {
        (DType.F32, (40, 30)): state["weights"].numpy().tobytes(),
        (DType.BF16, (7,)): state["narrow"].view(torch.uint8).numpy().tobytes(),
    }
    names = [region.name for region in layout.regions if region.kind is RegionKind.TENSOR]
    assert len(set(names)) == 2


def test_the_last_archive_alone_is_cut_short(torch: Any) -> None:
    data = archive(torch, torch.ones(3)) + archive(torch, torch.zeros(5))
    layout = parse(BytesSource(data[:-1]))
    assert layout.format == "opaque" and layout.truncated


@pytest.mark.parametrize("between", [b"\0", b"PK\x05\x06" + bytes(18)])
def test_bytes_between_archives_make_it_opaque(torch: Any, between: bytes) -> None:
    data = archive(torch, torch.ones(3)) + between + archive(torch, torch.zeros(5))
    assert parse(BytesSource(data)).format == "opaque"


def test_another_archive_among_them_makes_it_opaque(torch: Any) -> None:
    data = archive(torch, torch.ones(3)) + zip_bytes({"a": b"b"}) + archive(torch, torch.zeros(5))
    assert parse(BytesSource(data)).format == "opaque"


def test_damage_never_raises(torch: Any) -> None:
    whole = archive(torch, torch.ones(3)) + archive(torch, torch.zeros(5)) + archive(torch, {"a": 1})
    dice = random.Random(0)
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        check_layout(parse(BytesSource(bytes(data))), len(data))
