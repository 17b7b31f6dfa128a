"""Ratio and speed of the codec on series of checkpoints, beside XOR + byte planes + zstd-1, and beside zipnn.

    python -m tests.bench.codec_bench [--size tiny|small|full] [--series pretrain,moe,...] [--data DIR]

Of each series the last checkpoint is encoded, full and against the one before. Tensors are cut into objects as a store
does, small ones together, and one that is the same as before, or the same as another, costs nothing for any of the
coders. Ratio is raw by stored bytes. Speeds are of one core, by CPU time, best of several runs, as a share of memcpy in
the same run; encoding includes the choice between full and delta and the verification of the result, decoding includes
checksums.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy

from moonclipfs.codec import choose, encoded
from moonclipfs.codec.checks import kernel
from moonclipfs.codec.choose import Base
from moonclipfs.limits import MIB, OBJECT_ELEMENTS, SMALL_REGION_BYTES
from moonclipfs.types import DType
from tests.bench.common import SCRATCH, machine, memcpy_rate, print_table

T = TypeVar("T")
SERIES = ("pretrain", "moe", "finetune", "finetune_bf16", "cast_bf16", "cast_fp16", "cast_fp8", "lora")
TARGETS = {"full encode": 0.12, "full decode": 0.30, "delta encode": 0.06, "delta decode": 0.15}
"""Least share of memcpy on the pretrain series."""
RIVAL_BLOCK = 256 * 1024


@dataclass(frozen=True, slots=True)
class Item:
    """One object of the newer checkpoint, and the bytes in its place in the older one (None if there is no such)."""

    raw: bytes
    dtype: DType
    old: bytes | None


def tensors(path: Path) -> dict[str, tuple[str, numpy.ndarray]]:
    """Name to type name and bytes of each tensor of a safetensors file."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    data = numpy.memmap(path, numpy.uint8, "r", offset=8 + length)
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def items(old_path: Path, new_path: Path) -> Iterator[Item]:
    """The objects of a checkpoint beside those of the one before."""
    old = tensors(old_path)
    small = []
    for name, (type_name, data) in tensors(new_path).items():
        if len(data) < SMALL_REGION_BYTES:
            small.append(bytes(data))
            continue
        dtype = DType[type_name]
        before = old[name][1] if name in old and len(old[name][1]) == len(data) else None
        step = OBJECT_ELEMENTS * dtype.width
        for start in range(0, len(data), step):
            part = slice(start, start + step)
            yield Item(bytes(data[part]), dtype, None if before is None else bytes(before[part]))
    if small:
        yield Item(b"".join(small), DType.BYTES, None)


def cpu_time(work: Callable[[], T], repeats: int) -> tuple[T, float]:
    """The result of a call and the least CPU seconds, of all threads, of several."""
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        result = work()
        best = min(best, time.process_time() - started)
    return result, best


@dataclass
class Tally:
    """What one coder made of a series in one mode."""

    stored: int = 0
    coded: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, raw: int, stored: int, encode: float, decode: float) -> None:
        """Count one object that was coded."""
        self.coded += raw
        self.stored += stored
        self.encode_seconds += encode
        self.decode_seconds += decode

    def rates(self) -> tuple[float, float]:
        """Bytes a second, encoding and decoding."""
        return self.coded / (self.encode_seconds or 1e-9), self.coded / (self.decode_seconds or 1e-9)


def ours(item: Item, with_base: bool, repeats: int) -> tuple[int, float, float]:
    """Stored bytes, and seconds to encode and to decode."""
    bases = [Base(item.old, item.dtype)] if with_base and item.old is not None else []
    encoding, encode = cpu_time(lambda: choose.encode(item.raw, item.dtype, bases), repeats)
    base = None if encoding.base is None else item.old
    raw, decode = cpu_time(lambda: encoded.decode(encoding.data, base), repeats)
    if raw != item.raw:
        raise ValueError("the codec gave other bytes back")
    return len(encoding.data), encode, decode


