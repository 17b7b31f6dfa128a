"""Reading objects: each block decoded once, chains bounded, damage named, never other bytes."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from moonclipfs import limits
from moonclipfs.codec.choose import Base, encode
from moonclipfs.errors import CorruptError, DeltaCycleError, MissingObjectError
from moonclipfs.store.cache import BoundedCache
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.objects import object_id
from moonclipfs.store.packs import Location, PackWriter, pack_key
from moonclipfs.store.reader import ObjectReader
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, DType, Extent, Kind, ObjectId

BLOCK = 4 * limits.BLOCK_ELEMENTS
BLOCKS = 5
SIZE = BLOCK * (BLOCKS - 1) + 4000


@dataclass(frozen=True)
class Chain:
    """Objects of which each is a delta against the one before; the first is full."""

    raws: list[bytes]
    ids: list[ObjectId]


def write(store: Store, objects: Sequence[tuple[bytes, bytes | None, ObjectId, int]]) -> str:
    """One pack of fp32 objects, each (raw, raw of its base, its base's id, depth); return the pack's id."""
    writer = PackWriter(store.backend, store.index.add_pack)
    for raw, base, base_id, depth in objects:
        encoding = encode(raw, DType.F32, [] if base is None else [Base(base, DType.F32)])
        assert (encoding.base is None) == (base is None)
        writer.add(
            encoding.data,
            object_id=object_id(Kind.DATA, raw),
            kind=Kind.DATA,
            raw_length=len(raw),
            dtype=DType.F32,
            base=base_id,
            depth=depth,
        )
    return writer.flush()[0]


def drifting(count: int, size: int = SIZE, seed: int = 0) -> Iterator[bytes]:
    """Tensors of fp32 that each lie near the one before."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size // 4).astype(np.float32)
    for _ in range(count):
        yield values.tobytes()
        values = values + rng.standard_normal(size // 4).astype(np.float32) * np.float32(1e-6)


@pytest.fixture
def chain(store: Store) -> Chain:
    raws = list(drifting(limits.CHAIN_DEPTH + 1))
    ids = [object_id(Kind.DATA, raw) for raw in raws]
    links = zip(raws, [None, *raws], [NO_ID, *ids], itertools.count(), strict=False)
    write(store, list(links))
    return Chain(raws, ids)


def read(reader: ObjectReader, wanted: ObjectId, offset: int, length: int) -> bytes:
    out = bytearray(length)
    reader.read_into(wanted, offset, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("depth", range(limits.CHAIN_DEPTH + 1))
def test_a_random_read_decodes_one_block_of_each_link(store: Store, chain: Chain, depth: int) -> None:
    offset = 2 * BLOCK + 12_345
    assert read(store.objects, chain.ids[depth], offset, 4096) == chain.raws[depth][offset : offset + 4096]
    assert store.objects.counters.blocks_decoded == depth + 1
    read(store.objects, chain.ids[depth], offset + 5000, 4096)
    assert store.objects.counters.blocks_decoded == depth + 1, "the block is in the cache"


def test_a_sequential_pass_decodes_each_block_once(store: Store, chain: Chain) -> None:
    raw, wanted = chain.raws[0], chain.ids[0]
    step = 131_072
    parts = [read(store.objects, wanted, at, min(step, SIZE - at)) for at in range(0, SIZE, step)]
    assert b"".join(parts) == raw
    assert store.objects.counters.blocks_decoded == BLOCKS
    assert store.objects.counters.bytes_decoded == SIZE


def test_R009_small_random_reads_decode_no_block_twice(store: Store, chain: Chain) -> None:
    rng = random.Random(1)
    for at in [SIZE - 4096, *(rng.randrange(SIZE - 4096) for _ in range(500))]:
        assert read(store.objects, chain.ids[3], at, 4096) == chain.raws[3][at : at + 4096]
    assert store.objects.counters.blocks_decoded == BLOCKS * 4
    assert store.objects.counters.bytes_decoded == SIZE * 4


@pytest.mark.parametrize("depth", [0, 3])
def test_streaming_gives_the_same_bytes_and_keeps_nothing(store: Store, chain: Chain, depth: int) -> None:
    out = bytearray(SIZE - 7)
    store.objects.stream_into(chain.ids[depth], 3, memoryview(out))
    assert out == chain.raws[depth][3 : SIZE - 4]
    assert store.objects.cached(chain.ids[depth], 0, 1) is None


def test_cached_answers_only_what_needs_no_work(store: Store, chain: Chain) -> None:
    reader, wanted = store.objects, chain.ids[1]
    assert reader.cached(wanted, 0, 10) is None
    reader.prefetch(wanted, BLOCK - 5, 10)
    work = reader.counters.blocks_decoded, reader.counters.encoded_bytes_read
    parts = reader.cached(wanted, BLOCK - 5, 10)
    assert parts is not None
    assert b"".join(parts) == chain.raws[1][BLOCK - 5 : BLOCK + 5]
    assert reader.cached(wanted, 2 * BLOCK - 5, 10) is None
    assert reader.cached(wanted, SIZE - 5, 10) is None
    assert (reader.counters.blocks_decoded, reader.counters.encoded_bytes_read) == work


def test_threads_that_want_one_block_decode_it_once(
    store: Store, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = store.objects
    plain = store.packs.read
    gate = threading.Barrier(8)

    def slow(location: Location, offset: int, length: int) -> bytes:
        time.sleep(0.02)
        return plain(location, offset, length)

    read(reader, chain.ids[2], 0, 1)  # the heads of the chain
    monkeypatch.setattr(reader, "_packs", type("Slow", (), {"read": staticmethod(slow)}))
    before = reader.counters.blocks_decoded

    def one(_: int) -> bytes:
        gate.wait()
        return read(reader, chain.ids[2], BLOCK, BLOCK)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(8))) == {chain.raws[2][BLOCK : 2 * BLOCK]}
    assert reader.counters.blocks_decoded - before == 3


def test_threads_read_overlapping_ranges_of_a_chain(store: Store, chain: Chain) -> None:
    reader = ObjectReader(store.index, store.packs, 3 * BLOCK)

    def one(seed: int) -> bool:
        rng = random.Random(seed)
        for _ in range(20):
            depth, at = rng.randrange(4), rng.randrange(SIZE - 300_000)
            if read(reader, chain.ids[depth], at, 300_000) != chain.raws[depth][at : at + 300_000]:
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(one, range(6)))
    assert not reader._flights
    assert reader._blocks.weight <= 3 * BLOCK


def test_load_gives_whole_objects_of_their_kind(store: Store, chain: Chain) -> None:
    assert [store.objects.load(wanted, Kind.DATA) for wanted in chain.ids] == chain.raws
    with pytest.raises(CorruptError, match="DATA where a RECIPE is wanted"):
        store.objects.load(chain.ids[0], Kind.RECIPE)


def test_recipes_and_directories_are_checked_against_their_id(store: Store) -> None:
    writer = PackWriter(store.backend, store.index.add_pack)
    wrong = object_id(Kind.RECIPE, b"other bytes")
    writer.add(encode(b"bytes", DType.BYTES).data, object_id=wrong, kind=Kind.RECIPE, raw_length=5)
    writer.flush()
    with pytest.raises(CorruptError, match="do not have its id"):
        store.objects.load(wrong, Kind.RECIPE)


def test_a_range_outside_an_object_is_refused(store: Store, chain: Chain) -> None:
    for offset, length in ((SIZE - 1, 2), (SIZE + 1, 0), (-1, 4)):
        with pytest.raises(CorruptError, match="are wanted"):
            read(store.objects, chain.ids[0], offset, length)


def test_R075_a_cycle_of_bases_is_named_at_once(store: Store) -> None:
    first, second = drifting(2)
    ids = [object_id(Kind.DATA, raw) for raw in (first, second)]
    pack = write(store, [(first, second, ids[1], 1), (second, first, ids[0], 1)])
    start = time.monotonic()
    for wanted in ids:
        with pytest.raises(DeltaCycleError, match="lead back") as caught:
            read(store.objects, wanted, 0, 10)
        assert pack in str(caught.value)
        assert wanted.hex() in str(caught.value)
    assert time.monotonic() - start < 1


def test_R075_a_missing_base_is_named(store: Store) -> None:
    first, second = drifting(2)
    gone = object_id(Kind.DATA, first)
    write(store, [(second, first, gone, 1)])
    with pytest.raises(MissingObjectError, match=gone.hex()):
        read(store.objects, object_id(Kind.DATA, second), 0, 10)


def test_R075_a_chain_that_is_too_long_is_refused(store: Store) -> None:
    raws = list(drifting(limits.CHAIN_READ_DEPTH + 2, 4000))
    ids = [object_id(Kind.DATA, raw) for raw in raws]
    write(store, list(zip(raws, [None, *raws], [NO_ID, *ids], itertools.count(), strict=False)))
    assert read(store.objects, ids[-2], 0, 4000) == raws[-2]
    with pytest.raises(DeltaCycleError, match="more than"):
        read(store.objects, ids[-1], 0, 10)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_R079_missing_data_is_an_error_and_never_zeros(
    store: Store, chain: Chain, damage: str, expect_log: Callable[[str], None]
) -> None:
    other = next(drifting(1, seed=9))
    lost = write(store, [(other, None, NO_ID, 0)])
    extents = [Extent(SIZE, chain.ids[0]), Extent(SIZE, object_id(Kind.DATA, other)), Extent(1000)]
    file = FileReader(store.objects, Recipe(extents))
    path = store.backend.path(pack_key(lost))
    if damage == "gone":
        os.unlink(path)
    else:
        os.truncate(path, os.path.getsize(path) // 2)
        expect_log(f"pack {lost}: .*run `moonclipfs verify`")
    with pytest.raises(CorruptError) as caught:
        file.read(2 * SIZE - 100, 200)
    assert object_id(Kind.DATA, other).hex() in str(caught.value)
    assert file.read(0, SIZE) == chain.raws[0]
    assert file.read(2 * SIZE, 1000) == bytes(1000)


def test_objects_that_gc_moved_are_found_again(store: Store) -> None:
    raw = next(drifting(1))
    wanted = object_id(Kind.DATA, raw)
    old = write(store, [(raw, None, NO_ID, 0)])
    with Store.open(store.path) as other:
        assert read(other.objects, wanted, 0, 100) == raw[:100]
        write(store, [(raw, None, NO_ID, 0)])
        os.unlink(store.backend.path(pack_key(old)))
        other.packs.close()
        assert read(other.objects, wanted, BLOCK, SIZE - BLOCK) == raw[BLOCK:]


def test_a_damaged_copy_gives_way_to_a_whole_one(store: Store) -> None:
    raw = next(drifting(1))
    wanted = object_id(Kind.DATA, raw)
    packs = [write(store, [(raw, None, NO_ID, 0)]) for _ in range(2)]
    bad = store.index.locate(wanted)
    assert bad.pack in packs
    with open(store.backend.path(pack_key(bad.pack)), "r+b") as file:
        file.seek(bad.offset + bad.encoded_length - 50)
        file.write(bytes(40))
    assert read(store.objects, wanted, 0, SIZE) == raw
    assert store.objects.chain(wanted)[0].location.pack != bad.pack


def test_a_flipped_byte_anywhere_in_an_object_is_never_given_back(store: Store) -> None:
    raw = next(drifting(1, 40_000))
    wanted = object_id(Kind.DATA, raw)
    pack = write(store, [(raw, None, NO_ID, 0)])
    place = store.index.locate(wanted)
    path = store.backend.path(pack_key(pack))
    rng = random.Random(3)
    for at in [*range(40), *(rng.randrange(place.encoded_length) for _ in range(60))]:
        with open(path, "r+b") as file:
            file.seek(place.offset + at)
            (byte,) = file.read(1)
            file.seek(place.offset + at)
            file.write(bytes([byte ^ 0x10]))
        reader = ObjectReader(store.index, store.packs)
        with pytest.raises(CorruptError, match=wanted.hex()) as caught:
            read(reader, wanted, 0, len(raw))
        assert pack in str(caught.value)
        with open(path, "r+b") as file:
            file.seek(place.offset + at)
            file.write(bytes([byte]))
    assert read(ObjectReader(store.index, store.packs), wanted, 0, len(raw)) == raw


def test_files_are_extents_literals_and_holes(store: Store, chain: Chain) -> None:
    extents = [Extent(100), Extent(5, literal=b"hello"), Extent(1000, chain.ids[2], 70_000), Extent(10)]
    expected = bytes(100) + b"hello" + chain.raws[2][70_000:71_000] + bytes(10)
    file = FileReader(store.objects, Recipe(extents))
    assert file.size == len(expected)
    assert file.cached(0, file.size) is None
    assert file.cached(90, 15) == expected[90:105]
    for offset, length in ((0, len(expected)), (90, 30), (104, 1), (1104, 11), (1115, 0)):
        assert file.read(offset, length) == expected[offset : offset + length]
    out = bytearray(50)
    assert file.read_into(1100, memoryview(out)) == 15
    assert out[:15] == expected[1100:]
    file.prefetch(0, file.size)
    assert file.cached(0, 2 * file.size) == expected
    for offset, length in ((1110, 6), (-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="of a file of"):
            file.read(offset, length)


def test_an_extent_longer_than_its_object_is_refused(store: Store, chain: Chain) -> None:
    with pytest.raises(CorruptError, match="are wanted"):
        FileReader(store.objects, Recipe([Extent(SIZE + 1, chain.ids[0])])).read(0, SIZE + 1)


def test_a_cache_keeps_its_bound_and_what_was_used_last() -> None:
    cache: BoundedCache[int, str] = BoundedCache(10)
    for key in range(5):
        cache.put(key, str(key), 3)
    assert [cache.get(key) for key in range(5)] == [None, None, "2", "3", "4"]
    cache.get(2)
    cache.put(5, "5", 4)
    assert [cache.get(key) for key in range(6)] == [None, None, "2", None, "4", "5"]
    cache.put(6, "too heavy", 11)
    cache.put(5, "lighter", 1)
    assert cache.get(6) is None
    assert cache.weight == 7
    cache.drop(5)
    cache.drop(5)
    assert cache.weight == 6
