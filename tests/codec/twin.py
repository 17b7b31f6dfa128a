"""The encoded object as FORMAT.md has it, in NumPy: a decoder, and an encoder of entropy-coded streams."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import zstandard

from moonclipfs.limits import BLOCK_BYTES, BLOCK_ELEMENTS
from moonclipfs.types import DType
from tests.codec.twin_cast import SHAPES, cast
from tests.codec.twin_hash import xxh3_64

BYTES, PLAIN, ROTATED, DELTA = range(4)
CONST, RAW, ZSTD, RANS = range(4)
LOW = 1 << 15
LANES = 32
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FLOATS_BELOW = {DType.C64: DType.F32, DType.C128: DType.F64}
# where the exponent is: shift, mask (which is also the largest exponent field)
EXPONENTS = {
    DType.F16: (10, 0x1F), DType.BF16: (7, 0xFF), DType.F32: (23, 0xFF), DType.F64: (52, 0x7FF),
    DType.F8_E4M3: (3, 0xF), DType.F8_E5M2: (2, 0x1F), DType.F8_E4M3FNUZ: (3, 0xF), DType.F8_E5M2FNUZ: (2, 0x1F),
    DType.C64: (23, 0xFF), DType.C128: (52, 0x7FF),
}  # fmt: skip


@dataclass
class Model:
    """One plane's entropy model."""

    tables: list[np.ndarray] = field(default_factory=list)
    bits: int = 0
    map: np.ndarray = field(default_factory=lambda: np.zeros(256, np.uint8))

    def table_of(self, contexts: np.ndarray) -> np.ndarray:
        """The index of the table of each context."""
        return self.map[contexts]