def _planes(item: Item, with_base: bool) -> list[bytes]:
    """Byte planes of blocks: of the XOR with the base, or of the rotated elements."""
    if item.dtype is DType.BYTES:
        return [item.raw]
    width = item.dtype.width
    words = numpy.frombuffer(item.raw[: len(item.raw) // width * width], f"<u{width}")
    if with_base and item.old is not None:
        words = words ^ numpy.frombuffer(item.old, f"<u{width}", len(words))
    else:
        words = words << words.dtype.type(1) | words >> words.dtype.type(8 * width - 1)
    planes = []
    for start in range(0, len(words), RIVAL_BLOCK // width):
        block = words[start : start + RIVAL_BLOCK // width].view(numpy.uint8).reshape(-1, width)
        planes += [numpy.ascontiguousarray(block[:, k]).tobytes() for k in range(width)]
    return planes


def xor_planes_zstd(item: Item, with_base: bool, repeats: int) -> tuple[int, float, float]:
    """XOR, byte planes, zstd-1 on each plane of each 256 KiB block, raw where that does not help."""
    import zstandard

    coder, decoder = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    packed, encode = cpu_time(lambda: [coder.compress(plane) for plane in _planes(item, with_base)], repeats)
    planes, decode = cpu_time(lambda: [decoder.decompress(plane) for plane in packed], repeats)
    return sum(min(len(a), len(b)) for a, b in zip(packed, planes, strict=True)), encode, decode


def zipnn(item: Item, with_base: bool, repeats: int) -> tuple[int, float, float]:
    """zipnn on the elements, or on their XOR with the base, as whichever of its types makes them smallest."""
    from zipnn import ZipNN

    data = item.raw
    if with_base and item.old is not None:
        data = (numpy.frombuffer(data, numpy.uint8) ^ numpy.frombuffer(item.old, numpy.uint8)).tobytes()
    results = []
    for name in {4: ["float32"], 2: ["bfloat16", "float16"]}.get(item.dtype.width, ["float32", "bfloat16"]):
        coder = ZipNN(input_format="byte", bytearray_dtype=name)
        # It reorders what it is given in place, so each run gets a copy.
        packed, encode = cpu_time(lambda coder=coder: coder.compress(bytearray(data)), repeats)
        raw, decode = cpu_time(lambda coder=coder, packed=packed: coder.decompress(packed), repeats)
        if bytes(raw) != data:
            raise ValueError("zipnn gave other bytes back")
        results.append((len(packed), encode, decode))
    return min(results)


Coder = Callable[[Item, bool, int], tuple[int, float, float]]


def coders() -> dict[str, Coder]:
    """The coders whose packages are here."""
    rivals: dict[str, tuple[str, Coder]] = {
        "xor planes zstd-1": ("zstandard", xor_planes_zstd),
        "zipnn": ("zipnn", zipnn),
    }
    found = {name: coder for name, (package, coder) in rivals.items() if importlib.util.find_spec(package)}
    return {"moonclipfs": ours, **found}


@dataclass
class Result:
    """One series: tallies by coder and mode, and what they are a share of."""

    name: str
    raw: int = 0
    memcpy: float = 0.0
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)


def run(name: str, old: Path, new: Path, repeats: int, limit: int) -> Result:
    """Code one checkpoint with every coder; at most about `limit` raw bytes of it, spread over its tensors."""
    result = Result(name, memcpy=memcpy_rate())
    every = max(1, -(-new.stat().st_size // limit))
    seen: set[bytes] = set()
    for number, item in enumerate(items(old, new)):
        if len(item.raw) >= MIB // 4 and number % every:
            continue
        result.raw += len(item.raw)
        identity = hashlib.blake2b(item.raw).digest()
        known = identity in seen
        seen.add(identity)
        for coder_name, coder in coders().items():
            for mode in ("full", "delta"):
                tally = result.tallies.setdefault((coder_name, mode), Tally())
                if known or (mode == "delta" and item.raw == item.old):
                    continue
                stored, encode, decode = coder(item, mode == "delta", repeats if coder is ours else 1)
                tally.add(len(item.raw), stored, encode, decode)
    result.memcpy = max(result.memcpy, memcpy_rate())
    return result


def report(results: Sequence[Result]) -> list[str]:
    """Print the tables; returns what falls short."""
    short = []
    rows = []
    for result in results:
        for (coder, mode), tally in result.tallies.items():
            rates = tally.rates()
            shares = [f"{100 * rate / result.memcpy:.1f} %" for rate in rates]
            ratio = f"{result.raw / max(tally.stored, 1):.3f}"
            rows.append([result.name, mode, coder, ratio, *(f"{rate / 1e6:.0f}" for rate in rates), *shares])
            mine = result.tallies["moonclipfs", mode]
            if tally.stored < mine.stored:
                short.append(f"{result.name} {mode}: {coder} stores {tally.stored} bytes, moonclipfs {mine.stored}")
        if result.name == "pretrain":
            for mode in ("full", "delta"):
                for what, rate in zip(("encode", "decode"), result.tallies["moonclipfs", mode].rates(), strict=True):
                    if rate < TARGETS[f"{mode} {what}"] * result.memcpy:
                        short.append(f"pretrain {mode} {what}: {100 * rate / result.memcpy:.1f} % of memcpy")
    print_table(["series", "mode", "coder", "ratio", "enc MB/s", "dec MB/s", "enc/memcpy", "dec/memcpy"], rows)
    return short


def files_of(name: str, data: Path, size: str) -> list[Path]:
    """The checkpoints of a series, made when they are not there."""
    found = sorted((data / name).glob("*.safetensors"))
    if len(found) < 2:
        from tests.bench import series

        found = series.make(series.Plan(data, size), [name])[0]
    return found


def main() -> int:
    """Run the benchmark; 1 when something falls short of what it should reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "small", "full"), default="small")
    parser.add_argument("--series", default=",".join(SERIES))
    parser.add_argument("--data", type=Path, help="where the series are, or are made: DIR/SERIES/*.safetensors")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=int, default=128, help="MiB of each checkpoint")
    arguments = parser.parse_args()
    data = arguments.data or SCRATCH / f"series-{arguments.size}"
    print(f"{machine()}; {kernel()} kernels")
    results = []
    for name in arguments.series.split(","):
        *_, old, new = files_of(name, data, arguments.size)
        results.append(run(name, old, new, arguments.repeats, arguments.limit * MIB))
        print(f"{name}: memcpy {results[-1].memcpy / 1e9:.1f} GB/s", flush=True)
    short = report(results)
    print("\n".join(short) or "everything is reached")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
