"""What the name of a tensor says about experts: of which layer, which expert, and which part of it.

Only what is certain counts: an element `experts`, GGUF's `ffn_*_exps`, or the module of a model that is known.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache
from typing import NamedTuple


class Shape(enum.Enum):
    """How a tensor holds experts."""

    ONE = enum.auto()
    """A part of one expert."""
    STACK = enum.auto()
    """A part of every expert, one behind the other along the first dimension."""
    FLAT = enum.auto()
    """The same, but the first dimension counts the rows of all experts."""
    ROUTER = enum.auto()
    """No part of an expert: its first dimension counts them."""


class Spot(NamedTuple):
    """Where a tensor belongs. `group` is the name up to the experts with `*` in place of the layer's number; `part`
    is the name that it has in the file of an expert; `expert` is -1 unless the tensor is of ONE.
    """

    shape: Shape
    group: str
    layer: int
    part: str
    expert: int = -1


_WRAPPERS = ("local_experts", "deepspeed_experts")
"""Modules between `experts` and the number of one: Megatron's and DeepSpeed's."""
_NUMBER = re.compile(r"(?:expert_)?([0-9]{1,9})")
_COUNTED = frozenset({"layers", "layer", "blocks", "block", "blk", "h"})
"""What a layer's number follows."""
_GGUF_STACK = re.compile(r"(ffn_(?:gate|up|down|gate_up))_exps")
_GGUF_ONE = re.compile(r"ffn_(?:gate|up|down)")
_LINEAR = re.compile(r"(.+\.(?:block_sparse_moe|mlp))\.((?:input|output)_linear\..+)")
_FLAT_PARTS = ("mlp.w1", "mlp.v1", "mlp.w2")
_ROUTER = ".router.layer.weight"
_PLAIN = _COUNTED | {
    "model", "models", "module", "transformer", "language_model", "text_model", "base_model", "backbone", "gpt_neox",
    "state_dict", "_orig_mod", "_fsdp_wrapped_module",
}  # fmt: skip
"""Words before a layer's number that tell nothing apart."""
_PLACES = 4096
"""Modules whose layer is remembered."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


def spot(name: str) -> Spot | None:
    """Return what `name` says, None when it says nothing certain."""
    if name.startswith("blk."):
        return _gguf(name.split("."))
    before, found, after = name.partition(".experts.")
    if found:
        place = _place(before)
        return None if place is None else _in_module(*place, after)
    if name.endswith(_ROUTER):
        place = _place(name.removesuffix(_ROUTER))
        return None if place is None else Spot(Shape.ROUTER, *place, "")
    linear = _LINEAR.fullmatch(name)
    if linear is not None:
        place = _place(linear[1])
        return None if place is None else Spot(Shape.STACK, *place, linear[2])
    return None


def directory_name(group: str, layer: int, *, whole: bool = False) -> str:
    """The name of the directory of a layer's experts: L003, or with words of the group before it, as `decoder.L003`.

    These are the words before the layer's number that tell something, or all words with `whole`. Empty where no safe
    name can be made.
    """
    before, _, after = group.partition("*")
    words = [word for word in before.split(".") if word and (whole or word not in _PLAIN)]
    if whole:
        words += [word for word in after.split(".") if word]
    name = ".".join([*words, f"L{layer:03}"])
    return name if _NAME.fullmatch(name) and not name.startswith(".") else ""


def _in_module(group: str, layer: int, after: str) -> Spot | None:
    """What follows `experts` in a name: the number of one and its part, or a part of all."""
    head, _, rest = after.partition(".")
    if head in _WRAPPERS:
        after = rest
        head, _, rest = after.partition(".")
    number = _NUMBER.fullmatch(head)
    if number is not None:
        return Spot(Shape.ONE, group, layer, rest, int(number[1])) if rest else None
    if not after:
        return None
    return Spot(Shape.FLAT if after in _FLAT_PARTS else Shape.STACK, group, layer, after)


def _gguf(parts: list[str]) -> Spot | None:
    """`blk.3.ffn_gate_exps.weight`, or one expert of it in older files: `blk.3.ffn_gate.17.weight`."""
    if len(parts) < 4 or not _is_number(parts[1]):
        return None
    group, layer = "blk.*", int(parts[1])
    stack = _GGUF_STACK.fullmatch(parts[2])
    if stack is not None:
        return Spot(Shape.STACK, group, layer, ".".join([stack[1], *parts[3:]]))
    if len(parts) > 4 and _GGUF_ONE.fullmatch(parts[2]) and _is_number(parts[3]):
        return Spot(Shape.ONE, group, layer, ".".join([parts[2], *parts[4:]]), int(parts[3]))
    return None


@lru_cache(_PLACES)
def _place(module: str) -> tuple[str, int] | None:
    """The group of a module, and its layer: the first number that follows a word for layers."""
    parts = module.split(".")
    for at in range(1, len(parts)):
        if parts[at - 1] in _COUNTED and _is_number(parts[at]):
            return ".".join([*parts[:at], "*", *parts[at + 1 :]]), int(parts[at])
    return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
