"""The part of an optimizer's state that belongs to one expert: out of the optimizer, and into it, by tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moonclipfs.errors import UsageError
from moonclipfs.torch.moments import SUFFIXES

_STEPS_OF_AN_OLD_EXPERT = 1_000_000.0
"""Taken where moments come without a count of steps: so many that the moments need no correction for a start at 0."""


class OptimizerState:
    """What an optimizer of the Adam or the SGD family keeps of each parameter. Moments have the parameter's dtype."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError for an optimizer whose state is not known here."""
        self.optimizer = optimizer
        kinds = {_names_of(group, type(optimizer).__name__) for group in optimizer.param_groups}
        if len(kinds) != 1:
            raise UsageError(f"the groups of this {type(optimizer).__name__} keep different state")
        self._names = kinds.pop()

    @property
    def suffixes(self) -> list[str]:
        """Suffixes of the names under which state of this optimizer is kept."""
        return [SUFFIXES[name] for name in self._names]

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the optimizer trains this parameter."""
        return any(parameter is one for group in self.optimizer.param_groups for one in group["params"])

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the optimizer has state of a parameter."""
        return bool(self.optimizer.state.get(parameter))

    def take(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the state of a parameter by suffix: the optimizer's own tensors, on its device.

        A count of steps that was assumed and has not moved is left out, as in the file that it came from.
        """
        state = self.optimizer.state.get(parameter) or {}
        unknown = state.keys() - set(self._names)
        if unknown:
            raise UsageError(f"the optimizer keeps {', '.join(sorted(unknown))}, which is not known here")
        taken = {}
        for name in self._names:
            value = state.get(name)
            if value is not None and not (name == "step" and float(value) == _STEPS_OF_AN_OLD_EXPERT):
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                taken[SUFFIXES[name]] = tensor.float() if name == "step" else tensor
        return taken

    def give(self, parameter: torch.nn.Parameter, state: Mapping[str, torch.Tensor]) -> None:
        """Make this the whole state of a parameter, by suffix; none where moments are missing, as at its first step."""
        self.optimizer.state.pop(parameter, None)
        found = {name: state[SUFFIXES[name]] for name in self._names if SUFFIXES[name] in state}
        moments = {name: tensor for name, tensor in found.items() if name != "step"}
        if "exp_avg" in self._names:
            if not {"exp_avg", "exp_avg_sq"} <= moments.keys():
                return
            if "max_exp_avg_sq" in self._names:
                moments.setdefault("max_exp_avg_sq", moments["exp_avg_sq"])
        with torch.inference_mode(False):  # what is made in inference mode, no optimizer could change
            made = {
                name: tensor.to(parameter.device, parameter.dtype, copy=True).reshape(parameter.shape)
                for name, tensor in moments.items()
            }
            if "step" in self._names:
                steps = found.get("step", torch.tensor(_STEPS_OF_AN_OLD_EXPERT))
                made["step"] = steps.float().to(self._step_device(parameter), copy=True).reshape(())
        if made:
            self.optimizer.state[parameter] = made

    def _step_device(self, parameter: torch.nn.Parameter) -> torch.device:
        for group in self.optimizer.param_groups:
            if any(parameter is one for one in group["params"]) and (group.get("capturable") or group.get("fused")):
                return parameter.device
        return torch.device("cpu")


def _names_of(group: Mapping[str, object], kind: str) -> tuple[str, ...]:
    """Return what an optimizer keeps of each parameter of a group, by its own words."""
    if "betas" in group and "amsgrad" in group:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()), "step")
    if "momentum" in group and "nesterov" in group:
        return ("momentum_buffer",)
    raise UsageError(f"experts can carry the state of Adam, AdamW and SGD, not that of {kind}")
