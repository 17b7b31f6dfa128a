"""The experts of a checkpoint: where the bytes of each lie in its files, told by the names and shapes of tensors.

Nothing is guessed: an expert of which a part is missing, doubled, or not one run of bytes is left out, and so are
stacks that disagree on how many experts they hold.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from moonclipfs import limits
from moonclipfs.formats import gguf, npz, safetensors, torchlegacy, torchzip
from moonclipfs.formats.expertnames import Shape, Spot, directory_name, spot
from moonclipfs.formats.layout import Layout, Tensor
from moonclipfs.types import DType


class Component(NamedTuple):
    """One tensor in the file of an expert: `length` bytes at `offset` of `file`, beside that in the checkpoint.

    `dtype` is one that safetensors has; where the format of `file` has others (quantised blocks), it is U8, `shape`
    counts bytes, and `kind` is that format's word. `origin` is the tensor that the bytes are in, and which part of it.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    origin: str
    kind: str = ""


Parts: TypeAlias = tuple[Component, ...]
"""All tensors of one expert, those with the longest elements first: so each is aligned."""
Layers: TypeAlias = Mapping[str, Mapping[int, Parts]]
"""The experts by the name of their layer's directory, then by number."""

_FORMATS = (safetensors.FORMAT, gguf.FORMAT, torchzip.FORMAT, torchlegacy.FORMAT, npz.FORMAT)
"""What is looked at, in this order: the first that has experts is taken, since others are the same model again."""
_MAIN_STEMS = ("model", "pytorch_model")
"""What the files of the model itself are called, where several in a directory hold tensors of the same names."""
_FORMS = 4096
"""Forms of heads whose length is remembered."""
_SIMPLE = re.compile(r"[\w.:\[\]-]*", re.ASCII)
_SHARD = re.compile(r"-\d{1,9}-of-\d{1,9}")
_DEEPSPEED = re.compile(r"layer_(\d{1,9})_expert_(\d{1,9})_mp_rank_\d{1,9}_model_states\.pt")
_GATED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
}


class _Found(NamedTuple):
    """A tensor that is about experts, and its file."""

    spot: Spot
    file: str
    tensor: Tensor


class _Module:
    """What was found of one layer of one group."""

    def __init__(self) -> None:
        self.ones: dict[int, dict[str, Component | None]] = defaultdict(dict)
        """By number and name; None for a part that is no run of bytes, or is there twice."""
        self.stacks: dict[str, _Found] = {}
        self.flats: dict[str, _Found] = {}
        self.routers: list[Tensor] = []

    @property
    def matrices(self) -> set[str]:
        """What the parts are of, biases and scales left aside."""
        names = {*self.stacks, *self.flats}.union(*self.ones.values())
        return {_module_of(name) for name in names}


def recognise(files: Iterable[tuple[str, Layout]]) -> Layers:
    """Return the experts in the files of one directory, each with its name and its layout. Never raises."""
    by_format: dict[str, list[_Found]] = defaultdict(list)
    truncated = set()
    for file, layout in files:
        if layout.format in _FORMATS:
            by_format[layout.format] += _find(file, layout)
            if layout.truncated:
                truncated.add(layout.format)  # nobody can tell what every expert lacks
    for name in _FORMATS:
        if name in truncated:
            continue
        layers = _named(_modules(_of_one_model(by_format[name])))
        if layers:
            return layers
    return {}


def header(layer: str, number: int, parts: Parts) -> bytes:
    """The head of an expert's file: what the parts are, and in `__metadata__` where they come from."""
    metadata = _metadata(layer, str(number), [(part.name, part.kind, _origin(part)) for part in parts])
    return safetensors.make_header(((part.name, part.dtype, part.shape) for part in parts), metadata)


def header_length(layer: str, number: int, parts: Parts) -> int:
    """The length of `header`. There may be very many experts: those of a layer differ by number and origins alone."""
    form = tuple((part.name, part.dtype, part.shape, part.kind) for part in parts)
    differing = len(str(number)) + sum(_json_bytes(_origin(part)) for part in parts)
    return safetensors.header_length(_form_bytes(layer, form) + differing)


