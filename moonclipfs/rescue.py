#!/usr/bin/env python3
"""Get the files out of a moonclipfs store with nothing but Python, NumPy and zstandard.

    python rescue.py STORE                    list the snapshots
    python rescue.py STORE TARGET [NAME ...]  write them below TARGET as plain files, all or those named

This single file imports nothing of moonclipfs and follows only store/FORMAT.md and codec/FORMAT.md: an independent
reader. Every object is checked against its id before a byte of it is written. What cannot be read is named on stderr,
the rest is written, and the exit code is 1. It reads only; the store may be on a read-only disk.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the directory of this file, when it lies in the package: its types.py would hide Python's own

import argparse
import hashlib
import importlib
import json
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

fast_blake3: Any = None
with suppress(ImportError):
    fast_blake3 = importlib.import_module("blake3")  # many times as fast as what stands below, which does without

CONTEXTS = {1: "moonclipfs 2026-11 data object", 2: "moonclipfs 2026-11 recipe", 3: "moonclipfs 2026-11 directory"}
ENTRY = struct.Struct("<32s32s32sQQQQQBBBBI")
BLOCK_ELEMENTS, BLOCK_BYTES = 1 << 16, 1 << 18
MAX_RAW, MODEL_BYTES = 1 << 30, 1 << 18
CHAIN_LIMIT = 64
CACHE_BYTES = 1 << 28


class Damaged(Exception):
    """Something in the store does not fit its checksum or its format."""


# BLAKE3 (J. O'Connor and others, 2020), on all chunks side by side


_IV = np.array([0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], "<u4")
_PERMUTE = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
_MIX = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
_MIX += [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
_START, _END, _PARENT, _ROOT, _KEY_CONTEXT, _KEY_MATERIAL = 1, 2, 4, 8, 32, 64


def _rotate(x: Any, bits: int) -> Any:
    return (x >> np.uint32(bits)) | (x << np.uint32(32 - bits))


def _compress(value: Any, words: Any, counters: Any, length: int, flags: int) -> Any:
    """The compression function on columns: `value` is (8, n), `words` (16, n), `counters` (n,); returns (8, n)."""
    count = words.shape[1]
    tail = [counters & 0xFFFFFFFF, counters >> 32, np.full(count, length), np.full(count, flags)]
    state = [row.copy() for row in value] + [np.full(count, word) for word in _IV[:4]] + [x.astype("<u4") for x in tail]
    order = list(range(16))
    for _ in range(7):
        for place, (a, b, c, d) in enumerate(_MIX):
            for half, turns in ((0, (16, 12)), (1, (8, 7))):
                state[a] = state[a] + state[b] + words[order[2 * place + half]]
                state[d] = _rotate(state[d] ^ state[a], turns[0])
                state[c] = state[c] + state[d]
                state[b] = _rotate(state[b] ^ state[c], turns[1])
        order = [order[i] for i in _PERMUTE]
    return np.stack([state[i] ^ state[i + 8] for i in range(8)])


def _hash_chunks(data: bytes, first: int, size: int, key: Any, flags: int, only: bool) -> Any:
    """Chaining values of the chunks of `size` bytes that fill `data`; `only` when it is the only chunk of all."""
    count = max(1, len(data) // max(size, 1))
    blocks = max(1, -(-size // 64))
    padded = np.zeros((count, blocks * 64), np.uint8)
    padded[:, :size] = np.frombuffer(data, np.uint8).reshape(count, size)
    words = padded.view("<u4").reshape(count, blocks, 16)
    value = np.repeat(key[:, None], count, 1)
    counters = np.arange(first, first + count, dtype=np.int64)
    for block in range(blocks):
        last = block == blocks - 1
        mode = flags | (_START if block == 0 else 0) | (_END | (_ROOT if only else 0) if last else 0)
        value = _compress(value, words[:, block].T, counters, size - 64 * block if last else 64, mode)
    return value


def _blake3(data: bytes, key: Any, flags: int) -> Any:
    whole = (len(data) - 1) // 1024 if data else 0
    parts = [_hash_chunks(data[: whole * 1024], 0, 1024, key, flags, False)] if whole else []
    parts.append(_hash_chunks(data[whole * 1024 :], whole, len(data) - whole * 1024, key, flags, whole == 0))
    level = np.concatenate(parts, axis=1)
    while level.shape[1] > 1:
        pairs = level.shape[1] // 2
        words = np.concatenate([level[:, 0 : 2 * pairs : 2], level[:, 1 : 2 * pairs : 2]])
        mode = flags | _PARENT | (_ROOT if level.shape[1] == 2 else 0)
        merged = _compress(np.repeat(key[:, None], pairs, 1), words, np.zeros(pairs, np.int64), 64, mode)
        level = np.concatenate([merged, level[:, 2 * pairs :]], axis=1)
    return level[:, 0]


def object_id(kind: int, data: bytes) -> bytes:
    """BLAKE3 in key derivation mode, with the context of the kind."""
    if fast_blake3 is not None:
        return bytes(fast_blake3.blake3(data, derive_key_context=CONTEXTS[kind]).digest())
    key = _blake3(CONTEXTS[kind].encode(), _IV, _KEY_CONTEXT)
    return bytes(_blake3(data, key, _KEY_MATERIAL).astype("<u4").tobytes())


# The codec


class Float(NamedTuple):
    """A float format between which a base can be cast."""

    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True


class DType(NamedTuple):
    """What the codec knows of an element type: width in bytes (0: plain bytes), exponent's place, float format."""

    width: int
    shift: int = 0
    mask: int = 0
    float: Float | None = None


