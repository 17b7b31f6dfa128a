"""What an optimizer knows of a tensor, under names beside it: `w1_m` and `w1_v` are the moments of `w1`."""

from __future__ import annotations

from collections.abc import Collection

SUFFIXES = {
    "exp_avg": "_m",
    "exp_avg_sq": "_v",
    "max_exp_avg_sq": "_x",
    "momentum_buffer": "_b",
    "step": "_t",
}
"""By the optimizer's own word: Adam's two moments, the largest second one (AMSGrad), SGD's momentum, steps taken."""


def owner(name: str, names: Collection[str]) -> str | None:
    """Return the name of the tensor that `name` is state of, None when it is a tensor of its own.

    It is state when it is the name of another tensor of the same expert and one of the suffixes.
    """
    stem = name[:-2]
    return stem if stem in names and name[-2:] in SUFFIXES.values() else None


def weights(names: Collection[str]) -> list[str]:
    """Return the names that are no state of another, in the same order."""
    return [name for name in names if owner(name, names) is None]
