"""Files that were changed in places: only what changed is read, and what is stored is what a full look would store."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonclipfs.formats.cut import CutRules, zero_chunk
from moonclipfs.store.kept import Kept
from moonclipfs.store.recipes import decode_recipe
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, Buffer, BytesSource, Entry, EntryType, Kind
from tests.store.kit import noise, publish
from tests.store.test_ingest import floats, safetensors

SMALL = CutRules(object_bytes=4096, object_elements=1024, slice_bytes=1024, small_region_bytes=256, chunk_min=64,
                 chunk_average=256, chunk_max=1024)  # fmt: skip


class Watched(BytesSource):
    """Counts the bytes that are read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.bytes_read = 0

    def read(self, offset: int, length: int) -> Buffer:
        self.bytes_read += length
        return super().read(offset, length)


def differences(old: bytes, new: bytes) -> list[tuple[int, int]]:
    """The ranges in which two files agree."""
    ranges, start = [], 0
    both = min(len(old), len(new))
    for at in range(both + 1):
        if at == both or old[at] != new[at]:
            if at > start:
                ranges.append((start, at - start))
            start = at + 1
    return ranges


def stored_twice(
    store: Store, old: bytes, new: bytes, unchanged: Sequence[tuple[int, int]], holes: Sequence[tuple[int, int]] = ()
) -> tuple[Watched, Watched]:
    """Store `new` by what is known of it and in full: it must be the same recipe. Returns what either read."""
    version = publish(store, "x", {"f": old})
    before = store.open_file(store.lookup(version, b"f"))
    short, full = Watched(new), Watched(new)
    with store.ingest() as ingest:
        kept = Kept(store.config.cut, before, unchanged, holes)
        one, size, stats = ingest.put_file(short, before, kept=kept)
        other, _, _ = ingest.put_file(full, before)
        assert size == len(new)
        assert one == other
        if new:
            ingest._packs_sink.flush()
            entry = Entry(b"f", EntryType.FILE, Attributes(0o644), size, one)
            assert store.open_file(entry).read(0, size) == new
        assert stats.raw_bytes == len(new)
        counted = stats.shared_bytes + stats.hole_bytes + stats.literal_bytes + stats.delta_bytes + stats.full_bytes
        assert counted == len(new)
    return short, full


