"""Experts of a model of which only some are on its device: a fixed number of slots, filled as they are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from moonclipfs.errors import NotFoundError, UsageError
from moonclipfs.torch.elements import TORCH_DTYPES
from moonclipfs.torch.experts import ExpertId
from moonclipfs.torch.moments import SUFFIXES, weights
from moonclipfs.torch.optimizerstate import OptimizerState
from moonclipfs.torch.tiers import ExpertTiers

_EMPTY = -1
"""Stands for an empty slot in the extra state of the module."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """What the expert in a slot was read from: the dtypes of all its tensors in order, and those kept as they were,
    which neither the slot nor the optimizer holds.
    """

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Slot(nn.Module):
    """The parameters of whatever expert is in the slot. They are no part of a state dict: the files hold them."""

    def __init__(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        """The tensor of an expert's file to the attribute of this module, where a name can have no dot."""
        for name, (dtype, shape) in shapes.items():
            attribute = name.replace(".", "_")
            if hasattr(self, attribute):
                raise UsageError(
                    f'the tensor "{name}" of an expert cannot be the parameter "{attribute}": that is taken'
                )
            trains = dtype.is_floating_point or dtype.is_complex
            self.names[name] = attribute
            self.register_parameter(
                attribute, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=trains)
            )

    def __getitem__(self, name: str) -> nn.Parameter:
        return cast(nn.Parameter, getattr(self, self.names[name]))

    def tensors(self) -> dict[str, nn.Parameter]:
        """The parameters by the names of the expert's file."""
        return {name: self[name] for name in self.names}

    def _save_to_state_dict(self, *_: Any) -> None:
        pass  # see the class

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


