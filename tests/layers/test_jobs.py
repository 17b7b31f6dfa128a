"""What the encoder is given, and what becomes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from moonclipfs import limits
from moonclipfs.errors import NotFoundError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.jobs import Job
from moonclipfs.layers.layer import Layer
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, EntryType, ObjectId
from tests.layers.filekit import (
    encode,
    job_bytes,
    make_file,
    overwrite,
    read_all,
    staging_names,
    write_file,
)
from tests.layers.publish import publish

BIG = 2 * limits.INLINE_BYTES


@pytest.fixture
def layer(store: Store) -> Iterator[Layer]:
    opened = Layer.open(store, "test")
    yield opened
    opened.close()


def directory(layer: Layer, path: bytes) -> Inode:
    inode = layer.root
    for name in path.split(b"/"):
        try:
            inode = layer.lookup(inode, name)
        except NotFoundError:
            inode = layer.make(inode, name, EntryType.DIRECTORY, 0o755, 0, 0, 1)
    return inode


def write_at(layer: Layer, path: bytes, data: bytes) -> Inode:
    above, _, name = path.rpartition(b"/")
    return write_file(layer, name, data, directory(layer, above) if above else layer.root)


def recipe(inode: Inode) -> ObjectId:
    return inode.child if inode.content is None else inode.content.recipe


def is_plain(inode: Inode) -> bool:
    """Whether a file is its recipe and takes no more memory than that."""
    return inode.content is None


def urgent(layer: Layer) -> list[Job]:
    return layer.take_jobs(time.monotonic(), urgent=True)


def test_a_file_is_taken_when_it_was_left_alone(layer: Layer) -> None:
    data = os.urandom(BIG)
    inode = write_at(layer, b"a", data)
    now = time.monotonic()
    assert layer.take_jobs(now) == []
    (job,) = layer.take_jobs(now + limits.ENCODE_DELAY_SECONDS)
    assert (job.inode, job.path, job.size, job.recipe, job.hint) == (inode.number, b"a", BIG, NO_ID, NO_ID)
    assert job_bytes(layer, job) == data
    assert layer.take_jobs(now + 100) == [] and urgent(layer) == []
    encode(layer, job)
    assert urgent(layer) == []


def test_a_file_with_writers_is_taken_under_pressure_only(layer: Layer) -> None:
    files = []
    for number, size in enumerate([BIG, 3 * BIG]):
        files.append(layer.open_file(make_file(layer, b"%d" % number), write=True))
        files[-1].write(0, os.urandom(size), 1)
    assert urgent(layer) == []
    jobs = layer.take_jobs(time.monotonic(), urgent=True, pressure=True)
    assert [job.size for job in jobs] == [3 * BIG, BIG]
    encode(layer, *jobs)
    assert layer.staging.used == 0
    for file in files:
        file.write(0, b"x", 2)
        file.close()


def test_only_these_files_are_taken(layer: Layer) -> None:
    write_at(layer, b"a", os.urandom(BIG))
    wanted = write_at(layer, b"b", os.urandom(BIG))
    (job,) = layer.take_jobs(0.0, urgent=True, inodes=[wanted])
    assert job.inode == wanted.number


def test_an_empty_file_is_no_job(layer: Layer) -> None:
    write_at(layer, b"a", b"")
    overwrite(layer, write_at(layer, b"b", b"text"), b"")
    assert urgent(layer) == []


def test_a_file_that_was_only_cut_is_encoded(layer: Layer) -> None:
    data = os.urandom(BIG)
    inode = write_at(layer, b"a", data)
    encode(layer, *urgent(layer))
    layer.truncate(inode, BIG - 7, 9)
    (job,) = urgent(layer)
    assert job_bytes(layer, job) == data[:-7]
    encode(layer, job)
    assert read_all(layer, inode) == data[:-7] and urgent(layer) == []


def test_a_file_changed_while_it_is_encoded_is_taken_again(layer: Layer) -> None:
    inode = write_at(layer, b"a", os.urandom(BIG))
    (job,) = urgent(layer)
    overwrite(layer, inode, b"new" * BIG)
    assert urgent(layer) == []
    encode(layer, job)
    (again,) = urgent(layer)
    assert job_bytes(layer, again) == b"new" * BIG
    encode(layer, again)
    layer.sync_all()
    assert staging_names(layer) == [] and read_all(layer, inode) == b"new" * BIG


def test_a_job_of_a_removed_file_is_harmless(layer: Layer) -> None:
    write_at(layer, b"a", os.urandom(BIG))
    (job,) = urgent(layer)
    layer.unlink(layer.root, b"a", 9)
    layer.sync_all()
    assert not layer.files.jobs.is_wanted(job)
    assert len(job_bytes(layer, job)) == BIG and len(staging_names(layer)) == 1
    encode(layer, job)
    layer.sync_all()
    assert staging_names(layer) == [] and layer.staging.used == 0


def test_what_failed_stays_readable_and_is_told(layer: Layer) -> None:
    data = os.urandom(BIG)
    inode = write_at(layer, b"a", data)
    (job,) = urgent(layer)
    assert layer.staged()["encoding_files"] == 1
    layer.give_up(job, "the disk is full")
    assert layer.staged()["failed_files"] == {"a": "the disk is full"} and layer.staged()["encoding_files"] == 0
    assert urgent(layer) == [] and read_all(layer, inode) == data
    encode(layer, job)
    assert layer.staged()["failed_files"] == {}


def test_a_failed_job_of_a_removed_file_is_let_go(layer: Layer) -> None:
    write_at(layer, b"a", os.urandom(BIG))
    (job,) = urgent(layer)
    layer.give_up(job, "the disk is full")
    layer.unlink(layer.root, b"a", 9)
    layer.sync_all()
    assert staging_names(layer) == [] and layer.staged()["failed_files"] == {}
    layer.stored(job, bytes(32), BIG)


def test_stored_files_take_no_memory(layer: Layer) -> None:
    inodes = [write_at(layer, b"%d" % number, os.urandom(100)) for number in range(10)]
    assert layer.staging.used == 1000
    encode(layer, *urgent(layer))
    layer.sync_all()
    assert layer.staging.used == 0 and all(inode.content is None for inode in inodes)


def test_stored_files_that_were_open_take_no_memory_when_they_are_closed(layer: Layer) -> None:
    data = os.urandom(BIG)
    inode = write_at(layer, b"a", data)
    reader = layer.open_file(inode, write=False)
    encode(layer, *urgent(layer))
    assert inode.content is not None
    reader.close()
    assert is_plain(inode) and read_all(layer, inode) == data


def test_storing_is_no_change_for_seals(layer: Layer) -> None:
    inode = write_at(layer, b"a", os.urandom(BIG))
    changed, below = inode.changed, layer.root.below
    encode(layer, *urgent(layer))
    layer.sync_all()
    assert inode.changed == changed and layer.root.below == below


# Hints


@pytest.mark.parametrize(
    ("before", "path"),
    [
        (b"run1/checkpoint-500/model.safetensors", b"run1/checkpoint-1000/model.safetensors"),
        (b"run1/checkpoint-500/unet/x", b"run1/checkpoint-1000/unet/x"),
        (b"run1/global_step5/mp_rank_00/a.pt", b"run1/global_step6/mp_rank_00/a.pt"),
        (b"run1/epoch=1-step=10.ckpt", b"run1/epoch=2-step=20.ckpt"),
        (b"run1/base/model.bin", b"run1/tuned/model.bin"),
    ],
)
def test_the_like_in_the_line_is_the_hint(layer: Layer, before: bytes, path: bytes) -> None:
    first = write_at(layer, before, os.urandom(BIG))
    encode(layer, *urgent(layer))
    write_at(layer, path, os.urandom(BIG))
    (job,) = urgent(layer)
    assert job.hint == recipe(first) != NO_ID


def test_the_newest_of_the_line_counts(layer: Layer) -> None:
    names = [b"run/checkpoint-%d/model" % step for step in (500, 1000, 1500)]
    inodes = [write_at(layer, name, os.urandom(BIG)) for name in names]
    encode(layer, *urgent(layer))
    for inode, when in zip(inodes, (10, 30, 20), strict=True):
        layer.set_attributes(inode, now_ns=when)
    write_at(layer, b"run/checkpoint-2000/model", os.urandom(BIG))
    (job,) = urgent(layer)
    assert job.hint == recipe(inodes[1])


def test_the_line_goes_before_another_directory(layer: Layer) -> None:
    write_at(layer, b"run/checkpoint-500/vae/model", os.urandom(BIG))
    wanted = write_at(layer, b"run/checkpoint-500/unet/model", os.urandom(BIG))
    write_at(layer, b"run/checkpoint-1000/vae/model", os.urandom(BIG))
    encode(layer, *urgent(layer))
    write_at(layer, b"run/checkpoint-1000/unet/model", os.urandom(BIG))
    (job,) = urgent(layer)
    assert job.hint == recipe(wanted)


def test_bound_snapshots_are_of_the_line(store: Store) -> None:
    data = os.urandom(BIG)
    publish(store, "run/checkpoint-500", {"model": data})
    layer = Layer.open(store, "test")
    try:
        write_at(layer, b"run/checkpoint-1000/model", os.urandom(BIG))
        (job,) = urgent(layer)
        assert job.hint == layer.resolve(b"run/checkpoint-500/model").child != NO_ID
    finally:
        layer.close()


def test_what_a_file_replaced_is_the_hint(layer: Layer) -> None:
    inode = write_at(layer, b"run/last.ckpt", os.urandom(BIG))
    encode(layer, *urgent(layer))
    first = recipe(inode)
    overwrite(layer, inode, os.urandom(BIG))
    (job,) = urgent(layer)
    assert job.hint == first and job.recipe == NO_ID
    encode(layer, job)
    second = recipe(inode)
    write_at(layer, b"run/.tmp", os.urandom(BIG))
    run = layer.resolve(b"run")
    layer.rename(run, b".tmp", run, b"last.ckpt", 9)
    (job,) = urgent(layer)
    assert job.hint == second and job.path == b"run/last.ckpt"


def test_an_edited_file_is_its_own_hint(layer: Layer) -> None:
    inode = write_at(layer, b"a", os.urandom(BIG))
    encode(layer, *urgent(layer))
    file = layer.open_file(inode, write=True)
    file.write(10, b"edit", 5)
    file.close()
    (job,) = urgent(layer)
    assert job.hint == job.recipe == recipe(inode)


def test_an_old_result_does_not_come_over_a_newer_one(layer: Layer) -> None:
    """A capture can be stored after what was written later."""
    old, new = os.urandom(BIG), os.urandom(BIG)
    inode = write_at(layer, b"a", old)
    stored = write_at(layer, b"old", old)
    encode(layer, *layer.take_jobs(0.0, urgent=True, inodes=[stored]))
    assert inode.content is not None
    inode.content.freeze()
    freeze = inode.content.newest
    overwrite(layer, inode, new)
    encode(layer, *urgent(layer))
    file = layer.open_file(inode, write=True)
    file.write(0, b"edit", 9)
    with layer.lock:
        layer.files.jobs.encoded(inode, freeze, NO_ID, recipe(stored), BIG)
    assert file.read(0, BIG) == b"edit" + new[4:]
    file.close()


def test_what_a_seal_stored_is_not_stored_again(layer: Layer) -> None:
    data = os.urandom(BIG)
    inode = write_at(layer, b"a", data)
    twin = write_at(layer, b"twin", data)
    encode(layer, *layer.take_jobs(0.0, urgent=True, inodes=[twin]))
    assert inode.content is not None
    inode.content.freeze()
    with layer.lock:
        layer.files.jobs.encoded(inode, inode.content.newest, NO_ID, recipe(twin), BIG)
    assert urgent(layer) == [] and is_plain(inode) and read_all(layer, inode) == data
    layer.sync_all()
    assert staging_names(layer) == []


def test_a_job_of_a_file_that_was_written_anew_is_not_wanted(layer: Layer) -> None:
    """It would be encoded for nothing; and where what it came from is reclaimed, it would fail for ever and keep the
    new content from being encoded.
    """
    inode = write_at(layer, b"a", os.urandom(BIG))
    encode(layer, *urgent(layer))
    file = layer.open_file(inode, write=True)
    file.write(5, b"changed", 4)
    file.close()
    (job,) = urgent(layer)
    assert layer.files.jobs.is_wanted(job)
    overwrite(layer, inode, b"new" * BIG)
    assert not layer.files.jobs.is_wanted(job) and urgent(layer) == []
    layer.give_up(job, "an object is missing")
    assert layer.staged()["failed_files"] == {}
    (again,) = urgent(layer)
    assert job_bytes(layer, again) == b"new" * BIG
    encode(layer, again)
    overwrite(layer, inode, os.urandom(BIG))
    (job,) = urgent(layer)
    overwrite(layer, inode, os.urandom(BIG))
    assert not layer.files.jobs.is_wanted(job), "it comes from no recipe, and none of its bytes are left"