@st.composite
def edits(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A file, and the same after some writes and a truncation or extension."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    parts = draw(st.lists(st.tuples(st.sampled_from(["noise", "zeros", "text"]), st.integers(1, 9000)), max_size=5))
    make = {"noise": rng.randbytes, "zeros": bytes, "text": lambda n: (b"ab%d " % n * n)[:n]}
    body = b"".join(make[kind](length) for kind, length in parts)
    if draw(st.booleans()):
        count = len(body) // 4
        cut = draw(st.integers(0, count))
        body = safetensors({"a": ("F32", body[: 4 * cut]), "b": ("F32", body[4 * cut : 4 * count])})
    new = bytearray(body)
    for kind, length in draw(
        st.lists(st.tuples(st.sampled_from(["noise", "zeros"]), st.integers(1, 3000)), max_size=4)
    ):
        at = draw(st.integers(0, len(new)))
        data = make[kind](length)
        new[at : at + length] = data
    change = draw(st.integers(-6000, 6000))
    new = new[:change] if change < 0 else new + bytes(change)
    return body, bytes(new)


@pytest.fixture
def fine(store: Store) -> Iterator[Store]:
    """A store whose cuts are short."""
    store.config = replace(store.config, cut=SMALL)
    yield store


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(edits(), st.data())
def test_a_changed_file_is_stored_as_if_all_were_read(
    fine: Store, pair: tuple[bytes, bytes], data: st.DataObject
) -> None:
    old, new = pair
    ranges = differences(old, new)
    # What is told may be less than what is true.
    unchanged = [one for one in ranges if data.draw(st.booleans())] if len(ranges) < 20 else ranges[::2]
    holes = [(at, len(part)) for at, part in zeros(new) if data.draw(st.booleans())]
    stored_twice(fine, old, new, unchanged, holes)


def zeros(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The longest runs of zeros, up to three."""
    at = 0
    for _ in range(3):
        at = data.find(bytes(200), at)
        if at < 0:
            return
        end = at
        while end < len(data) and not data[end]:
            end += 1
        yield at, data[at:end]
        at = end


def one_byte_changed(data: bytes, at: int) -> tuple[bytes, list[tuple[int, int]]]:
    new = bytearray(data)
    new[at] ^= 1
    return bytes(new), [(0, at), (at + 1, len(data) - at - 1)]


def test_one_byte_of_a_checkpoint_reads_one_tensor(store: Store) -> None:
    old = safetensors({f"t{number}": ("F32", floats(number, 100_000)) for number in range(20)})
    new, unchanged = one_byte_changed(old, len(old) - 500_000)
    short, full = stored_twice(store, old, new, unchanged)
    assert full.bytes_read > len(new)
    assert short.bytes_read < 3 * 400_000


def test_one_byte_of_an_unknown_file_reads_a_few_chunks(store: Store) -> None:
    old = noise(1, 20_000_000)
    new, unchanged = one_byte_changed(old, 10_000_000)
    short, full = stored_twice(store, old, new, unchanged)
    assert full.bytes_read > 2 * len(new), "cut, then stored"
    assert short.bytes_read < 6_000_000


def test_an_appended_line_reads_the_end_of_the_file(store: Store) -> None:
    old = noise(1, 20_000_000)
    short, _ = stored_twice(store, old, old + b"one more line\n", [(0, len(old))])
    assert short.bytes_read < 4_000_000


class Sparse:
    """A terabyte of zeros with one page in the middle."""

    size = 1 << 40
    page = noise(3, 4096)

    def __init__(self) -> None:
        self.bytes_read = 0

    def read(self, offset: int, length: int) -> bytes:
        self.bytes_read += length
        assert length <= 1 << 20
        out = bytearray(length)
        middle = self.size // 2
        for at in range(max(offset, middle), min(offset + length, middle + 4096)):
            out[at - offset] = self.page[at - middle]
        return bytes(out)


def test_holes_of_a_sparse_file_cost_nothing(store: Store) -> None:
    source, middle = Sparse(), Sparse.size // 2
    holes = [(0, middle), (middle + 4096, Sparse.size - middle - 4096)]
    with store.ingest() as ingest:
        recipe, size, stats = ingest.put_file(source, kept=Kept(store.config.cut, holes=holes))
        ingest._packs_sink.flush()
        assert size == Sparse.size
        assert source.bytes_read < 8 << 20
        assert stats.hole_bytes > Sparse.size - (4 << 20)
        extents = decode_recipe(store.objects.load(recipe, Kind.RECIPE)).extents
        assert len(extents) <= 5
    # The same again: all but the page is known as a hole of the file before.
    entry = Entry(b"f", EntryType.FILE, Attributes(0o644), size, recipe)
    again = Sparse()
    with store.ingest() as ingest:
        kept = Kept(
            store.config.cut, store.open_file(entry), [(0, middle), (middle + 4096, Sparse.size - middle - 4096)]
        )
        assert ingest.put_file(again, kept=kept)[0] == recipe
        assert again.bytes_read < 8 << 20


def test_zeros_are_cut_as_told() -> None:
    for rules in (SMALL, CutRules()):
        assert rules.chunk_min <= zero_chunk(rules) <= rules.chunk_max


def test_what_cannot_be_referred_to_any_more_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    old = safetensors({f"t{number}": ("F32", floats(number, 100_000)) for number in range(4)})
    version = publish(store, "x", {"f": old})
    before = store.open_file(store.lookup(version, b"f"))
    packs = {place.pack for place in store.index.iterate()}
    source = Watched(old)
    with store.ingest() as ingest:
        store.index.set_condemned(packs)
        kept = Kept(store.config.cut, before, [(0, len(old))])
        _, _, stats = ingest.put_file(source, kept=kept)
    assert stats.shared_bytes == 0
    assert source.bytes_read >= len(old)