@lru_cache(_FORMS)
def _form_bytes(layer: str, form: tuple[tuple[str, DType, tuple[int, ...], str], ...]) -> int:
    """Bytes of the text of a head in which number and origins are empty."""
    metadata = _metadata(layer, "", [(name, kind, "") for name, _, _, kind in form])
    return len(safetensors.header_text([parts[:3] for parts in form], metadata))


def _metadata(layer: str, number: str, parts: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """What a head says beside its tensors; `parts` are (name, kind, origin)."""
    metadata = {"format": "pt", "layer": layer, "expert": number}
    for name, kind, origin in parts:
        metadata[f"origin:{name}"] = origin
        if kind:
            metadata[f"kind:{name}"] = _text(kind)
    return metadata


def _origin(part: Component) -> str:
    return _text(f"{part.file}:{part.origin}")


def _json_bytes(text: str) -> int:
    """Bytes of a text between the quotes of JSON, of which most characters stand for themselves."""
    return len(text) if _SIMPLE.fullmatch(text) else len(json.dumps(text, ensure_ascii=False).encode()) - 2


def _text(text: str) -> str:
    """`text` without the surrogates that stand for bytes which are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _find(file: str, layout: Layout) -> Iterator[_Found]:
    """The tensors of a file that are about experts."""
    found = (_Found(place, file, tensor) for tensor in layout.tensors if (place := spot(tensor.name)) is not None)
    match = _DEEPSPEED.fullmatch(file)
    if match is None:
        yield from found
        return
    # One expert to a file, whose name counts layers with experts only; inside, all layers are counted.
    ones = [one for one in found if one.spot.shape is Shape.ONE]
    if len({(*one.spot[1:3], one.spot.expert) for one in ones}) == 1:
        for one in ones:
            yield one._replace(spot=one.spot._replace(group="*", layer=int(match[1]), expert=int(match[2])))


def _of_one_model(found: list[_Found]) -> list[_Found]:
    """Drop what is not of the model, where several files hold tensors of the same names; all, if that is not clear."""
    if _is_distinct(found):
        return found
    for stem in _MAIN_STEMS:
        chosen = [one for one in found if _SHARD.sub("", one.file).rpartition(".")[0] == stem]
        if chosen:
            return chosen if _is_distinct(chosen) else []
    return []


def _is_distinct(found: list[_Found]) -> bool:
    # Files of DeepSpeed have names of their own for what lies in them: two ranks of one expert are doubled parts.
    names = Counter(one.tensor.name for one in found if not _DEEPSPEED.fullmatch(one.file))
    return not names or max(names.values()) == 1


def _modules(found: list[_Found]) -> Mapping[tuple[str, int], _Module]:
    modules: dict[tuple[str, int], _Module] = defaultdict(_Module)
    for one in found:
        place = one.spot
        module = modules[place.group, place.layer]
        if place.shape is Shape.ONE:
            parts = module.ones[place.expert]
            parts[place.part] = None if place.part in parts else _whole_tensor(one)
        elif place.shape is Shape.ROUTER:
            module.routers.append(one.tensor)
        else:
            (module.stacks if place.shape is Shape.STACK else module.flats)[place.part] = one
    return modules


def _named(modules: Mapping[tuple[str, int], _Module]) -> Layers:
    """The experts of each module under the name of a directory; of groups that would share one, the one with the
    shortest name keeps it, and the others take all their words.
    """
    layers: dict[str, Mapping[int, Parts]] = {}
    count = 0
    wanted: dict[str, set[str]] = defaultdict(set)
    for (group, _), module in modules.items():
        wanted[group] |= module.matrices
    for group, layer in sorted(modules, key=lambda key: (len(key[0]), key)):
        module = modules[group, layer]
        # What other layers have, and this one has not, is missing: a file may be, or its end.
        experts = _experts(module) if module.matrices == wanted[group] else {}
        count += len(experts)
        if count > limits.EXPERTS:
            return {}
        name = directory_name(group, layer)
        if name in layers:
            name = directory_name(group, layer, whole=True)
        if experts and name and name not in layers:
            layers[name] = dict(sorted(experts.items()))
    return layers


def _experts(module: _Module) -> Mapping[int, Parts]:
    stacked = _stacked(module.stacks) or _stacked(_unfolded(module))
    if not module.ones:
        return stacked
    return {} if stacked else _complete(module.ones)


def _complete(ones: Mapping[int, Mapping[str, Component | None]]) -> Mapping[int, Parts]:
    """The experts that have all parts which others of their layer have. Where weights are of several dtypes, as some
    are quantised and some are not, those of one dtype are compared.
    """
    alike: dict[tuple[tuple[str, DType | None], ...], list[int]] = defaultdict(list)
    for number, parts in ones.items():
        alike[tuple((name, None if part is None else part.dtype) for name, part in parts.items())].append(number)
    wanted: dict[tuple[str, DType | None], set[str]] = defaultdict(set)
    modules = set()
    for kinds in alike:
        for name, _ in kinds:
            modules.add(_module_of(name))
            wanted[_kind_of(name, dict(kinds))].add(name)
    complete = {}
    for kinds, numbers in alike.items():
        dtypes = dict(kinds)
        needed = set().union(*(wanted[_kind_of(name, dtypes)] for name in dtypes))
        if needed == dtypes.keys() and {*map(_module_of, dtypes)} == modules:
            for number in numbers:
                ordered = _ordered(ones[number].values())
                if ordered is not None:
                    complete[number] = ordered
    return complete


def _module_of(name: str) -> str:
    return name.partition(".")[0]


def _kind_of(name: str, dtypes: Mapping[str, DType | None]) -> tuple[str, DType | None]:
    module = _module_of(name)
    return module, dtypes.get(f"{module}.weight")


def _ordered(parts: Collection[Component | None]) -> Parts | None:
    """The parts of an expert in the order of its file; None when a file cannot hold them."""
    ordered = tuple(sorted(filter(None, parts), key=lambda part: (-part.dtype.bits, part.name)))
    fit = all(
        part.name.isprintable() and part.name != safetensors.METADATA and len(part.shape) <= limits.DIMENSIONS
        for part in ordered
    )
    return ordered if fit and len(parts) == len(ordered) <= limits.EXPERT_PARTS else None


def _stacked(stacks: Mapping[str, _Found]) -> Mapping[int, Parts]:
    """The experts of stacks that all hold as many, of which one at least holds matrices."""
    shapes = {one.tensor.shape for one in stacks.values()}
    counts = {shape[0] if shape and 0 not in shape else 0 for shape in shapes}
    if len(counts) != 1 or max(map(len, shapes)) < 3:
        return {}
    count = counts.pop()
    if not 0 < count <= limits.EXPERTS or not all(_is_sliceable(one.tensor) for one in stacks.values()):
        return {}
    experts = {}
    gated = _gated(stacks)
    for number in range(count):
        parts: list[Component | None] = []
        for name, one in stacks.items():
            part = _slice(name, one, number)
            parts += _halves(part, gated[name]) if name in gated else [part]
        ordered = _ordered(parts)
        if ordered is None:
            return {}
        experts[number] = ordered
    return experts


def _gated(stacks: Mapping[str, _Found]) -> Mapping[str, tuple[str, str]]:
    """The names of the halves of each stack that has two: gate before up, as their name says, in rows.

    That is sure of [E, 2I, H] beside [E, H, I] with nothing else: columns (Llama-4) are no runs of bytes, and what has
    biases, blocks or scales (gpt-oss) may alternate rows.
    """
    shapes = {name: one.tensor.shape for name, one in stacks.items()}
    for gate_up, halves in _GATED.items():
        down = gate_up.replace("gate_up", "down")
        if shapes.keys() == {gate_up, down} and len(shapes[gate_up]) == len(shapes[down]) == 3:
            (_, rows, columns), (_, outer, inner) = shapes[gate_up], shapes[down]
            dtype = stacks[gate_up].tensor.dtype
            if (rows, columns) == (2 * inner, outer) and dtype is not DType.BYTES and dtype.bits >= 8:
                return {gate_up: halves}
    return {}


def _halves(part: Component, names: tuple[str, str]) -> Iterator[Component]:
    rows, columns = part.shape
    length = part.length // 2
    for at, name in enumerate(names):
        yield part._replace(
            name=name,
            shape=(rows // 2, columns),
            offset=part.offset + at * length,
            length=length,
            origin=f"{part.origin}[{at * rows // 2}:{(at + 1) * rows // 2}]",
        )


def _unfolded(module: _Module) -> Mapping[str, _Found]:
    """DBRX: matrices whose rows are those of all experts, as stacks; the router says how many these are."""
    shapes = {one.tensor.shape for one in module.flats.values()}
    if len(module.flats) != 3 or len(shapes) != 1 or len(module.routers) != 1 or not module.routers[0].shape:
        return module.flats
    shape, count = shapes.pop(), module.routers[0].shape[0]
    if len(shape) != 2 or count < 1 or shape[0] % count:
        return module.flats
    unfolded = (count, shape[0] // count, shape[1])
    return {
        name: one._replace(tensor=_with_shape(one.tensor, unfolded))
        for name, one in module.flats.items()
        if one.tensor.strides is None
    }


def _with_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return Tensor(tensor.name, tensor.dtype, shape, tensor.offset, tensor.length, dtype_name=tensor.dtype_name)


def _whole_tensor(one: _Found) -> Component | None:
    """A tensor as a part of one expert; None when its elements do not follow each other."""
    tensor = one.tensor
    if tensor.strides is not None or not _is_plain(tensor, tensor.shape, tensor.length):
        return None
    return _component(one.spot.part, one, tensor.shape, tensor.offset, tensor.length, tensor.name)


def _is_sliceable(tensor: Tensor) -> bool:
    length, _ = _steps(tensor)
    return length > 0 and _is_plain(tensor, tensor.shape[1:], length)


def _steps(tensor: Tensor) -> tuple[int, int]:
    """Bytes of each slice of a stack, and from one to the next; zeros when slices are no runs of bytes."""
    if tensor.strides is None:
        length, rest = divmod(tensor.length, tensor.shape[0])
        return (0, 0) if rest else (length, length)
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.strides[1:]), strict=True):
        if size != 1 and stride != expected:
            return 0, 0
        expected *= size
    width = tensor.dtype.bits // 8
    length, step = expected * width, tensor.strides[0] * width
    inside = (tensor.shape[0] - 1) * step + length <= tensor.length
    return (length, step) if inside and step >= length and tensor.dtype is not DType.BYTES else (0, 0)


def _is_plain(tensor: Tensor, shape: tuple[int, ...], length: int) -> bool:
    """Whether `shape` is what the bytes say, where the elements have a dtype."""
    return tensor.dtype is DType.BYTES or math.prod(shape) * tensor.dtype.bits == length * 8


def _slice(name: str, one: _Found, number: int) -> Component:
    length, step = _steps(one.tensor)
    origin = f"{one.tensor.name}[{number}]"
    return _component(name, one, one.tensor.shape[1:], one.tensor.offset + number * step, length, origin)


def _component(name: str, one: _Found, shape: tuple[int, ...], offset: int, length: int, origin: str) -> Component:
    dtype, kind = one.tensor.dtype, ""
    if dtype not in safetensors.DTYPES:
        rows = math.prod(shape[:-1])
        kind = f"{one.tensor.dtype_name} {list(shape)}"
        shape = (*shape[:-1], length // rows) if rows and length % rows == 0 else (length,)
        dtype = DType.U8
    return Component(name, dtype, shape, one.file, offset, length, origin, kind)
