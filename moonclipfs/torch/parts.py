"""What a save was given, taken apart: a structure and named tensors for each of model, optimizer and the others."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moonclipfs.errors import UsageError
from moonclipfs.torch.statedict import Namer, Taker, parameter_namer, plain_name

STATE_FILE = "state.json"
PARTS = ("model", "optimizer", "scheduler", "scaler", "extra")
_WRAPPED = ("_orig_mod", "module")


@dataclass(slots=True)
class Part:
    """One state dict: its `tree`, the live tensors by name, and the names of an optimizer's parameters."""

    tree: Any
    tensors: dict[str, torch.Tensor]
    parameters: list[str] = field(default_factory=list)

    @property
    def namer(self) -> Namer:
        """How its tensors are named by their places."""
        return namer_of(self.parameters)


def namer_of(parameters: Sequence[str]) -> Namer:
    """The names of tensors by their places, in an optimizer's state (with parameters) or any other."""
    return parameter_namer(parameters) if parameters else plain_name


def unwrapped(model: Any) -> Any:
    """The module inside of what `torch.compile` or data parallel training put around it."""
    while isinstance(model, torch.nn.Module):
        inner = next((found for name in _WRAPPED if (found := _only_child(model, name)) is not None), None)
        if inner is None:
            break
        model = inner
    return model


def _only_child(model: torch.nn.Module, name: str) -> torch.nn.Module | None:
    wrapper = type(model).__name__ in ("OptimizedModule", "DistributedDataParallel", "DataParallel")
    return model._modules.get(name) if wrapper else None


def take(given: Mapping[str, Any], *, allow_pickle: bool) -> dict[str, Part]:
    """Take apart what was given by part; None is left out. Raises UsageError for what cannot be kept."""
    model = unwrapped(given.get("model"))
    parts = {}
    for name, value in given.items():
        if value is None:
            continue
        parameters = parameter_names(model, value) if name == "optimizer" else []
        taker = Taker(name, namer_of(parameters), allow_pickle=allow_pickle)
        tree = taker.tree(state_of(unwrapped(value), name))
        parts[name] = Part(tree, taker.tensors, parameters)
    return parts


def state_of(value: Any, part: str) -> Any:
    """The state dict of an object, or the value itself where it is a dict. Raises UsageError for anything else, and
    for a lazy module that has never run.
    """
    if isinstance(value, Mapping):
        return value if isinstance(value, dict) else dict(value)
    if hasattr(value, "state_dict"):
        _check_materialized(value, part)
        return value.state_dict()
    if part == "extra":
        return value
    raise UsageError(f"{part} is a {type(value).__qualname__}: give an object with state_dict(), or a dict")


def _check_materialized(value: Any, part: str) -> None:
    if isinstance(value, torch.nn.Module):
        for name, one in (*value.named_parameters(), *value.named_buffers()):
            if torch.nn.parameter.is_lazy(one):
                raise UsageError(f"{part}: {name} has no shape yet: run the model once before it is saved or loaded")


def parameter_names(model: Any, optimizer: Any) -> list[str]:
    """The names of an optimizer's parameters in the order of its state dict; empty when they are not all known."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return []
    names: dict[int, str] = {}
    if isinstance(model, torch.nn.Module):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for group in groups:
        own = group.get("param_names") or [None] * len(group["params"])
        found += [names.get(id(one)) or name for one, name in zip(group["params"], own, strict=False)]
    known = [name for name in found if name]
    return known if len(known) == len(found) and len(set(known)) == len(known) else []


def plain_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller says of a save, as JSON values; numbers that are not finite become their names as text.

    Raises UsageError for anything else.
    """
    try:
        found: dict[str, Any] = _finite(json.loads(json.dumps(dict(metadata))))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"metadata has to be text, numbers and lists and dicts of these, by names: {error}") from error
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