_F64, _F32, _BF16, _F16 = Float(11, 52), Float(8, 23), Float(8, 7), Float(5, 10)
_E4M3, _E5M2 = Float(4, 3, False), Float(5, 2)
DTYPES = (
    [DType(w) for w in (0, 1, 1, 1, 2, 2, 4, 4, 8, 8)]
    + [DType(2, 10, 0x1F, _F16), DType(2, 7, 0xFF, _BF16), DType(4, 23, 0xFF, _F32), DType(8, 52, 0x7FF, _F64)]
    + [DType(1, 3, 0xF, _E4M3), DType(1, 2, 0x1F, _E5M2), DType(1), DType(1, 3, 0xF), DType(1, 2, 0x1F)]
    + [DType(1), DType(1), DType(1), DType(4, 23, 0xFF, _F32), DType(8, 52, 0x7FF, _F64)]
)
PLAIN_BYTES, PLAIN, ROTATE, DELTA = range(4)
CONST, RAW, ZSTD, RANS = range(4)


class Model(NamedTuple):
    """Entropy model of one plane: the slots of all tables one after the other, and the first slot for each context."""

    tables: int
    bits: int
    active: bool
    contexts: Any
    slots: Any


def cast(values: Any, source: Float, target: Float) -> Any:
    """Float bit patterns (uint64) to those of another format: to nearest, ties to even; NaN stays NaN."""
    x = values.astype(np.uint64)
    one, sm, dm = np.uint64(1), np.uint64(source.mantissa_bits), np.uint64(target.mantissa_bits)
    source_bias, bias = (1 << source.exponent_bits - 1) - 1, (1 << target.exponent_bits - 1) - 1
    source_top, top = (1 << source.exponent_bits) - 1, (1 << target.exponent_bits) - 1
    infinity = top << target.mantissa_bits if target.has_infinity else top << target.mantissa_bits | 7
    nan = infinity | 1 << target.mantissa_bits - 1 if target.has_infinity else infinity
    sign = (x >> np.uint64(source.exponent_bits + source.mantissa_bits)) << np.uint64(
        target.exponent_bits + target.mantissa_bits
    )
    mantissa, field = x & ((one << sm) - one), (x >> sm) & np.uint64(source_top)
    small = field == 0
    bits = np.frexp(mantissa.astype(np.float64))[1].astype(np.int64)
    shift = np.where(small, source.mantissa_bits + 1 - bits, 0)
    exponent = np.where(small, 1 - source_bias - shift, field.astype(np.int64) - source_bias) + bias
    exact = np.where(small, mantissa << shift.astype(np.uint64), mantissa | one << sm)
    drop = source.mantissa_bits - target.mantissa_bits
    normal = exponent >= 1
    amount = np.where(normal, drop, drop + 1 - exponent)
    right = np.clip(amount, 1, 62).astype(np.uint64)
    rounded = (exact + ((one << (right - one)) - one) + ((exact >> right) & one)) >> right
    rounded = np.where(amount > 62, np.uint64(0), rounded)
    rounded = np.where(amount <= 0, exact << np.clip(-amount, 0, 63).astype(np.uint64), rounded)
    out = np.where(normal, ((np.maximum(exponent, 1) - 1).astype(np.uint64) << dm) + rounded, rounded)
    out = np.minimum(out, np.uint64(infinity))
    out = np.where(small & (mantissa == 0), np.uint64(0), out)
    special = (field == source_top) & (source.has_infinity | (mantissa == 7))
    kept = np.uint64(infinity) if source.has_infinity else np.uint64(nan)
    return sign | np.where(special, np.where(source.has_infinity & (mantissa == 0), kept, np.uint64(nan)), out)


