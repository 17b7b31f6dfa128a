"""What can be saved comes back to the bit, whatever it is; what cannot is refused by its path."""

from __future__ import annotations

import datetime
import json
import math
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moonclipfs
from moonclipfs import CheckpointManager, limits
from moonclipfs.errors import UsageError
from moonclipfs.torch.dtypes import CARRIERS, dtype_name
from moonclipfs.torch.statedict import Maker, Taker
from tests.torch.kit import bits, same

REFUSED = {
    "qint8",
    "qint32",
    "quint8",
    "quint2x4",
    "quint4x2",
    "bit",
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
}
DTYPES = {one for name in dir(torch) if isinstance(one := getattr(torch, name), torch.dtype)}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "store", "r") as made:
        yield made


def round_trip(manager: CheckpointManager, extra: Any) -> Any:
    manager.save(1, extra=extra)
    return manager.load_latest().extra


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any dtype with all kinds of bits in it."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int32).mul(2654435761 % 251).add(7).to(torch.uint8)
    if dtype is torch.bool:
        return (raw % 2).to(torch.bool).view(shape)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", sorted(CARRIERS, key=str), ids=dtype_name)
def test_every_dtype_comes_back(manager: CheckpointManager, dtype: torch.dtype) -> None:
    """Cases 18, 20, 34: float8 and complex among them, through every entry point."""
    tensors = {"matrix": some(dtype, 6, 4), "scalar": some(dtype, 1).reshape(()), "empty": some(dtype, 0, 3)}
    if dtype is not torch.float4_e2m1fn_x2:  # torch itself copies nothing else of these
        tensors["turned"] = some(dtype, 6, 4).t()
    manager.save_raw(1, tensors)
    assert same(manager.load(1).state["model"], tensors)
    assert same(manager.load_tensors(1, tensors), tensors)
    target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    manager.load_latest(target)
    assert same(target, tensors)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_every_other_dtype_is_refused_by_name(manager: CheckpointManager) -> None:
    for dtype in DTYPES - set(CARRIERS):
        name = dtype_name(dtype)
        if name in REFUSED:
            continue
        with pytest.raises(UsageError, match=f"model: odd has the dtype torch.{name}"):
            manager.save_raw(1, {"odd": torch.empty(2, dtype=dtype)})
    with pytest.raises(UsageError, match="model: odd is a quantised tensor"):
        manager.save_raw(1, {"odd": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)})
    with pytest.raises(UsageError, match="model: odd is a sparse tensor"):
        manager.save_raw(1, {"odd": torch.eye(3).to_sparse()})
    with pytest.raises(UsageError, match="model: odd is on the meta device"):
        manager.save_raw(1, {"odd": torch.empty(3, device="meta")})
    assert manager.list_snapshots() == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers() | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3]), np.float64(0.1),
                                              np.int8(-3), np.bool_(True)]),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=4) | st.integers() | st.just("$"), inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict),
    max_leaves=12,
)  # fmt: skip


@given(VALUES)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    tree = Taker("extra").tree(value)
    text = json.dumps(tree, allow_nan=False)
    assert same(Maker(lambda name, node, path: None).value(json.loads(text)), value)


def test_containers_of_tensors_and_arrays_come_back(manager: CheckpointManager) -> None:
    extra = {
        "rng": np.random.RandomState(3).get_state(),
        "torch_rng": torch.get_rng_state(),
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "sets": {1, 2, "x"},
        "frozen": frozenset({(1, 2)}),
        "numpy": [np.arange(6, dtype=np.uint16).reshape(2, 3), np.array(3.5), np.empty((0, 2))],
        ("tuple", 3): torch.tensor(7),
        "__metadata__": torch.ones(2),
        "lone surrogate \udc80": torch.ones(3),
        "nan": float("-nan"),
    }
    assert same(round_trip(manager, extra), extra)


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"), (datetime.date(2026, 1, 1), "datetime.date"), (print, "builtin_function"),
        (Point(1, 2), "Point"), (np.array(["text"]), "numpy.ndarray"), (np.array([None]), "numpy.ndarray"),
        (Path("/"), "PosixPath"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_anything_else_is_refused_by_its_path(manager: CheckpointManager, value: object, kind: str) -> None:
    with pytest.raises(UsageError, match=rf"extra\['args'\]\[1\]\['seed'\] is a .*{kind}.* set allow_pickle=True"):
        manager.save(1, extra={"args": [0, {"seed": value}]})
    assert manager.list_snapshots() == []


def test_what_contains_itself_is_refused(manager: CheckpointManager) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match=r"extra\[0\] contains itself"):
        manager.save(1, extra=loop)


def test_a_pickle_needs_two_to_agree(tmp_path: Path, manager: CheckpointManager) -> None:
    extra = {"day": datetime.date(2026, 1, 1), "weight": torch.ones(2)}
    with CheckpointManager(tmp_path / "store", "r", allow_pickle=True) as trusting:
        assert same(round_trip(trusting, extra), extra)
        with pytest.raises(UsageError, match=r"extra\['f'\] cannot be pickled"):
            trusting.save(2, extra={"f": lambda: 0})
    with pytest.raises(UsageError, match="day was saved as a pickle"):
        manager.load_latest()


