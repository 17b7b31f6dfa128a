"""Experts paged through slots: each keeps its weights, moments and count of steps, and never another's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moonclipfs.errors import NotFoundError, ReadOnlyError, UsageError
from moonclipfs.layers.basing import BaseOf
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlay import Overlay
from moonclipfs.store.store import Store
from moonclipfs.torch import ExpertStore, ExpertTiers, PagedExperts
from moonclipfs.torch.manager import CheckpointManager
from tests.torch.expertkit import Place, bits, expert, files, with_moments

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "capturable": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def filled(place: Place, count: int = 5, file_format: str = "safetensors") -> ExpertStore:
    """A store of experts without moments."""
    store = ExpertStore(place, file_format=file_format)
    for number in range(count):
        store.write(number, expert(number))
    return store


def paged(store: ExpertStore, slots: int = 2, ram: int = 1, **options: Any) -> PagedExperts:
    """Experts of a store through few slots and a small RAM."""
    return PagedExperts(ExpertTiers(store, ram), slots, **options)


def loss_of(weights: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    """What an expert is trained by, other for each seed."""
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    return (torch.tanh(inputs @ weights["w1"].T) @ weights["w2"].T).square().mean()


def step(optimizer: torch.optim.Optimizer, weights: dict[str, torch.Tensor], seed: int) -> None:
    """One step of one expert."""
    optimizer.zero_grad()
    loss_of(weights, seed).backward()
    optimizer.step()


@pytest.mark.parametrize("file_format", ["safetensors", "npz"])
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "capturable"])
def test_training_with_paging_is_to_the_bit_training_without(tmp_path: Path, kind: str, file_format: str) -> None:
    whole = {number: {name: nn.Parameter(one) for name, one in expert(number).items()} for number in range(5)}
    plain = {number: OPTIMIZERS[kind](list(weights.values())) for number, weights in whole.items()}
    module = paged(filled(tmp_path, file_format=file_format))
    optimizer = OPTIMIZERS[kind](list(module.parameters()))
    module.attach_optimizer(optimizer)
    randomly = random.Random(kind)
    for turn in range(40):
        wanted = randomly.sample(range(5), randomly.choice([1, 2]))
        slots = module.swap_to(wanted)
        assert [module.resident[slot] for slot in slots] == wanted
        step(optimizer, module.slot_of(wanted[0]).tensors(), turn)
        step(plain[wanted[0]], whole[wanted[0]], turn)
    for number, weights in whole.items():
        module.swap_to([number])
        assert bits(module.slot_of(number).tensors()) == bits(weights)
        for name, parameter in module.slot_of(number).tensors().items():
            assert bits(tensors_of(optimizer, parameter)) == bits(tensors_of(plain[number], weights[name]))
    module.flush()
    fresh = paged(ExpertStore(tmp_path))
    fresh.swap_to([3])
    assert bits(fresh.slot_of(3).tensors()) == bits(whole[3])


def tensors_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """What an optimizer knows of a parameter."""
    return {name: value for name, value in optimizer.state.get(parameter, {}).items() if value is not None}


def test_a_changed_expert_comes_back_through_a_tier_of_one_with_its_moments(place: Place) -> None:
    module = paged(filled(place), slots=1)
    module.swap_to([0])
    optimizer = OPTIMIZERS["adamw"](list(module.parameters()))
    expected = {}
    for name, parameter in module.slot_of(0).tensors().items():
        moments = with_moments(9)
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": moments[f"{name}_m"].clone(),
            "exp_avg_sq": moments[f"{name}_v"].clone(),
        }
        expected[name] = dict(optimizer.state[parameter])
    module.attach_optimizer(optimizer)
    with torch.no_grad():
        module.slot_of(0)["w1"].add_(1)
    for number in (1, 2, 0):
        assert module.swap_to([number]) == [0]
    assert torch.equal(module.slot_of(0)["w1"], expert(0)["w1"] + 1)
    for name, parameter in module.slot_of(0).tensors().items():
        assert bits(optimizer.state[parameter]) == bits(expected[name])
    assert module.report()["writebacks"] == 1, "the others did not change"
    assert list(module.tiers.store.read(0)) == ["w1", "w2", "w1_m", "w1_v", "w1_t", "w2_m", "w2_v", "w2_t"]


def test_state_and_gradients_never_reach_the_next_expert(tmp_path: Path) -> None:
    module = paged(filled(tmp_path), slots=1)
    optimizer = OPTIMIZERS["adamw"](list(module.parameters()))
    module.attach_optimizer(optimizer)
    module.swap_to([0])
    step(optimizer, module.slot_of(0).tensors(), 1)
    assert len(optimizer.state) == 2
    module.swap_to([1])
    assert len(optimizer.state) == 0 and all(parameter.grad is None for parameter in module.parameters())
    optimizer.step()
    module.flush()
    assert bits(module.tiers.store.read(1)) == bits(expert(1)), "no gradient, no step, no write"


def test_a_swap_between_forward_and_backward_is_an_error(tmp_path: Path) -> None:
    module = paged(filled(tmp_path), slots=1)
    module.swap_to([0])
    loss = loss_of(module.slot_of(0).tensors(), 0)
    module.swap_to([1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_swaps_in_inference_mode_leave_experts_that_can_be_trained(tmp_path: Path) -> None:
    store = ExpertStore(tmp_path)
    for number in range(3):
        store.write(number, with_moments(number))
    module = paged(store, slots=1)
    optimizer = OPTIMIZERS["adamw"](list(module.parameters()))
    module.attach_optimizer(optimizer)
    module.swap_to([0])
    step(optimizer, module.slot_of(0).tensors(), 0)
    with torch.inference_mode():
        module.swap_to([1])
        module.swap_to([2])
        module.tiers.put(0, {name: tensor * 2 for name, tensor in with_moments(0).items()})
    step(optimizer, module.slot_of(2).tensors(), 1)
    module.swap_to([0])
    assert torch.equal(module.slot_of(0)["w1"], with_moments(0)["w1"] * 2)
    step(optimizer, module.slot_of(0).tensors(), 2)
    module.flush()


def test_what_is_wanted_stays_and_the_least_recently_wanted_goes(tmp_path: Path) -> None:
    module = paged(filled(tmp_path), slots=3)
    assert module.swap_to([0, 1, 2]) == [0, 1, 2]
    assert module.swap_to([2, 0, 2]) == [2, 0, 2]
    assert module.swap_to([3]) == [1], "1 was wanted longest ago"
    assert module.swap_to([1, 3]) == [0, 1]
    assert module.resident == [1, 3, 2] and module.swaps == 5
    assert torch.equal(module.stacked("w1", [2, 1]), torch.stack([expert(2)["w1"], expert(1)["w1"]]))
    module.stacked("w2", [1]).sum().backward()
    assert torch.equal(module.slot_of(1)["w2"].grad, torch.ones(4, 8))
    with pytest.raises(UsageError, match="4 experts do not fit into 3 slots"):
        module.swap_to([0, 1, 2, 3])
    with pytest.raises(NotFoundError, match="expert 0 is in no slot"):
        module.slot_of(0)


def packed(tmp_path: Path, number: int) -> bytes:
    """Write an expert as mini-AGI does, moments in bfloat16 as int16."""
    arrays = {
        name: (one.view(torch.int16) if one.dtype == torch.bfloat16 else one).numpy()
        for name, one in with_moments(number, torch.bfloat16).items()
    }
    np.savez(tmp_path / f"e{number:05d}.npz", **arrays)
    return (tmp_path / f"e{number:05d}.npz").read_bytes()


def test_moments_packed_as_int16_are_used_and_left_alone(tmp_path: Path) -> None:
    original = [packed(tmp_path, number) for number in range(3)]
    module = paged(ExpertStore(tmp_path), slots=1)
    optimizer = OPTIMIZERS["adamw"](list(module.parameters()))
    module.attach_optimizer(optimizer)
    for number in (0, 1, 2):
        module.swap_to([number])
        for name, parameter in module.slot_of(number).tensors().items():
            state = optimizer.state[parameter]
            assert torch.equal(state["exp_avg"], with_moments(number, torch.bfloat16)[f"{name}_m"].float())
            assert state["step"] > 100_000, "old moments need no correction"
    module.tiers.flush()
    now = [(tmp_path / f"e{number:05d}.npz").read_bytes() for number in range(3)]
    assert now == original, "not even a count of steps is added to what was not trained"


@pytest.mark.parametrize("moments_dtype", [None, torch.bfloat16])
def test_moments_keep_every_bit_unless_they_are_to_be_narrow(tmp_path: Path, moments_dtype: torch.dtype | None) -> None:
    packed(tmp_path, 0)
    packed(tmp_path, 1)
    module = paged(ExpertStore(tmp_path), slots=1, moments_dtype=moments_dtype)
    optimizer = OPTIMIZERS["adamw"](list(module.parameters()))
    module.attach_optimizer(optimizer)
    module.swap_to([0])
    step(optimizer, module.slot_of(0).tensors(), 1)
    before = {name: dict(optimizer.state[one]) for name, one in module.slot_of(0).tensors().items()}
    module.swap_to([1])
    module.flush()
    with np.load(tmp_path / "e00000.npz") as loaded:
        kind = np.float32 if moments_dtype is None else np.int16
        assert loaded["w1_m"].dtype == kind and loaded["w1"].dtype == np.float32
    module.swap_to([0])
    for name, parameter in module.slot_of(0).tensors().items():
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = before[name][moment]
            assert torch.equal(
                optimizer.state[parameter][moment], expected if moments_dtype is None else expected.bfloat16().float()
            )


def test_an_optimizer_that_comes_later_gets_what_files_hold_and_keeps_what_it_has(tmp_path: Path) -> None:
    store = ExpertStore(tmp_path)
    for number in range(2):
        store.write(number, with_moments(number) | {"w1_t": torch.tensor(7.0), "w2_t": torch.tensor(7.0)})
    module = paged(store)
    module.swap_to([0, 1])
    optimizer = OPTIMIZERS["adamw"](list(module.parameters()))
    own = {"step": torch.tensor(2.0), "exp_avg": torch.ones(8, 4), "exp_avg_sq": torch.ones(8, 4)}
    optimizer.state[module.slot_of(0)["w1"]] = dict(own)
    module.attach_optimizer(optimizer)
    assert bits(optimizer.state[module.slot_of(0)["w1"]]) == bits(own)
    assert optimizer.state[module.slot_of(0)["w2"]]["step"] == 7
    assert torch.equal(optimizer.state[module.slot_of(1)["w1"]]["exp_avg"], with_moments(1)["w1_m"])


def test_without_an_optimizer_moments_stay_in_their_files(tmp_path: Path) -> None:
    store = ExpertStore(tmp_path)
    for number in range(2):
        store.write(number, {**with_moments(number), "note": torch.tensor(number)})
    module = paged(store, slots=1, names=["w1", "w2"])
    module.swap_to([0])
    with torch.no_grad():
        module.slot_of(0)["w2"].zero_()
    module.swap_to([1])
    module.flush()
    assert bits(store.read(0)) == bits({**with_moments(0), "note": torch.tensor(0), "w2": torch.zeros(4, 8)})


def test_state_that_files_cannot_hold_is_dropped_and_never_reaches_the_next_expert(tmp_path: Path) -> None:
    store = ExpertStore(tmp_path)
    for number in range(2):
        store.write(number, with_moments(number))
    module = paged(store, slots=1)
    optimizer = OPTIMIZERS["adamw"](list(module.parameters()))
    module.attach_optimizer(optimizer, in_files=False)
    module.swap_to([0])
    assert len(optimizer.state) == 0
    step(optimizer, module.slot_of(0).tensors(), 1)
    assert len(optimizer.state) == 2
    module.swap_to([1])
    assert len(optimizer.state) == 0
    module.flush()
    moments = {name: tensor for name, tensor in with_moments(0).items() if name not in expert(0)}
    assert bits(store.read(0, list(moments))) == bits(moments), "what files hold besides is left alone"
    assert not torch.equal(store.read(0)["w1"], expert(0)["w1"])


def test_an_optimizer_whose_state_cannot_travel_is_refused(tmp_path: Path) -> None:
    module = paged(filled(tmp_path))
    with pytest.raises(UsageError, match="not that of NAdam"):
        module.attach_optimizer(OPTIMIZERS["capturable"](list(module.parameters())))
    with pytest.raises(UsageError, match="does not train the slots"):
        module.attach_optimizer(OPTIMIZERS["adamw"]([nn.Parameter(torch.ones(1))]))
    optimizer = OPTIMIZERS["adamw"](list(module.parameters()))
    module.attach_optimizer(optimizer)
    module.swap_to([0])
    optimizer.state[module.slot_of(0)["w1"]]["more"] = torch.ones(1)
    with pytest.raises(UsageError, match="keeps more, which is not known here"):
        module.flush()


def test_experts_are_added_and_pruned_and_files_follow(place: Place) -> None:
    module = paged(filled(place, 3))
    optimizer = OPTIMIZERS["adamw"](list(module.parameters()))
    module.attach_optimizer(optimizer)
    module.swap_to([1, 2])
    step(optimizer, module.slot_of(2).tensors(), 1)
    trained = {name: one.detach().clone() for name, one in module.slot_of(2).tensors().items()}
    assert module.add(like=2) == 3 and module.add(expert(7)) == 4
    assert bits(module.tiers.store.read(3)) == bits(trained), "its weights as they are now, without its moments"
    module.prune([2, 4])
    assert module.ids() == [0, 1, 3] and module.resident == [1, None]
    assert not any(module.slots[1].tensors()[name].any() for name in ("w1", "w2"))
    assert len([one for one in module.slots[1].parameters() if optimizer.state.get(one)]) == 0
    assert module.swap_to([3]) == [1]
    assert module.add(like=0) == 5, "4 was used"
    with pytest.raises(NotFoundError):
        module.swap_to([2])
    for wrong in ({"w1": torch.ones(8, 4)}, expert(0, width=5), {n: t.half() for n, t in expert(0).items()}):
        with pytest.raises(UsageError, match=r"of the new expert must be torch\.float32"):
            module.add(wrong)
    with pytest.raises(UsageError, match="made of tensors, or like another one"):
        module.add()
    report = module.report()
    assert (report["experts"], report["slots"], report["resident"]) == (4, 2, [1, 3])
    module.flush()
    assert ExpertStore(place).ids() == [0, 1, 3, 5]


def test_experts_of_layers_are_paged_and_added_to_their_layer(tmp_path: Path) -> None:
    store = ExpertStore(tmp_path)
    for layer in range(2):
        for number in range(2):
            store.write((layer, number), expert(2 * layer + number))
    module = paged(store)
    module.swap_to([(0, 1), (1, 0)])
    assert torch.equal(module.slot_of((1, 0))["w1"], expert(2)["w1"])
    assert module.add(like=(1, 0)) == (1, 2) and module.add(expert(0), layer=0) == (0, 2)
    assert module.get_extra_state().tolist() == [[0, 1], [1, 0]]


def test_what_cannot_be_brought_in_leaves_the_slot_as_it_was(tmp_path: Path) -> None:
    store = filled(tmp_path, 2)
    store.write(2, expert(2, width=5))
    module = paged(store, slots=1)
    module.swap_to([0])
    with torch.no_grad():
        module.slot_of(0)["w1"].add_(1)
    with pytest.raises(UsageError, match=r'"w1" of expert 2 must be torch.float32 \(8, 4\)'):
        module.swap_to([2])
    with pytest.raises(NotFoundError):
        module.swap_to([9])
    assert module.resident == [0] and torch.equal(module.slot_of(0)["w1"], expert(0)["w1"] + 1)


def test_reading_only_never_loses_an_update(tmp_path: Path) -> None:
    filled(tmp_path)
    module = paged(ExpertStore(tmp_path, read_only=True), slots=1)
    before = files(tmp_path)
    module.swap_to([0])
    module.swap_to([1])
    module.flush()
    with torch.no_grad():
        module.slot_of(1)["w1"].add_(1)
    for use in (lambda: module.swap_to([0]), module.flush, module.state_dict):
        with pytest.raises(ReadOnlyError, match="expert 1 was changed"):
            use()
    assert module.resident == [1] and torch.equal(module.slot_of(1)["w1"], expert(1)["w1"] + 1)
    assert files(tmp_path) == before


class Model(nn.Module):
    """A model that is more than its experts."""

    def __init__(self, experts: PagedExperts) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.experts = experts


def test_a_state_dict_tells_which_expert_is_where_and_the_files_hold_them(place: Place) -> None:
    model = Model(paged(filled(place)))
    model.experts.swap_to([4, 1])
    with torch.no_grad():
        model.experts.slot_of(4)["w1"].add_(1)
    saved = model.state_dict()
    assert list(saved) == ["trunk.weight", "trunk.bias", "experts._extra_state"]
    assert torch.equal(ExpertStore(place).read(4)["w1"], expert(4)["w1"] + 1), "taking one flushes"
    again = Model(paged(ExpertStore(place)))
    again.experts.swap_to([1, 4])
    again.load_state_dict(saved)
    assert again.experts.resident == [4, 1]
    assert bits(again.experts.slots[0].tensors()) == bits(model.experts.slots[0].tensors())
    with pytest.raises(UsageError, match="that of 2 slots, and there are 3"):
        Model(paged(ExpertStore(place), slots=3)).load_state_dict(saved)
    half = paged(ExpertStore(place))
    half.swap_to([3])
    again.experts.load_state_dict(half.state_dict())
    assert again.experts.resident == [3, None]


def test_a_checkpoint_manager_saves_and_resumes_a_model_with_paged_experts(store: Store, tmp_path: Path) -> None:
    model = Model(paged(filled(tmp_path / "experts")))
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    model.experts.attach_optimizer(optimizer)
    model.experts.swap_to([3, 1])
    step(optimizer, model.experts.slot_of(1).tensors(), 1)
    with CheckpointManager(store.path, "run") as manager:
        manager.save(10, model, optimizer)
        manager.flush()
        again = Model(paged(ExpertStore(tmp_path / "experts")))
        resumed = OPTIMIZERS["adamw"](list(again.parameters()))
        manager.load(10, again, resumed)
    again.experts.attach_optimizer(resumed)
    assert again.experts.resident == [3, 1]
    for number in (1, 3):
        step(optimizer, model.experts.slot_of(number).tensors(), 2)
        step(resumed, again.experts.slot_of(number).tensors(), 2)
        assert bits(again.experts.tensors_of(number)) == bits(model.experts.tensors_of(number))


def test_a_checkpoint_through_a_temporary_overlay_is_an_error(store: Store) -> None:
    with Overlay.create(store, "dry", BaseOf(), dry_run=True) as overlay:
        place = LayerPath(overlay, "experts")
        model = Model(paged(filled(place)))
        model.experts.swap_to([0])
        with torch.no_grad():
            model.experts.slot_of(0)["w1"].add_(1)
        for part in (model, model.experts):
            with pytest.raises(RuntimeError, match="experts is in a temporary overlay, which is thrown away"):
                part.state_dict()
        model.experts.flush()
        assert torch.equal(ExpertStore(place).read(0)["w1"], expert(0)["w1"] + 1), "it can be trained and paged"


def test_slots_need_an_expert_to_know_their_shapes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no expert yet"):
        paged(ExpertStore(tmp_path / "experts"))
    with pytest.raises(UsageError, match="at least one slot"):
        paged(filled(tmp_path), slots=0)
    dotted = ExpertStore(tmp_path / "dotted")
    dotted.write(0, {"w1.weight": torch.ones(2), "w1.scale": torch.ones(1, dtype=torch.int8)})
    module = paged(dotted)
    module.swap_to([0])
    assert [name for name, _ in module.named_parameters()][:2] == ["slots.0.w1_weight", "slots.0.w1_scale"]
    assert (
        torch.equal(module.slot_of(0)["w1.weight"], torch.ones(2)) and not module.slot_of(0)["w1.scale"].requires_grad
    )
    module.attach_optimizer(OPTIMIZERS["adamw"]([one for one in module.parameters() if one.requires_grad]))
    module.flush()
    dotted.write(1, {"a.b": torch.ones(1), "a_b": torch.ones(1)})
    dotted.delete(0)
    with pytest.raises(UsageError, match='the tensor "a_b" of an expert cannot be the parameter "a_b": that is taken'):
        paged(dotted)
    dotted.write(1, {"forward": torch.ones(1)})
    with pytest.raises(UsageError, match='the parameter "forward": that is taken'):
        paged(dotted)
    with pytest.raises(NotFoundError, match="expert 1 has no tensor w; it has forward"):
        paged(dotted, names=["w"])
