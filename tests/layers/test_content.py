"""The content of a file, against a plain bytearray: whatever is written, cut, frozen, stored and replayed."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonclipfs import limits
from moonclipfs.layers import ranges
from moonclipfs.layers.content import Content, Part
from moonclipfs.layers.records import PART_HOLE, PART_RECIPE, PART_STAGED
from moonclipfs.layers.staging import Generation, Staging
from moonclipfs.store.backend import FileOps
from moonclipfs.types import NO_ID, ObjectId

SIZE = 80
TB = 1 << 40


class Job(NamedTuple):
    number: int
    parts: tuple[Part, ...]
    recipe: ObjectId
    data: bytes
    age: int
    """Changes made before."""
    unique: bool
    """Whether no other job has its number."""


class Told(NamedTuple):
    """A record of contents, as the journal holds it."""

    whole: bool
    recipe: ObjectId
    size: int
    parts: list[tuple[int, int, int, int]]
    pieces: dict[int, list[tuple[int, bytes]]]
    """Bytes of the generations that are in memory."""
    synced: bool


class ContentMachine(RuleBasedStateMachine):
    """One file through its life. Small limits, so that generations are in memory and in files, runs in many arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(limits, "INLINE_BYTES", SIZE // 2)
        self.patch.setattr(ranges, "_CHUNK", 4)
        self.directory = Path(tempfile.mkdtemp())
        self.staging = self.new_staging()
        self.recipes: dict[ObjectId, bytes] = {bytes([9]) * 32: bytes(range(100, 140))}
        self.base = next(iter(self.recipes))
        self.content = Content(40, self.base)
        self.model = bytearray(self.recipes[self.base])
        self.number = 0
        self.age = 0
        self.jobs: list[Job] = []
        self.records: list[Told] = []
        self.told = {False: 0, True: 0}
        """The age that the journal knows, and that it knows as synced."""
        self.freed: set[Generation] = set()

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.directory)

    def new_staging(self) -> Staging:
        return Staging(self.directory / "staging", TB, FileOps())

    def next(self) -> int:
        self.number += 1
        return self.number

    @rule(offset=st.integers(0, SIZE - 1), length=st.integers(1, 30), value=st.integers(1, 99))
    def write(self, offset: int, length: int, value: int) -> None:
        data = bytes([value]) * length
        generation = self.content.generation or self.staging.create(self.next())
        generation.write(offset, data)
        self.content.wrote(generation, offset, length)
        self.age += 1
        self.model.extend(bytes(max(0, offset - len(self.model))))
        self.model[offset : offset + length] = data

    @rule(size=st.integers(0, SIZE))
    def truncate(self, size: int) -> None:
        self.content.truncate(size)
        self.age += 1
        del self.model[size:]
        self.model.extend(bytes(size - len(self.model)))

    @rule()
    def clear(self) -> None:
        self.content.clear()
        self.age += 1
        self.model.clear()

    @rule(fresh=st.booleans())
    def freeze(self, fresh: bool) -> None:
        parts = self.content.freeze(self.next() if fresh else 0)
        self.jobs.append(Job(self.content.newest, parts, self.content.recipe, bytes(self.model), self.age, fresh))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def stored(self, data: st.DataObject) -> None:
        """An answer comes, perhaps after that to a later job, perhaps never to the earlier ones."""
        job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        assert self.read(list(job.parts), job.recipe, len(job.data)) == job.data
        recipe = len(self.recipes).to_bytes(32, "little")
        self.recipes[recipe] = job.data
        self.freed |= set(self.content.stored(job.number, recipe, len(job.data)))
        if job.unique and job.age == self.age and job.number == self.content.newest:
            assert self.content.exact and not self.content.is_staged
        self.told = {False: -1, True: -1}

    @rule(synced=st.booleans())
    def journal(self, synced: bool) -> None:
        whole, parts = self.content.changes(synced=synced)
        numbered = [(o, n, kind, generation.number if generation else 0) for o, n, kind, generation in parts]
        pieces: dict[int, list[tuple[int, bytes]]] = {}
        for offset, length, _, generation in parts:
            if generation is not None and generation.path is None:
                found = generation.cached(offset, length)
                assert found is not None
                pieces.setdefault(generation.number, []).append((offset, bytes(found)))
        self.records.append(Told(whole, self.content.recipe, self.content.size, numbered, pieces, synced))
        self.told[False] = self.age
        if synced:
            self.told[True] = self.age
            self.freed |= set(self.content.unused())
            self.delete_freed()

    @rule(power_failed=st.booleans())
    def restart(self, power_failed: bool) -> None:
        """The process dies: jobs and what was not journalled are lost; with the power, what was not synced."""
        self.jobs.clear()
        if power_failed:
            self.records = [record for record in self.records if record.synced]
        self.content, self.staging = self.replayed(synced_only=False)
        self.model = bytearray(self.read(self.content.parts(0, TB), self.content.recipe, self.content.size))
        for number in self.staging.orphans(set(self.staging._generations)):
            self.staging.remove(number)
        self.freed = set(self.content.unused())
        self.told = {False: self.age, True: -1}
        if all(record.synced for record in self.records):
            self.told[True] = self.age
            self.delete_freed()

    def delete_freed(self) -> None:
        assert not self.freed & set(self.content.generations())
        for generation in self.freed:
            self.staging.delete(generation)
        self.freed.clear()
        assert set(self.staging._generations.values()) == set(self.content.generations())

    def read(self, parts: list[Part], recipe: ObjectId, size: int) -> bytes:
        out = bytearray(b"?" * size)
        at = 0
        for offset, length, kind, generation in parts:
            assert offset == at and length > 0 and (generation is not None) == (kind == PART_STAGED)
            view = memoryview(out)[offset : offset + length]
            if generation is not None:
                generation.read_into(offset, view)
            elif kind == PART_RECIPE:
                view[:] = self.recipes[recipe][offset : offset + length]
            else:
                view[:] = bytes(length)
            at += length
        assert at == size
        return bytes(out)

    def replayed(self, *, synced_only: bool) -> tuple[Content, Staging]:
        content, staging = Content(40, self.base), self.new_staging()
        for record in self.records:
            if record.synced or not synced_only:
                parts = []
                for offset, length, kind, number in record.parts:
                    pieces = record.pieces.get(number)
                    found = staging.restore(number, pieces) if pieces else staging.open(number) if number else None
                    parts.append(Part(offset, length, kind, found))
                content.apply(record.whole, record.recipe, record.size, parts, synced=record.synced)
        return content, staging

    def reads_after(self, *, synced_only: bool) -> bytes:
        content, _ = self.replayed(synced_only=synced_only)
        return self.read(content.parts(0, TB), content.recipe, content.size)

    @invariant()
    def reads_what_was_written(self) -> None:
        assert self.content.size == len(self.model)
        assert self.read(self.content.parts(0, TB), self.content.recipe, self.content.size) == self.model

    @invariant()
    def what_exact_is_its_recipe(self) -> None:
        if self.content.exact:
            assert not self.content.is_staged
            assert self.recipes.get(self.content.recipe, b"") == self.model
        parts = self.content.parts(0, TB)
        assert self.content.held == sum(part.length for part in parts if part.kind != PART_HOLE)
        assert self.content.is_staged == any(part.kind == PART_STAGED for part in parts)
        named = {part.generation for part in parts if part.generation is not None}
        assert named == {generation for number, generation in self.content._generations.items() if self.staged(number)}

    def staged(self, number: int) -> int:
        """Bytes from a generation, as the content counts them."""
        return self.content._staged[number]

    @invariant()
    def what_was_journalled_comes_back(self) -> None:
        if self.told[False] == self.age:
            assert self.reads_after(synced_only=False) == self.model
        if self.told[True] == self.age:
            assert self.reads_after(synced_only=True) == self.model

    @invariant()
    def staging_counts_what_it_holds(self) -> None:
        assert self.staging.used == sum(generation.bytes for generation in self.staging._generations.values())


