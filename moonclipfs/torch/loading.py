"""From a saved snapshot to state dicts, or straight into a model and an optimizer that exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.torch.fitting import check_optimizer
from moonclipfs.torch.parts import state_of, unwrapped
from moonclipfs.torch.reading import read_all
from moonclipfs.torch.saved import Saved, SavedTensor
from moonclipfs.torch.sharded import as_shard, is_sharded, local_of
from moonclipfs.torch.sharing import Key, shared_tensors
from moonclipfs.torch.statedict import Maker, Path, plain_name

_LISTED = 5


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found: `state` has the state dict of each part that was not read straight into an object."""

    id: str
    step: int
    metadata: Mapping[str, Any]
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def extra(self) -> Any:
        """What was given as `extra`, None if nothing was."""
        return self.state.get("extra")


class Loading:
    """One load: first `plan_*` for what is wanted, which checks everything, then `read`."""

    def __init__(self, saved: Saved, *, device: torch.device | None, strict: bool, allow_pickle: bool) -> None:
        self._saved = saved
        self._device = device or torch.device("cpu")
        self._strict = strict
        self._allow_pickle = allow_pickle
        self._wanted: dict[Key, torch.Tensor] = {}
        self._fresh: dict[Key, torch.Tensor] = {}
        self._parameters: list[torch.Tensor] = []
        """Those of the optimizer that is loaded, in the order of its state dict: its state is sharded as they are."""

    def read(self, pool: Executor) -> None:
        """Read all that was planned. Raises CorruptError."""
        read_all(((self._saved.tensors(part)[name], target) for (part, name), target in self._wanted.items()), pool)

    def plan_state(self, part: str, live: Any = None) -> Any:
        """The state dict of a part, its tensors to be filled by `read`: those of `live` where they fit, else new ones.

        `live` is a state dict whose tensors may be written to.
        """
        targets: dict[Path, torch.Tensor] = {}
        _find_tensors(live, (), targets)

        def tensor(name: str, node: Mapping[str, Any], path: Path) -> object:
            return self._place(part, name, node, path, targets.get(path))

        maker = Maker(tensor, self._saved.namer(part), allow_pickle=self._allow_pickle)
        self._fresh |= self._shared(part)
        return maker.value(self._saved.tree(part))

    def _place(self, part: str, name: str, node: Mapping[str, Any], path: Path, live: torch.Tensor | None) -> object:
        saved = self._tensor(part, name)
        if node["$"] == "a":
            array = torch.empty(saved.shape, dtype=saved.dtype)
            self._wanted[part, name] = array
            return array.numpy()
        local = None if live is None else local_of(live, name)
        if local is not None and _fits(local, saved):
            self._wanted[part, name] = local
            return live
        made = self._fresh.get((part, name))
        if made is None:
            made = torch.empty(saved.shape, dtype=saved.dtype, device=self._device)
        self._wanted[part, name] = made
        return self._sharded(made, node, path)

    def _sharded(self, local: torch.Tensor, node: Mapping[str, Any], path: Path) -> torch.Tensor:
        """What was a shard becomes one again, where the optimizer's parameter is one like it."""
        at = path[1] if len(path) > 1 and path[0] == "state" else None
        if "g" not in node or not isinstance(at, int) or not 0 <= at < len(self._parameters):
            return local
        return as_shard(local, self._parameters[at])

    def _tensor(self, part: str, name: str) -> SavedTensor:
        try:
            return self._saved.tensors(part)[name]
        except KeyError:
            raise CorruptError(f"{self._saved.id}: no file of {part} holds the tensor {name}") from None

    def _shared(self, part: str) -> dict[Key, torch.Tensor]:
        """New tensors of a part for those that share memory."""
        known = {(part, name): (one.dtype, one.shape) for name, one in self._saved.tensors(part).items()}
        made: dict[Key, torch.Tensor] = {}
        for group in self._saved.state["shared"]:
            try:
                made |= shared_tensors(group, known, self._device)
            except (TypeError, ValueError, RuntimeError) as error:
                raise CorruptError(f"{self._saved.id}: tensors that share memory do not fit it ({error})") from error
        return made

    def plan_into(self, part: str, target: Any) -> Callable[[], object]:
        """Plan to read a part into an object; returns what is to be called after `read`. Raises UsageError."""
        if part == "model":
            return self._plan_model(unwrapped(target))
        if isinstance(target, dict):
            state = self.plan_state(part, target)
            return lambda: target.update(state)
        if not hasattr(target, "load_state_dict"):
            raise UsageError(f"{part} is a {type(target).__qualname__}: it has no load_state_dict()")
        self._parameters = [one for group in getattr(target, "param_groups", ()) for one in group["params"]]
        state = self.plan_state(part, target.state_dict())
        self._parameters = []
        check_optimizer(self._saved.id, target, state)
        return lambda: target.load_state_dict(state)

    def _plan_model(self, model: Any) -> Callable[[], object]:
        """Plan to read the model's tensors in place, or, where it has hooks that must see them, to give them to it.

        Raises UsageError, which names the tensors, for names and shapes that do not match.
        """
        live = state_of(model, "model")
        targets: dict[Path, torch.Tensor] = {}
        _find_tensors(live, (), targets)
        named = {plain_name(path): tensor for path, tensor in targets.items()}
        if not self._is_plain(model, live):
            # A shard has no other place than where it is: it cannot be made anew without the other ranks.
            sharded = any(is_sharded(tensor) for tensor in named.values())
            return partial(self._give, model, self.plan_state("model", live if sharded else None))
        saved = self._saved.tensors("model")
        self._check_names(set(saved), set(named))
        self._check_shapes(saved, named)
        places: dict[object, str] = {}
        for name in named:
            if name in saved:
                local = local_of(named[name], name)
                places[local.data_ptr(), local.shape, local.stride(), local.dtype] = name  # the last name of tied ones
        for name in places.values():
            self._wanted["model", name] = local_of(named[name], name)
        return _nothing

    def _give(self, model: Any, state: Any) -> None:
        """Let a model's own code have the state dict. Raises UsageError when that says that it does not fit."""
        # Tensors on the meta device have no memory to copy to.
        assign = any(one.is_meta for one in (*model.parameters(), *model.buffers()))
        try:
            model.load_state_dict(state, strict=self._strict, assign=assign)
        except RuntimeError as error:
            raise UsageError(f"{self._saved.id} does not fit the model: {' '.join(str(error).split())}") from error

    def _is_plain(self, model: Any, live: Any) -> bool:
        """Whether all of a model's state dict is memory of its own parameters and buffers."""
        if not isinstance(model, torch.nn.Module):
            return True
        own = {id_of(tensor) for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
        values = live.values()
        if not all(isinstance(value, torch.Tensor) and id_of(value) in own for value in values):
            return False
        hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
        return not any(getattr(module, hook, None) for module in model.modules() for hook in hooks)

    def _check_names(self, saved: set[str], wanted: set[str]) -> None:
        missing, unexpected = sorted(wanted - saved), sorted(saved - wanted)
        if self._strict and (missing or unexpected):
            raise UsageError(
                f"{self._saved.id} does not fit the model: "
                + "; ".join(
                    text
                    for text in (
                        f"it lacks {_listed(missing)}" if missing else "",
                        f"it has also {_listed(unexpected)}" if unexpected else "",
                    )
                    if text
                )
                + " (strict=False loads what both have)"
            )

    def _check_shapes(self, saved: Mapping[str, SavedTensor], named: Mapping[str, torch.Tensor]) -> None:
        wrong = [
            f"{name} is saved as {tuple(saved[name].shape)}, and {tuple(local_of(tensor, name).shape)} in the model"
            for name, tensor in named.items()
            if name in saved and tuple(local_of(tensor, name).shape) != tuple(saved[name].shape)
        ]
        if wrong:
            raise UsageError(f"{self._saved.id} does not fit the model: {'; '.join(wrong[:_LISTED])}")


def _nothing() -> None:
    """There is nothing left to do."""


def id_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors of one memory."""
    if is_sharded(tensor):
        tensor = local_of(tensor, "")
    return str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _fits(live: torch.Tensor, saved: SavedTensor) -> bool:
    whole = live.dtype is saved.dtype and tuple(live.shape) == tuple(saved.shape) and not live.is_meta
    # What is expanded has several elements in one place.
    return whole and (live.is_contiguous() or 0 not in live.stride())


def _find_tensors(value: Any, path: Path, found: dict[Path, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = value
    elif isinstance(value, dict):
        for key, item in value.items():
            _find_tensors(item, (*path, key), found)
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            _find_tensors(item, (*path, at), found)


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