def test_tied_weights_and_views_come_back_as_such(manager: CheckpointManager) -> None:
    """Case 7: what shares memory does again, whichever name comes first, and the store has it once."""
    base = torch.arange(24.0)
    qkv = base.view(6, 4)
    tensors = {
        "qkv": qkv,
        "q": qkv[:2],
        "k": qkv[2:4],
        "turned": qkv.t(),
        "words": qkv.view(torch.int32),
        "own": base + 1,
    }
    for step, names in enumerate((list(tensors), list(reversed(tensors)))):
        manager.save_raw(step, {name: tensors[name] for name in names})
        found = manager.load(step).state["model"]
        assert same({name: found[name] for name in tensors}, tensors)
        found["q"][0, 0] = -5
        assert found["qkv"][0, 0] == found["turned"][0, 0] == -5 and found["k"][0, 0] == tensors["k"][0, 0]
        assert found["words"][0, 0] == torch.tensor(-5.0).view(torch.int32)
        assert found["own"][0] == 1
        assert found["turned"].stride() == tensors["turned"].stride()


def test_a_view_of_something_long_saves_only_itself(manager: CheckpointManager, tmp_path: Path) -> None:
    long = torch.arange(1_000_000)
    tensors = {"some": long[10:20], "every": long[::1000], "repeated": torch.tensor([1.0]).expand(5, 3)}
    manager.save_raw(1, tensors)
    assert same(manager.load(1).state["model"], tensors)
    with moonclipfs.open(tmp_path / "store", "r/step-000001") as snapshot:
        assert snapshot.entry("model.safetensors").size < 12_000


def test_conjugates_and_negatives_are_saved_by_value(manager: CheckpointManager) -> None:
    source = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"conjugate": source.conj(), "imaginary": source.conj().imag, "plain": source}
    manager.save_raw(1, tensors)
    found = manager.load(1).state["model"]
    assert found["conjugate"].tolist() == [1 - 2j, 3 + 4j] and found["imaginary"].tolist() == [-2, 4]


def test_requires_grad_parameters_and_buffers_of_a_module_are_saved(manager: CheckpointManager) -> None:
    module = torch.nn.BatchNorm1d(4)
    module(torch.randn(8, 4))
    manager.save(1, module)
    found = manager.load(1).state["model"]
    assert same(found, module.state_dict()) and found._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]
    assert bits(found["num_batches_tracked"]) == bits(torch.tensor(1))


def test_optimizer_state_is_named_after_its_parameters(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 36: dropping a layer stores nothing anew."""
    monkeypatch.setattr(limits, "PLAIN_SNAPSHOTS", 0)  # nothing is encoded meanwhile
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(3)]
    module = torch.nn.ModuleDict({f"layer{number}": layer for number, layer in enumerate(layers)})
    optimizer = torch.optim.Adam(module.parameters())
    sum(layer.weight.square().sum() + layer.bias.sum() for layer in layers).backward()  # type: ignore[union-attr]
    optimizer.step()
    manager.save(1, module, optimizer)
    manager.flush()
    before = sum(pack.stat().st_size for pack in (tmp_path / "store" / "packs").iterdir())
    del module["layer0"]
    state = {parameter: optimizer.state[parameter] for parameter in module.parameters()}
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.state.update(state)
    manager.save(2, module, optimizer)
    manager.flush()
    after = sum(pack.stat().st_size for pack in (tmp_path / "store" / "packs").iterdir())
    assert after - before < 5000, "recipes, structure and step counts only"
    assert "layer1.weight.exp_avg" in {
        one.name for one in moonclipfs.open(tmp_path / "store", "r/step-000002").tensors("optimizer.safetensors")
    }
    assert same(manager.load(2).state["optimizer"], optimizer.state_dict())


def test_a_name_that_is_too_long_is_refused(manager: CheckpointManager) -> None:
    with pytest.raises(UsageError, match="longer than 1024 bytes"):
        manager.save_raw(1, {"n" * 2000: torch.ones(1)})


def test_large_parts_are_sharded_with_an_index(tmp_path: Path) -> None:
    tensors = {f"layer.{number}": torch.full((100,), float(number)) for number in range(5)}
    with CheckpointManager(tmp_path / "store", "r", max_shard_bytes=900) as manager:
        manager.save_raw(1, tensors)
        assert same(manager.load(1).state["model"], tensors)
    with moonclipfs.open(tmp_path / "store", "r/step-000001") as snapshot:
        shards = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
        assert snapshot.files() == [*shards, "model.safetensors.index.json", "state.json"]
        index = json.loads(snapshot.read("model.safetensors.index.json"))
        assert index["metadata"]["total_size"] == 2000 and index["weight_map"]["layer.4"] == shards[2]