class Cursor:
    """Bytes that are read from front to back."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, length: int) -> bytes:
        """The next `length` bytes, all of which must exist."""
        assert self.at + length <= len(self.data)
        self.at += length
        return self.data[self.at - length : self.at]

    def byte(self) -> int:
        """The next byte."""
        return self.take(1)[0]


def read_model(cursor: Cursor) -> Model:
    """One stored model."""
    model = Model()
    count = cursor.byte()
    if count == 0:
        return model
    model.bits = cursor.byte()
    if count > 1:
        shape = cursor.byte()
        keep = (15 if shape & 1 else 0) | (0x30 if shape & 2 else 0) | (0xC0 if shape & 4 else 0)
        stored = [context for context in range(256) if context & ~keep == 0]
        packed = cursor.take((len(stored) + 1) // 2)
        value = {context: packed[i // 2] >> 4 * (i % 2) & 15 for i, context in enumerate(stored)}
        model.map = np.array([value[context & keep] for context in range(256)], np.uint8)
    model.tables = [read_table(cursor, model.bits) for _ in range(count)]
    assert model.map.max() < count
    return model


def read_table(cursor: Cursor, bits: int) -> np.ndarray:
    """The frequencies of one stored table."""
    frequency = np.zeros(256, np.int64)
    symbol = 0
    for _ in range(cursor.byte() + 1):
        gap, size = divmod(cursor.byte(), 16)
        symbol += cursor.byte() if gap == 15 else gap
        if size < 10:
            frequency[symbol] = size + 1
        elif size < 15:
            frequency[symbol] = (size - 10 << 8 | cursor.byte()) + 11
        else:
            frequency[symbol] = struct.unpack("<H", cursor.take(2))[0]
        symbol += 1
    assert frequency.sum() == 1 << bits
    return frequency


def activity(symbols: np.ndarray) -> int:
    """The class of a group by how many of its symbols are not zero."""
    count = np.count_nonzero(symbols)
    return int(count > 0) + int(count > 4) + int(count > 16)


class Twin:
    """An encoded object."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        magic, dtype, base_dtype, transform, packed = struct.unpack_from("<4sBBBB", data)
        self.raw_length, self.base_start, self.head_length, check = struct.unpack_from("<QQII", data, 8)
        assert magic == b"MCE\x01"
        assert check == xxh3_64(data[:28] + data[32 : self.head_length]) & 0xFFFFFFFF
        self.dtype, self.transform = DType(dtype), transform
        self.base_dtype = None if base_dtype == 255 else DType(base_dtype)
        self.width = self.dtype.width if transform != BYTES else 1
        self.block_bytes = BLOCK_BYTES if self.dtype is DType.BYTES else BLOCK_ELEMENTS * self.dtype.width
        self.blocks = -(-self.raw_length // self.block_bytes)
        self.entries = [struct.unpack_from("<IQ", data, 32 + 12 * block) for block in range(self.blocks)]
        shared = data[32 + 12 * self.blocks : self.head_length]
        if packed:
            shared = zstandard.ZstdDecompressor().decompress(shared, max_output_size=1 << 18)
        self.exponent_top, self.models = 0, [Model()] * self.width
        if transform != BYTES:
            cursor = Cursor(shared)
            self.exponent_top = struct.unpack("<H", cursor.take(2))[0]
            assert self.exponent_top <= (EXPONENTS.get(self.dtype, (0, 0))[1] if transform == DELTA else 0)
            self.models = [read_model(cursor) for _ in range(self.width)][::-1]
            assert cursor.at == len(shared)

    def block_range(self, block: int) -> tuple[int, int]:
        """First and last + 1 raw byte of a block."""
        return block * self.block_bytes, min(self.raw_length, (block + 1) * self.block_bytes)

    def payload(self, block: int) -> bytes:
        """The encoded bytes of a block."""
        start = self.head_length + sum(length for length, _ in self.entries[:block])
        return self.data[start : start + self.entries[block][0]]

    def base_elements(self, block: int, base: bytes) -> np.ndarray:
        """What predicts the elements of a block, in the object's own dtype."""
        assert self.base_dtype is not None
        start, end = self.block_range(block)
        n, unit = (end - start) // self.width, self.base_dtype.width
        first = self.base_start + block * BLOCK_ELEMENTS
        raw = base[first * unit : (first + n) * unit]
        words = np.frombuffer(raw[: len(raw) // unit * unit], f"<u{unit}")
        mine = _FLOATS_BELOW.get(self.dtype, self.dtype)
        theirs = _FLOATS_BELOW.get(self.base_dtype, self.base_dtype)
        if mine != theirs and mine in SHAPES and theirs in SHAPES:
            words = cast(words, theirs, mine)
        return np.concatenate([words, np.zeros(n - len(words), words.dtype)]).astype(_UNITS[self.width])

    def exponents(self, block: int, elements: np.ndarray | None, n: int) -> np.ndarray:
        """The lowest four bits of the contexts of a block's elements."""
        if elements is None:
            return np.full(n, block * 16 // self.blocks, np.int64)
        if self.dtype not in EXPONENTS:
            return np.zeros(n, np.int64)
        shift, mask = EXPONENTS[self.dtype]
        exponent = (elements >> elements.dtype.type(shift)).astype(np.int64) & mask
        return np.clip(self.exponent_top - exponent, 0, 15)

    def contexts(self, exponents: np.ndarray, planes: list[np.ndarray], k: int) -> np.ndarray:
        """The lower six bits of the contexts of plane k."""
        if k + 1 == self.width:
            return exponents
        above = planes[k + 1].astype(np.int64)
        return exponents | (above > 0) * 16 + (above > 1) * 16 + (above > 3) * 16

    def decode(self, base: bytes = b"") -> bytes:
        """All raw bytes."""
        return b"".join(self.decode_block(block, base) for block in range(self.blocks))

    def decode_block(self, block: int, base: bytes = b"") -> bytes:
        """The raw bytes of one block, verified."""
        start, end = self.block_range(block)
        n, tail_bytes = divmod(end - start, self.width)
        methods, bodies, tail, stream = self.layout(block)
        elements = self.base_elements(block, base) if self.transform == DELTA else None
        planes = [np.empty(0, np.uint8)] * self.width
        exponents = self.exponents(block, elements, n) if self.transform != BYTES else np.empty(0, np.int64)
        reader = Reader(stream) if RANS in methods else None
        for k in reversed(range(self.width)):
            if methods[k] == CONST:
                planes[k] = np.full(n, bodies[k][0], np.uint8)
            elif methods[k] == RAW:
                planes[k] = np.frombuffer(bodies[k], np.uint8)
            elif methods[k] == ZSTD:
                planes[k] = np.frombuffer(zstandard.decompress(bodies[k], max_output_size=n), np.uint8)
            else:
                assert reader is not None
                planes[k] = reader.read(self.models[k], self.contexts(exponents, planes, k), n)
            assert len(planes[k]) == n
        if reader is not None:
            reader.close()
        raw = self.merge(planes, elements) + tail
        assert len(tail) == tail_bytes
        assert xxh3_64(raw) == self.entries[block][1]
        return raw

    def layout(self, block: int) -> tuple[list[int], list[bytes], bytes, bytes]:
        """The method and the stored bytes of each plane, the tail, and the stream of a block."""
        start, end = self.block_range(block)
        n, tail_bytes = divmod(end - start, self.width)
        cursor = Cursor(self.payload(block))
        methods, bodies, lengths = [0] * self.width, [b""] * self.width, [0] * self.width
        for k in reversed(range(self.width)):
            methods[k] = cursor.byte()
            if methods[k] == CONST:
                bodies[k] = cursor.take(1)
            elif methods[k] == RAW:
                lengths[k] = n
            elif methods[k] == ZSTD:
                lengths[k] = int.from_bytes(cursor.take(3), "little")
        for k in reversed(range(self.width)):
            bodies[k] = bodies[k] or cursor.take(lengths[k])
        tail = cursor.take(tail_bytes)
        return methods, bodies, tail, cursor.take(len(cursor.data) - cursor.at)

    def split(self, raw: bytes, elements: np.ndarray | None) -> list[np.ndarray]:
        """The planes of a block, from the lowest byte."""
        unit = _UNITS[self.width]
        words = np.frombuffer(raw[: len(raw) // self.width * self.width], unit)
        bits = 8 * self.width
        if self.transform == ROTATED:
            words = words << unit(1) | words >> unit(bits - 1)
        elif self.transform == DELTA:
            difference = words - elements
            words = difference << unit(1) ^ (unit(0) - (difference >> unit(bits - 1)))
        planes = words.astype(unit).view(np.uint8).reshape(-1, self.width)
        return [np.ascontiguousarray(planes[:, k]) for k in range(self.width)]

    def merge(self, planes: list[np.ndarray], elements: np.ndarray | None) -> bytes:
        """The other way."""
        unit = _UNITS[self.width]
        words = np.ascontiguousarray(np.stack(planes, axis=1)).view(unit).reshape(-1)
        bits = 8 * self.width
        if self.transform == ROTATED:
            words = words >> unit(1) | words << unit(bits - 1)
        elif self.transform == DELTA:
            words = (words >> unit(1) ^ (unit(0) - (words & unit(1)))) + elements
        return words.astype(unit).tobytes()

    def encode_stream(self, block: int, raw: bytes, base: bytes = b"") -> bytes:
        """The stream of a block, from its raw bytes and the methods that were chosen for its planes."""
        methods, _, _, _ = self.layout(block)
        elements = self.base_elements(block, base) if self.transform == DELTA else None
        planes = self.split(raw, elements)
        exponents = self.exponents(block, elements, len(planes[0]))
        writer = Writer()
        for k in range(self.width):
            if methods[k] == RANS:
                writer.write(self.models[k], self.contexts(exponents, planes, k), planes[k])
        return writer.close() if RANS in methods else b""


class Reader:
    """A stream that is read from front to back."""

    def __init__(self, stream: bytes) -> None:
        self.states = np.frombuffer(stream, "<u4", LANES).astype(np.int64)
        self.words = np.frombuffer(stream, "<u2", offset=4 * LANES).astype(np.int64)
        self.at = 0

    def read(self, model: Model, contexts: np.ndarray, n: int) -> np.ndarray:
        """The next n symbols."""
        out = np.zeros(n, np.uint8)
        starts = [np.concatenate([[0], np.cumsum(table)[:-1]]) for table in model.tables]
        slots = np.stack([np.repeat(np.arange(256), table) for table in model.tables])
        start, frequency = np.stack(starts), np.stack(model.tables)
        level = 0
        for i in range(0, n, LANES):
            lanes = min(LANES, n - i)
            table = model.table_of(contexts[i : i + lanes] | level << 6)
            x = self.states[:lanes]
            slot = x & (1 << model.bits) - 1
            symbols = slots[table, slot]
            x = frequency[table, symbols] * (x >> model.bits) + slot - start[table, symbols]
            needy = np.flatnonzero(x < LOW)
            x[needy] = x[needy] << 16 | self.words[self.at : self.at + len(needy)]
            self.at += len(needy)
            self.states[:lanes] = x
            out[i : i + lanes] = symbols
            level = activity(symbols)
        return out

    def close(self) -> None:
        """Nothing may be left."""
        assert self.at == len(self.words)
        assert (self.states == LOW).all()


class Writer:
    """A stream that is written from back to front."""

    def __init__(self) -> None:
        self.states = [LOW] * LANES
        self.words: list[int] = []

    def write(self, model: Model, contexts: np.ndarray, symbols: np.ndarray) -> None:
        """Put these symbols before what is written already."""
        levels = [0] + [activity(symbols[i : i + LANES]) for i in range(0, len(symbols), LANES)]
        levels_of = np.repeat(levels, LANES)[: len(symbols)]
        tables = model.table_of(contexts | levels_of << 6)
        starts = [np.concatenate([[0], np.cumsum(table)]) for table in model.tables]
        for i in reversed(range(len(symbols))):
            x, symbol = self.states[i % LANES], int(symbols[i])
            frequency = int(model.tables[tables[i]][symbol])
            if x >= frequency << 31 - model.bits:
                self.words.append(x & 0xFFFF)
                x >>= 16
            start = int(starts[tables[i]][symbol])
            self.states[i % LANES] = (x // frequency << model.bits) + x % frequency + start

    def close(self) -> bytes:
        """The stream."""
        return np.array(self.states, "<u4").tobytes() + np.array(self.words[::-1], "<u2").tobytes()