class PagedExperts(nn.Module):
    """`slots` experts at a time, as parameters on the device of `tiers`; the others are in RAM and in files.

    `swap_to` brings experts in. One that leaves takes its weights, and its part of the state of an attached optimizer,
    with it; its gradients are dropped, so step before you swap. Each slot has parameters of its own, so every expert
    has its own count of steps, and an expert that got no gradient is not stepped.

    All experts must have the tensors of the first one (those that are not moments, or `names`), in shape and dtype.
    `moments_dtype` is that of moments in files, `torch.bfloat16` for half the size; None keeps them exactly.

    A state dict holds which expert is in which slot, and nothing else: the files hold the experts, and are flushed
    when it is taken. In an overlay that is thrown away, taking one raises RuntimeError.
    """

    def __init__(
        self,
        tiers: ExpertTiers,
        slots: int,
        *,
        names: Sequence[str] | None = None,
        moments_dtype: torch.dtype | None = None,
    ) -> None:
        """Raises UsageError where there is no expert yet, or no slot; NotFoundError for a name that is not there."""
        super().__init__()
        first = next(iter(tiers.store.ids()), None)
        if first is None or slots < 1:
            raise UsageError(f"{tiers.store.root} holds no expert yet" if slots > 0 else "at least one slot is needed")
        found = tiers.store.stat(first).tensors
        wanted = weights(found.keys()) if names is None else names
        absent = [name for name in wanted if name not in found]
        if absent:
            raise NotFoundError(f"expert {first} has no tensor {', '.join(absent)}; it has {', '.join(found)}")
        self.tiers = tiers
        self.moments_dtype = moments_dtype
        self._shapes = {name: (TORCH_DTYPES[found[name][0]], found[name][1]) for name in wanted}
        self.slots = nn.ModuleList(Slot(self._shapes, tiers.transfer.device) for _ in range(slots))
        self.resident: list[ExpertId | None] = [None] * slots
        """The expert in each slot."""
        self.swaps = 0
        self._origins = [_Origin()] * slots
        self._used = [0] * slots
        self._clock = 0
        self._state: OptimizerState | None = None
        self._suffixes: list[str] = []
        """Of the state that travels with experts."""
        self.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]

    def ids(self) -> list[ExpertId]:
        """Return the numbers of all experts, in order."""
        return self.tiers.store.ids()

    def slot_of(self, expert: ExpertId) -> Slot:
        """Return the slot of an expert; raises NotFoundError when it is in none."""
        return self._slot(self._index(expert))

    def tensors_of(self, expert: ExpertId) -> dict[str, torch.Tensor]:
        """Return all tensors of an expert as they are now, its moments too, in RAM and in the order of its file."""
        if expert not in self.resident:
            return self.tiers.held(expert)
        index = self._index(expert)
        origin, slot = self._origins[index], self._slot(index)
        now: dict[str, torch.Tensor] = dict(slot.tensors())
        if self._state is not None and self._suffixes:
            for name in self._shapes:
                for suffix, tensor in self._state.take(slot[name]).items():
                    now[name + suffix] = self._as_in_file(suffix, tensor, origin.dtypes.get(name + suffix))
        now = {**origin.kept, **self.tiers.transfer.to_ram(now)}
        return {name: now.pop(name) for name in origin.dtypes if name in now} | now

    def stacked(self, name: str, experts: Sequence[ExpertId]) -> torch.Tensor:
        """Return one tensor of several experts that are in slots, stacked in this order; gradients flow back."""
        return torch.stack([self.slot_of(expert)[name] for expert in experts])

    def swap_to(self, experts: Sequence[ExpertId]) -> list[int]:
        """Bring experts into slots and return the slot of each. The least recently wanted ones make room.

        Raises UsageError for more experts than slots, and whatever reading or parking one raises: what was swapped
        until then stays so, and no expert is lost.
        """
        wanted = list(dict.fromkeys(experts))
        if len(wanted) > len(self.slots):
            raise UsageError(f"{len(wanted)} experts do not fit into {len(self.slots)} slots")
        missing = [expert for expert in wanted if expert not in self.resident]
        self.tiers.prefetch(missing[1:])
        for expert in missing:
            kept = set(wanted)
            free = (index for index, one in enumerate(self.resident) if one not in kept)
            self._replace(min(free, key=lambda index: (self.resident[index] is not None, self._used[index])), expert)
        self._clock += 1
        for expert in wanted:
            self._used[self._index(expert)] = self._clock
        return [self._index(expert) for expert in experts]

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, *, in_files: bool = True) -> None:
        """Let the state of an optimizer (Adam, AdamW, SGD) travel with the experts from here on.

        Experts that are in slots get what their files hold, unless the optimizer has state of them already. Moments of
        a file without a count of steps are taken for those of an expert that was trained for long.

        With `in_files=False`, for files that can hold weights only (`@experts`), the state of an expert that leaves is
        dropped, and one that comes starts without.
        """
        state = OptimizerState(optimizer)
        if not all(state.knows(one) for one in self.parameters() if one.requires_grad):
            raise UsageError("the optimizer does not train the slots: make it with the parameters of this module")
        self._state, self._suffixes = state, state.suffixes if in_files else []
        for index, expert in enumerate(self.resident):
            if expert is not None:
                tensors = self.tiers.held(expert)
                self._origins[index] = self._origin(tensors)
                self._give_state(index, tensors, keep=True)

    def add(
        self,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        like: ExpertId | None = None,
        layer: int | None = None,
    ) -> ExpertId:
        """Make a new expert, of these tensors or of the weights of another, and return its number, which is new.

        Its file is written at once. Raises UsageError for tensors that are not like those of the other experts.
        """
        if (tensors is None) == (like is None):
            raise UsageError("a new expert is made of tensors, or like another one")
        if tensors is None:
            source = self.tensors_of(cast(ExpertId, like))
            tensors = {name: source[name] for name in self._shapes}
            layer = like[0] if layer is None and isinstance(like, tuple) else layer
        self._check(tensors, "the new expert")
        return self.tiers.create(self.tiers.transfer.to_ram(tensors), layer)

    def prune(self, experts: Sequence[ExpertId]) -> None:
        """Delete experts, with their files; their numbers are not used again. Their slots become empty."""
        for expert in experts:
            self.tiers.delete(expert)
            if expert in self.resident:
                self._empty(self._index(expert))

    def flush(self) -> None:
        """Write everything that changed to the files; experts in slots stay there."""
        for index in range(len(self.slots)):
            self._park(index)
        self.tiers.flush()

    def report(self) -> dict[str, Any]:
        """Return the counters of the tiers, and what the slots hold."""
        held = {"slots": len(self.slots), "resident": list(self.resident), "experts": len(self.ids())}
        return {**held, "swaps": self.swaps, **self.tiers.report()}

    def get_extra_state(self) -> torch.Tensor:
        """Return which expert is in which slot: int64, one row of one or two numbers a slot, -1 where it is empty."""
        rows = [list(one) if isinstance(one, tuple) else [one] for one in self.resident if one is not None]
        width = max(map(len, rows), default=1)
        numbers = iter(rows)
        return torch.tensor([[_EMPTY] * width if one is None else next(numbers) for one in self.resident])

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Bring the experts that a state dict names into their slots."""
        if len(state) != len(self.slots):
            raise UsageError(f"the state dict is that of {len(state)} slots, and there are {len(self.slots)}")
        for index in range(len(self.slots)):
            self._park(index)
            self._empty(index)
        for index, row in enumerate(state.tolist()):
            if row[0] != _EMPTY:
                self._replace(index, row[0] if len(row) == 1 else (row[0], row[1]))

    def _slot(self, index: int) -> Slot:
        return cast(Slot, self.slots[index])

    def _index(self, expert: ExpertId) -> int:
        if expert not in self.resident:
            raise NotFoundError(f"expert {expert} is in no slot: swap_to brings it there")
        return self.resident.index(expert)

    def _replace(self, index: int, expert: ExpertId) -> None:
        """Put another expert into a slot. Whatever fails does so before the slot changes."""
        tensors = self.tiers.held(expert)
        self._check(tensors, f"expert {expert}")
        self._park(index)
        slot = self._slot(index)
        self.tiers.transfer.fill((slot[name], tensors[name]) for name in self._shapes)
        self.resident[index], self._origins[index] = expert, self._origin(tensors)
        for parameter in slot.parameters():
            parameter.grad = None
        self._give_state(index, tensors)
        self.swaps += 1

    def _empty(self, index: int) -> None:
        self.resident[index], self._origins[index] = None, _Origin()
        for parameter in self._slot(index).parameters():
            with torch.no_grad():
                parameter.zero_()
            parameter.grad = None
        self._give_state(index, {})

    def _park(self, index: int) -> None:
        """Hand what is in a slot to the tiers, which tell whether it changed."""
        expert = self.resident[index]
        if expert is not None:
            self.tiers.put(expert, self.tensors_of(expert))

    def _origin(self, tensors: Mapping[str, torch.Tensor]) -> _Origin:
        held = {name + suffix for name in self._shapes for suffix in ("", *self._suffixes)}
        kept = {name: tensor for name, tensor in tensors.items() if name not in held}
        return _Origin({name: tensor.dtype for name, tensor in tensors.items()}, kept)

    def _as_in_file(self, suffix: str, state: torch.Tensor, before: torch.dtype | None) -> torch.Tensor:
        """Return state in the dtype that files have it in: that of before, where no bit is lost by that."""
        if suffix == SUFFIXES["step"]:
            return state
        if self.moments_dtype is not None:
            return state.to(self.moments_dtype)
        if before is not None and before != state.dtype:
            narrow = state.to(before)
            if torch.equal(narrow.to(state.dtype), state):
                return narrow
        return state

    def _give_state(self, index: int, tensors: Mapping[str, torch.Tensor], *, keep: bool = False) -> None:
        """Let the optimizer have the state that these tensors hold of a slot, and no other; with `keep`, its own."""
        if self._state is None:
            return
        for name, parameter in self._slot(index).tensors().items():
            found = {suffix: tensors[name + suffix] for suffix in self._suffixes if name + suffix in tensors}
            if parameter.requires_grad and not (keep and self._state.has(parameter)):
                self._state.give(parameter, found)

    def _check(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        for name, (dtype, shape) in self._shapes.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
                has = "no such tensor" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise UsageError(f'"{name}" of {what} must be {dtype} {shape} as in the other experts; it has {has}')


def _before_state_dict(module: nn.Module, *_: Any) -> None:
    experts = cast(PagedExperts, module)
    if experts.tiers.store.is_temporary:
        raise RuntimeError(
            f"{experts.tiers.store.root} is in a temporary overlay, which is thrown away in the end: "
            "a checkpoint of these experts would name files that are gone; commit the overlay instead"
        )
    experts.flush()