def _read_table(data: bytes, at: int, bits: int) -> tuple[list[int], int]:
    frequencies, symbol, at = [0] * 256, 0, at + 1
    for _ in range(data[at - 1] + 1):
        gap, size, at = data[at] >> 4, data[at] & 15, at + 1
        if gap == 15:
            gap, at = data[at], at + 1
        value = size + 1
        if size == 15:
            value, at = data[at] | data[at + 1] << 8, at + 2
        elif size > 9:
            value, at = ((size - 10) << 8 | data[at]) + 11, at + 1
        symbol += gap
        frequencies[symbol] = value
        symbol += 1
    if sum(frequencies) != 1 << bits:
        raise Damaged("frequencies of a table do not add up")
    return frequencies, at


def _read_map(data: bytes, at: int) -> tuple[Any, bool, int]:
    shape, at = data[at], at + 1
    keep = (15 if shape & 1 else 0) | (0x30 if shape & 2 else 0) | (0xC0 if shape & 4 else 0)
    stored = [context for context in range(256) if context & ~keep == 0]
    values = [data[at + i // 2] >> 4 * (i % 2) & 15 for i in range(len(stored))]
    full = np.zeros(256, np.int64)
    full[stored] = values
    return full[np.arange(256) & keep], bool(shape & 4), at + (len(stored) + 1) // 2


def _read_model(data: bytes, at: int) -> tuple[Model, int]:
    tables, at = data[at], at + 1
    if not tables:
        return Model(0, 0, False, None, None), at
    bits, at = data[at], at + 1
    contexts, active = np.zeros(256, np.int64), False
    if tables > 1:
        contexts, active, at = _read_map(data, at)
    if not 8 <= bits <= 12 or contexts.max() >= tables:
        raise Damaged("entropy model out of range")
    slots = []
    for _ in range(tables):
        frequencies, at = _read_table(data, at, bits)
        for symbol, frequency in enumerate(frequencies):
            slots.append(symbol | frequency << 8 | np.arange(frequency, dtype=np.int64) << 20)
    return Model(tables, bits, active, contexts << bits, np.concatenate(slots)), at


class Block:
    """One block of an object while it is decoded."""

    def __init__(self, data: Any, elements: int, tail: int, width: int) -> None:
        self.data, self.elements = data, elements
        self.methods, lengths, at = [0] * width, [0] * width, 0
        self.planes: list[Any] = [None] * width
        for k in reversed(range(width)):
            self.methods[k], at = int(data[at]), at + 1
            if self.methods[k] == CONST:
                self.planes[k], at = np.full(elements, data[at]), at + 1
            elif self.methods[k] == RAW:
                lengths[k] = elements
            elif self.methods[k] == ZSTD:
                lengths[k], at = int.from_bytes(data[at : at + 3].tobytes(), "little"), at + 3
            elif self.methods[k] != RANS:
                raise Damaged("unknown method of a plane")
        for k in reversed(range(width)):
            if self.methods[k] == RAW:
                self.planes[k] = data[at : at + elements]
            elif self.methods[k] == ZSTD:
                self.planes[k] = np.frombuffer(_unpack(data[at : at + lengths[k]].tobytes(), elements), np.uint8)
            if self.methods[k] != RANS and len(self.planes[k]) != elements:
                raise Damaged("a plane of a wrong length")
            at += lengths[k]
        self.tail, at = data[at : at + tail].tobytes(), at + tail
        if RANS in self.methods:
            self.state, self.at = data[at : at + 128].copy().view("<u4").astype(np.int64), at + 128


def _unpack(frame: bytes, most: int) -> bytes:
    """The content of a zstd frame, `most` bytes at most."""
    import zstandard  # only stores that hold such a frame need it

    try:
        return bytes(zstandard.ZstdDecompressor().decompress(frame, max_output_size=max(most, 1)))
    except zstandard.ZstdError as error:
        raise Damaged(f"zstd: {error}") from error


def _decode_rans(blocks: list[Block], k: int, model: Model, contexts: Any) -> None:
    """Decode plane `k` of all blocks side by side; `contexts` is (blocks, elements), the lower 6 bits of each."""
    elements = np.array([[block.elements] for block in blocks])
    state = np.stack([block.state for block in blocks])
    ends = np.cumsum([len(block.data) for block in blocks])
    data = np.concatenate([block.data for block in blocks]).astype(np.int64)
    words = np.concatenate([[0, 0], data[:-1] | data[1:] << 8])  # words[i] ends before byte i
    position = ends - [len(block.data) - block.at for block in blocks]
    out = np.zeros((len(blocks), contexts.shape[1]), np.uint8)
    lanes, mask, activity = np.arange(32), (1 << model.bits) - 1, 0
    for at in range(0, contexts.shape[1], 32):
        index = state & mask
        if model.tables > 1:
            if model.active and at:
                nonzero = np.count_nonzero(out[:, at - 32 : at], axis=1)[:, None]
                activity = 64 * ((nonzero > 0).astype(np.int64) + (nonzero > 4) + (nonzero > 16))
            index |= model.contexts.take(activity + contexts[:, at : at + 32])
        slot = model.slots.take(index)
        new = (slot >> 8 & 0xFFF) * (state >> model.bits) + (slot >> 20)
        valid = at + lanes < elements
        need = (new < 1 << 15) & valid
        rank = need.cumsum(1)
        new = np.where(need, new << 16 | words.take(position[:, None] + 2 * rank, mode="clip"), new)
        position = position + 2 * rank[:, -1]
        state = np.where(valid, new, state)
        out[:, at : at + 32] = np.where(valid, slot, 0)
    if np.any(position > ends):
        raise Damaged("an entropy-coded stream runs out")
    for row, block in enumerate(blocks):
        block.state, block.at = state[row], len(block.data) - int(ends[row] - position[row])
        block.planes[k] = out[row, : block.elements]


def _contexts(blocks: list[Block], k: int, exponents: list[Any], width: int) -> Any:
    most = -(-max(block.elements for block in blocks) // 32) * 32
    contexts = np.zeros((len(blocks), most), np.int64)
    for row, block in enumerate(blocks):
        contexts[row, : block.elements] = exponents[row]
        if k + 1 < width:
            above = block.planes[k + 1]
            contexts[row, : block.elements] |= ((above > 0).astype(np.int64) + (above > 1) + (above > 3)) << 4
    return contexts


def decode(data: bytes, base: bytes) -> bytes:
    """Decode an encoded object; `base` is the whole raw base of a delta, empty for a full encoding."""
    if len(data) < 32 or data[:4] != b"MCE\x01":
        raise Damaged("no encoded object")
    dtype, base_dtype, transform, packed, raw_length, base_start, head_length, _ = struct.unpack_from(
        "<BBBBQQII", data, 4
    )
    if dtype >= len(DTYPES) or transform > DELTA or raw_length > MAX_RAW or head_length > len(data):
        raise Damaged("head of an encoded object out of range")
    kind = DTYPES[dtype]
    width = 1 if transform == PLAIN_BYTES else kind.width
    block_bytes = BLOCK_ELEMENTS * kind.width if kind.width else BLOCK_BYTES
    count = -(-raw_length // block_bytes)
    blocks, at, view = [], head_length, np.frombuffer(data, np.uint8)
    for number in range(count):
        length = struct.unpack_from("<I", data, 32 + 12 * number)[0]
        raw = min(block_bytes, raw_length - number * block_bytes)
        blocks.append(Block(view[at : at + length], raw // width, raw % width, width))
        at += length
    if transform == PLAIN_BYTES:
        return b"".join(block.planes[0].tobytes() + block.tail for block in blocks)
    elements = sum(block.elements for block in blocks)
    predicted = _predicted(base, base_dtype, kind, base_start, elements) if transform == DELTA else None
    shared = data[32 + 12 * count : head_length]
    _decode_planes(blocks, _unpack(shared, MODEL_BYTES) if packed else shared, kind, predicted)
    word = np.dtype(f"<u{width}")
    values = np.zeros(elements, word)
    for k in range(width):
        values |= np.concatenate([block.planes[k] for block in blocks]).astype(word) << word.type(8 * k)
    one = word.type(1)
    if transform == ROTATE:
        values = (values >> one) | (values << word.type(8 * width - 1))
    elif transform == DELTA:
        values = ((values >> one) ^ (word.type(0) - (values & one))) + predicted
    return bytes(values.tobytes()) + (blocks[-1].tail if blocks else b"")


def _predicted(base: bytes, base_dtype: int, kind: DType, start: int, elements: int) -> Any:
    """Base elements that face the object's, in its own type; zeros past the end of the base."""
    if base_dtype >= len(DTYPES) or not DTYPES[base_dtype].width:
        raise Damaged("impossible type of a base")
    source = DTYPES[base_dtype]
    held = np.frombuffer(base, f"<u{source.width}", len(base) // source.width)[start : start + elements]
    if source.float and kind.float and source.float != kind.float:
        held = cast(held, source.float, kind.float)
    predicted = np.zeros(elements, f"<u{kind.width}")
    predicted[: len(held)] = held
    return predicted


def _decode_planes(blocks: list[Block], shared: bytes, kind: DType, predicted: Any) -> None:
    coded = [block for block in blocks if RANS in block.methods]
    if not coded:
        return
    top, at = struct.unpack_from("<H", shared)[0], 2
    if top > (0 if predicted is None else kind.mask):
        raise Damaged("shared exponent out of range")
    exponents, element = {}, 0
    for number, block in enumerate(blocks):
        of_full = number * 16 // len(blocks) if predicted is None else 0
        exponents[id(block)] = np.full(block.elements, of_full, np.int64)
        if predicted is not None and kind.mask:
            field = (predicted[element : element + block.elements] >> kind.shift).astype(np.int64) & kind.mask
            exponents[id(block)] = np.clip(top - field, 0, 15)
        element += block.elements
    for k in reversed(range(kind.width)):
        model, at = _read_model(shared, at)
        here = [block for block in blocks if block.methods[k] == RANS]
        if here:
            contexts = _contexts(here, k, [exponents[id(block)] for block in here], kind.width)
            _decode_rans(here, k, model, contexts)
    if any(np.any(block.state != 1 << 15) or block.at != len(block.data) for block in coded):
        raise Damaged("an entropy-coded stream does not end as it began")


# The store


class Place(NamedTuple):
    """Where an object's encoding is."""

    pack: Path
    offset: int
    length: int
    raw_length: int
    base: bytes
    kind: int


class Store:
    """The objects and names of a store's directory."""

    def __init__(self, root: Path, base: Path | None = None) -> None:
        """`base` is where the base store of a private one lies by now."""
        self.root = root
        self.places: dict[bytes, list[Place]] = {}
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._cached = 0
        packs = [pack for store in _with_bases(root, base) for pack in sorted((store / "packs").glob("*.pack"))]
        for pack in packs:
            for entry in _entries(pack):
                identity, behind, _, _, offset, length, raw_length, _, kind, _, _, _, _ = ENTRY.unpack(entry)
                self.places.setdefault(identity, []).append(Place(pack, offset, length, raw_length, behind, kind))

    def object(self, identity: bytes, depth: int = 0) -> bytes:
        """The bytes of an object, checked against its id. Raises Damaged."""
        if identity in self._cache:
            self._cache.move_to_end(identity)
            return self._cache[identity]
        if depth > CHAIN_LIMIT:
            raise Damaged(f"the bases of object {identity.hex()} lead round in a circle")
        reasons = [f"object {identity.hex()} is in no pack"]
        for place in self.places.get(identity, ()):
            try:
                data = self._decode(place, depth)
                if object_id(place.kind, data) == identity:
                    return self._remember(identity, data)
                reasons.append(f"object {identity.hex()} in {place.pack.name} is not what its id says")
            except (Damaged, OSError, ValueError, IndexError, struct.error) as error:
                reasons.append(f"object {identity.hex()} in {place.pack.name}: {error}")
        raise Damaged(reasons[-1])

    def _remember(self, identity: bytes, data: bytes) -> bytes:
        self._cache[identity] = data
        self._cached += len(data)
        while self._cached > CACHE_BYTES and len(self._cache) > 1:
            self._cached -= len(self._cache.popitem(last=False)[1])
        return data

    def _decode(self, place: Place, depth: int) -> bytes:
        base = self.object(place.base, depth + 1) if any(place.base) else b""
        with open(place.pack, "rb") as file:
            file.seek(place.offset)
            return decode(file.read(place.length), base)

    def versions(self) -> dict[str, tuple[bytes, dict[str, Any]]]:
        """Root and metadata of every bound name, from the log."""
        state: dict[str, list[list[Any]]] = {}  # path -> [number, root, metadata, removed]
        for record in _records(self.root / "log"):
            _apply(state, record)
        bound = {path: rows[-1] for path, rows in state.items() if rows and not rows[-1][3]}
        return {path: (bytes.fromhex(row[1]), row[2]) for path, row in sorted(bound.items())}

    def entries(self, identity: bytes) -> Iterator[tuple[int, bytes, bytes, int, int, int, int, int, int, bytes]]:
        """(type, name, link text, link group, mode, uid, gid, mtime, size, child) of a directory object."""
        data = self.object(identity)
        if data[:5] != b"MCDR\x01":
            raise Damaged(f"object {identity.hex()} is no directory")
        at, head, before = 12, struct.Struct("<BxHHHIIIIqqQ32s"), b""
        for _ in range(struct.unpack_from("<I", data, 8)[0]):
            kind, name_length, text_length, xattrs, mode, group, uid, gid, mtime, _, size, child = head.unpack_from(
                data, at
            )
            at += head.size
            name, text = data[at : at + name_length], data[at + name_length : at + name_length + text_length]
            at += name_length + text_length
            for _ in range(xattrs):
                key_length, value_length = struct.unpack_from("<HI", data, at)
                at += 6 + key_length + value_length
            if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
                raise Damaged(f"impossible name {name!r} in directory {identity.hex()}")
            if name <= before:  # a directory of the same name would be written through a symlink
                raise Damaged(f"name {name!r} out of order in directory {identity.hex()}")
            before = name
            yield kind, name, text, group, mode, uid, gid, mtime, size, child

    def write(self, recipe: bytes, path: bytes) -> None:
        """Write the file of a recipe; holes stay holes."""
        with open(path, "xb") as file:
            if not any(recipe):
                return
            data = self.object(recipe)
            if data[:5] != b"MCRC\x01":
                raise Damaged(f"object {recipe.hex()} is no recipe")
            size, ids, extents, _ = struct.unpack_from("<QIII", data, 8)
            literals = 28 + 32 * ids + 20 * extents
            for number in range(extents):
                length, source, offset = struct.unpack_from("<QIQ", data, 28 + 32 * ids + 20 * number)
                if source == 0xFFFFFFFF:
                    file.seek(length, os.SEEK_CUR)
                elif source == 0xFFFFFFFE:
                    file.write(data[literals + offset : literals + offset + length])
                else:
                    whole = self.object(data[28 + 32 * source : 60 + 32 * source])
                    if offset + length > len(whole):
                        raise Damaged(f"recipe {recipe.hex()} reaches past an object")
                    file.write(memoryview(whole)[offset : offset + length])
            file.truncate(size)


def _with_bases(root: Path, base: Path | None) -> list[Path]:
    """A store, and the base stores behind it when it is a private one; what it needs of one that is gone is missing."""
    found = [root]
    while (named := _config(found[-1]).get("alternate")) is not None:
        place = base if base is not None and len(found) == 1 else Path(str(named["path"]))
        there = _config(place).get("store_id")
        if there != named["store_id"]:
            warn(f"{found[-1]} needs the store {named['store_id']}, and {place} is {there or 'none'}: see --base")
        if place in found or there != named["store_id"]:
            break
        found.append(place)
    return found


def _config(root: Path) -> dict[str, Any]:
    try:
        fields = json.loads((root / "config.json").read_bytes())
        named = fields.get("alternate")
        return fields if named is None or {"path", "store_id"} <= named.keys() else {}
    except (OSError, ValueError, AttributeError):
        return {}


def _entries(pack: Path) -> list[bytes]:
    """The entries of a pack: from its footer, or, when that is damaged, from the headers of its records."""
    data = np.memmap(pack, np.uint8, "r") if pack.stat().st_size else np.zeros(0, np.uint8)
    trailer = data[-56:].tobytes()
    if len(trailer) == 56 and trailer[48:] == b"MCPKEND\n":
        offset, count, digest = struct.unpack("<QQ32s", trailer[:48])
        table = data[offset : offset + count * ENTRY.size].tobytes()
        if hashlib.sha256(table).digest() == digest:
            return [table[at : at + ENTRY.size] for at in range(0, len(table), ENTRY.size)]
    warn(f"{pack.name}: no whole footer; looking for records")
    found, raw = [], data.tobytes()
    at = raw.find(b"MCOB")
    while at >= 0:
        entry = raw[at + 8 : at + 8 + ENTRY.size]
        if len(entry) == ENTRY.size and raw[at + 4 : at + 8] == struct.pack("<I", zlib.crc32(entry)):
            found.append(entry)
        at = raw.find(b"MCOB", at + 4)
    return found


def _records(log: Path) -> Iterator[dict[str, Any]]:
    """The log records from the newest whole checkpoint on (from the first when there is none)."""
    records = []
    for path in sorted(log.glob("[0-9]*.json"), reverse=True):
        head, _, text = path.read_bytes().partition(b"\n")
        text = text.removesuffix(b"\n")
        if head.split(b" ")[-1] != hashlib.sha256(text).hexdigest().encode():
            warn(f"log/{path.name} is damaged; what it says is left out")
            continue
        records.append(json.loads(text))
        if records[-1]["type"] == "checkpoint":
            break
    yield from reversed(records)


def _apply(state: dict[str, list[list[Any]]], record: dict[str, Any]) -> None:
    kind = record["type"]
    if kind == "bind":
        state.setdefault(record["path"], []).append([record["number"], record["root"], record["metadata"], False])
    elif kind == "unbind":
        for path in record["paths"]:
            for row in state.get(path, ()):
                row[3] = True
    elif kind == "checkpoint":
        state.clear()
        for row in record["versions"]:
            state.setdefault(row["path"], []).append(
                [row["number"], row["root"], row["metadata"], bool(row["removed"])]
            )
    elif kind == "move":
        taken = [(new, number, _take(state, old, old_number)) for old, old_number, new, number in record["versions"]]
        for path, number, row in taken:
            if row:
                state.setdefault(path, []).append([number, *row[1:]])
    elif kind == "forget":
        for path, number in record["versions"]:
            rows = state.get(path, [])
            if rows and rows[-1][0] == number and not rows[-1][3]:
                for row in rows:
                    row[3] = True
            _take(state, path, number)


def _take(state: dict[str, list[list[Any]]], path: str, number: int) -> list[Any]:
    found = [row for row in state.get(path, ()) if row[0] == number]
    if found:
        state[path].remove(found[0])
    return found[0] if found else []


# The files


def place(target: Path, path: str) -> bytes:
    """Where below `target` a snapshot goes. Raises Damaged for a name, or a symlink on the way, that leads out."""
    parts = path.split("/")
    if "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
        raise Damaged("no snapshot can have this name")
    for part in parts:
        target = target / part
        if target.is_symlink():
            raise Damaged(f"{target} is a symbolic link")
    return os.fsencode(target)


class Export:
    """Writes snapshots as plain files, and goes on after what cannot be read."""

    def __init__(self, store: Store) -> None:
        self.store, self.failures = store, 0

    def directory(self, identity: bytes, target: bytes, links: dict[int, bytes]) -> None:
        """Write the entries of a directory object below `target`."""
        if os.path.islink(target):
            raise Damaged("is a symbolic link")
        os.makedirs(target, exist_ok=True)
        for kind, name, text, group, mode, uid, gid, mtime, _, child in self.store.entries(identity):
            path = os.path.join(target, name)
            try:
                if kind == 2:
                    self.directory(child, path, links)
                elif kind == 3:
                    os.symlink(text, path)
                elif kind != 1:
                    warn(f"{os.fsdecode(path)}: fifo or socket, left out")
                    continue
                elif group and group in links:
                    os.link(links[group], path)
                    continue
                else:
                    self.store.write(child, path)
                    links[group] = path
                _attributes(path, kind, mode, uid, gid, mtime)
            except (Damaged, OSError, struct.error) as error:
                self.failures += 1
                warn(f"{os.fsdecode(path)}: {error}")
                if kind == 1 and isinstance(error, Damaged):
                    os.unlink(path)


def _attributes(path: bytes, kind: int, mode: int, uid: int, gid: int, mtime: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, uid, gid, follow_symlinks=False)
    if kind != 3:
        os.chmod(path, mode & 0o1777)
    os.utime(path, ns=(mtime, mtime), follow_symlinks=False)


def warn(text: str) -> None:
    """Say on stderr what went wrong."""
    print(f"rescue: {text.encode('utf-8', 'backslashreplace').decode()}", file=sys.stderr)


def main() -> int:
    """Parse the command line and do it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--base", type=Path, help="where the base store of a private store is by now")
    arguments = parser.parse_args()
    if not (arguments.store / "packs").is_dir():
        warn(f"{arguments.store} is no store: it has no packs/")
        return 3
    store = Store(arguments.store, arguments.base)
    versions = store.versions()
    if missing := [name for name in arguments.names if name not in versions]:
        warn(f"no snapshot {missing[0]!r}")
        return 3
    if arguments.target is None:
        print("\n".join(path.encode("utf-8", "backslashreplace").decode() for path in versions))
        return 0
    export = Export(store)
    for path in arguments.names or versions:
        try:
            export.directory(versions[path][0], place(arguments.target, path), {})
        except (Damaged, OSError, struct.error, UnicodeEncodeError) as error:
            export.failures += 1
            warn(f"{path}: {error}")
    return 1 if export.failures else 0


if __name__ == "__main__":
    sys.exit(main())