TestContent = ContentMachine.TestCase
TestContent.settings = settings(stateful_step_count=25, max_examples=max(500, settings.default.max_examples))


class Named:
    """As much of a generation as a content looks at."""

    frozen = False

    def __init__(self, number: int) -> None:
        self.number = number

    def mark(self, offset: int, length: int) -> None:
        pass


def test_a_sparse_file_of_1_tb_is_a_few_runs() -> None:
    content, generation = Content(TB, b"r" * 32), cast("Generation", Named(1))
    content.wrote(generation, TB // 2, 4096)
    content.truncate(2 * TB)
    content.wrote(generation, 2 * TB - 1, 1)
    half = TB // 2
    recipe, staged = PART_RECIPE, PART_STAGED
    assert [part[:3] for part in content.parts(0, 4 * TB)] == [
        (0, half, recipe),
        (half, 4096, staged),
        (half + 4096, half - 4096, recipe),
        (TB, TB - 1, PART_HOLE),
        (2 * TB - 1, 1, staged),
    ]
    assert content.held == TB + 1
    assert [part[:3] for part in content.parts(half - 1, 2)] == [(half - 1, 1, recipe), (half, 1, staged)]
    assert content.parts(2 * TB, 10) == content.parts(5, 0) == []
    content.truncate(half + 1)
    content.truncate(TB)
    assert [part[:3] for part in content.parts(half, TB)] == [(half, 1, staged), (half + 1, half - 1, PART_HOLE)]


def test_random_writes_cost_the_same_however_many_there_were() -> None:
    """Compares the first writes with the last of 60,000, and allows much noise: one array would be 20 times slower."""
    size = 10 * limits.GIB
    content, generation = Content(size, b"r" * 32), cast("Generation", Named(1))
    pages = random.Random(7).sample(range(size // 4096), 60_000)
    times = []
    for start in range(0, len(pages), 6000):
        before = time.thread_time()
        for page in pages[start : start + 6000]:
            content.wrote(generation, page * 4096, 4096)
        times.append(time.thread_time() - before)
    assert min(times[-4:]) < 6 * min(times[:4])


def test_a_content_cut_between_two_freezes_of_one_number_is_not_the_recipe_of_the_first() -> None:
    content, generation = Content(), cast("Generation", Named(1))
    content.wrote(generation, 0, 100)
    content.freeze()
    content.truncate(20)
    content.truncate(100)
    content.freeze()
    content.freeze()
    content.stored(1, b"1" * 32, 100)
    assert not content.exact and not content.is_staged
    assert [part[:3] for part in content.parts(0, 100)] == [(0, 20, PART_RECIPE), (20, 80, PART_HOLE)]
    content.freeze(2)
    content.stored(2, b"2" * 32, 100)
    assert content.exact and content.recipe == b"2" * 32


def test_a_generation_that_is_not_needed_any_more_takes_no_writes() -> None:
    """Whether no write to it ever succeeded, or what was written was cut off."""
    content, empty, cut = Content(), cast("Generation", Named(1)), cast("Generation", Named(2))
    content.begin(empty)
    assert content.generation is empty
    assert content.unused() == [empty] and content.generation is None
    content.begin(cut)
    content.wrote(cut, 10, 10)
    assert content.unused() == []
    content.truncate(5)
    assert content.unused() == [cut] and content.unused() == []
    with pytest.raises(AssertionError, match="frozen"):
        content.wrote(cut, 10, 10)


def test_what_is_stored_is_told_whole_until_that_is_synced() -> None:
    """Else a power failure would bring records back that name generations which were deleted since."""
    content, generation = Content(), cast("Generation", Named(1))
    content.wrote(generation, 0, 100)
    content.changes(synced=True)
    content.freeze(2)
    assert content.changes(synced=True) == (False, [])
    assert content.stored(2, b"2" * 32, 100) == [generation]
    told = True, [Part(0, 100, PART_RECIPE)]
    assert content.changes() == told
    assert content.changes() == (False, [])
    assert content.changes(synced=True) == told
    assert content.changes(synced=True) == (False, [])


def test_what_was_overwritten_before_a_freeze_goes_with_what_it_froze() -> None:
    content, first, second = Content(), cast("Generation", Named(1)), cast("Generation", Named(4))
    content.wrote(first, 0, 100)
    content.freeze(2)
    content.clear()
    content.freeze(3)
    content.wrote(second, 0, 50)
    content.clear()
    assert content.generations() == []
    assert content.stored(3, b"3" * 32, 0) == [first]
    assert content.unused() == [second]
    assert content.recipe == NO_ID and content.exact


def test_a_cut_that_was_replayed_unsynced_is_told_again() -> None:
    """The synced state has bytes of the recipe where the file was cut off and grew again, by a write past a gap."""
    content, generation = Content(40, b"r" * 32), cast("Generation", Named(1))
    content.apply(False, b"r" * 32, 20, [])
    content.wrote(generation, 39, 1)
    assert content.changes(synced=True) == (False, [Part(20, 19, PART_HOLE), Part(39, 1, PART_STAGED, generation)])


def test_a_frozen_generation_takes_no_writes() -> None:
    content, generation = Content(), cast("Generation", Named(1))
    content.wrote(generation, 0, 10)
    assert content.generation is generation
    assert content.freeze() == (Part(0, 10, PART_STAGED, generation),)
    assert content.generation is None
    with pytest.raises(AssertionError, match="frozen"):
        content.wrote(generation, 0, 10)


def test_generations_cost_the_same_however_many_pieces_there_are(tmp_path: Path) -> None:
    """They are asked for at every sync, under the lock."""
    staging = Staging(tmp_path / "staging", TB, FileOps())
    content, generation = Content(), staging.create(1)
    content.begin(generation)
    times = []
    for count in (1000, 200_000):
        for number in range(count):
            content.wrote(generation, 2 * number, 1)
        began = time.perf_counter()
        for _ in range(1000):
            assert content.generations() == [generation]
        times.append(time.perf_counter() - began)
    assert times[1] < 20 * times[0]
