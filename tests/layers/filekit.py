"""Files of a layer for tests: made, read, and encoded by this process."""

from __future__ import annotations

import os

from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.jobs import Job
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.records import PART_RECIPE
from moonclipfs.store.filereader import FileReader
from moonclipfs.types import BytesSource, EntryType, Kind


def make_file(layer: Layer, name: bytes, mode: int = 0o644, directory: Inode | None = None) -> Inode:
    """A new, empty file."""
    return layer.make(directory or layer.root, name, EntryType.FILE, mode, 0, 0, 1)


def write_file(layer: Layer, name: bytes, data: bytes, directory: Inode | None = None) -> Inode:
    """A new file with these bytes, closed."""
    inode = make_file(layer, name, directory=directory)
    overwrite(layer, inode, data)
    return inode


def overwrite(layer: Layer, inode: Inode, data: bytes, *, sync: bool = False) -> None:
    """What `open(..., "wb")` does to a file that is there."""
    file = layer.open_file(inode, write=True)
    try:
        layer.truncate(inode, 0, 2)
        file.write(0, data, 3)
        if sync:
            file.sync()
        file.flush()
    finally:
        file.close()


def read_all(layer: Layer, inode: Inode) -> bytes:
    """All bytes of a file."""
    file = layer.open_file(inode, write=False)
    try:
        return file.read(0, file.size)
    finally:
        file.close()


def job_bytes(layer: Layer, job: Job) -> bytes:
    """What a job is to encode."""
    out = bytearray(job.size)
    for part in job.parts:
        view = memoryview(out)[part.offset : part.offset + part.length]
        if part.generation is not None:
            part.generation.read_into(part.offset, view)
        elif part.kind == PART_RECIPE:
            reader = FileReader(layer.store.objects, layer.store.recipe_object(job.recipe))
            assert reader.read_into(part.offset, view) == part.length
    return bytes(out)


def encode(layer: Layer, *jobs: Job) -> None:
    """Store jobs and say so."""
    with layer.store.ingest() as ingest:
        results = [ingest.put_file(BytesSource(job_bytes(layer, job)))[0] for job in jobs]
        ingest.complete([(Kind.RECIPE, recipe) for recipe in results])
    for job, result in zip(jobs, results, strict=True):
        layer.stored(job, result, job.size)


def staging_names(layer: Layer) -> list[str]:
    """The staging files of a layer."""
    return sorted(os.listdir(layer.staging.directory))
