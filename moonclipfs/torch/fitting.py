"""Whether a saved optimizer state fits an optimizer, told before anything of it is changed.

Torch itself compares the sizes of groups only, and only when it has been given the state: moments of another shape, or
the state of another kind of optimizer, come up at the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moonclipfs.errors import UsageError
from moonclipfs.torch.sharded import local_of

_OF_SCHEDULERS = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Keys of a group that no optimizer has by itself."""
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")
"""State that has the shape of its parameter."""


def check_optimizer(snapshot: str, optimizer: Any, state: Any) -> None:
    """Raise UsageError, which says what differs, where `state` of `snapshot` cannot be that of this optimizer.

    Shapes count, values do not: tensors of `state` need not be read. Objects that are no optimizers of torch pass.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(state, Mapping):
        return
    saved, live = state.get("param_groups"), optimizer.param_groups
    if not isinstance(saved, list):
        return
    unfit = f"{snapshot} does not fit the optimizer: "
    sizes, wanted = [len(group["params"]) for group in saved], [len(group["params"]) for group in live]
    if sizes != wanted:
        raise UsageError(f"{unfit}it was saved with groups of {_listed(sizes)} parameters, and has {_listed(wanted)}")
    for group in saved:
        missing = optimizer.defaults.keys() - group.keys()
        unknown = group.keys() - optimizer.defaults.keys() - _OF_SCHEDULERS
        if missing and unknown:  # one alone may be another version of torch
            raise UsageError(
                f"{unfit}it was saved with {', '.join(sorted(unknown))}, and a {type(optimizer).__qualname__} has "
                f"{', '.join(sorted(missing))}"
            )
    _check_shapes(unfit, saved, live, state.get("state", {}))


def _check_shapes(unfit: str, saved: list[Any], live: list[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    for group, own in zip(saved, live, strict=True):
        names = own.get("param_names") or group.get("param_names") or group["params"]
        for index, parameter, name in zip(group["params"], own["params"], names, strict=True):
            kept = state.get(index)
            for key in _SHAPED:
                one = kept.get(key) if isinstance(kept, Mapping) else None
                if isinstance(one, torch.Tensor) and one.dim() and _shape(one) != _shape(parameter):
                    raise UsageError(
                        f"{unfit}{key} of its parameter {name} is saved as {_shape(one)}, and the parameter is "
                        f"{_shape(parameter)}: are the parameters in another order?"
                    )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(local_of(tensor, "").shape)


def _listed(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes)) or "no"
