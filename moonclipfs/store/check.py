"""Verifying a store: every byte of packs and log, every tree, every base; nothing stops at the first problem."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext, suppress

import numpy as np

from moonclipfs import limits
from moonclipfs.errors import BackendError, CorruptError, MoonclipError, NotFoundError
from moonclipfs.formats.contents import findings
from moonclipfs.formats.layout import Layout
from moonclipfs.store import packfile
from moonclipfs.store.layerdirs import LayerRoots, layer_names
from moonclipfs.store.log import Names
from moonclipfs.store.objectcheck import ObjectCheck, has_gone
from moonclipfs.store.overlaydirs import layer_title
from moonclipfs.store.packs import pack_key
from moonclipfs.store.problems import Problem, ProblemKind, VerifyReport
from moonclipfs.store.reachable import Footers, PackTable
from moonclipfs.store.records import decode_record, read_bound, record_name, record_sequence
from moonclipfs.store.store import Store
from moonclipfs.store.treecheck import Top, affected_files, name_of, read_trees, top_of
from moonclipfs.types import Entry, EntryType, Source, Version

_LOG_RECORD = re.compile(r"log record (\d+)")


def verify(
    store: Store,
    *,
    quick: bool = False,
    contents: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """Look for damage; `progress` is told encoded bytes (done, total).

    Log records, pack footers and all directories and recipes are read, and every object that is needed is looked for,
    with its bases; unless `quick`, every object of every pack is also decoded and hashed. `contents` adds what is
    wrong inside the files: truncated ones, stale indexes of shards, missing ranks. The index is a cache: it is made
    anew when it is wrong. Raises BackendError only when the store's directories cannot be listed.
    """
    # While it is held, nothing that we look at is deleted.
    with nullcontext() if store.lease is None else store.lease.hold(store.log.names.sequence):
        return _verify(store, quick, contents, progress)


def _verify(store: Store, quick: bool, contents: bool, progress: Callable[[int, int], None]) -> VerifyReport:
    names = store.names()
    versions = sorted(names.all_versions(), key=lambda version: version.sequence)
    problems = list(_check_log(store, names))
    # Before the packs are listed: what a journal names lies in one by then.
    tops = [top_of(version) for version in versions]
    for layer in layer_names(store.path):
        problems += _read_layer(store, layer, tops)
    footers = Footers(store)
    table = footers.table()
    problems += [Problem(ProblemKind.PACK, pack_key(pack), message) for pack, message in footers.damaged.items()]
    condemned = names.condemned()
    problems += _check_records(store, table, footers, condemned, quick)
    # Before anything is looked up in it: a lookup that fails makes it anew without a word.
    problems += _check_index(store, footers)
    trees = read_trees(store, tops, table)
    objects = ObjectCheck(store, table, trees.needed, condemned)
    if not quick:
        objects.audit(progress)
    for object_id, why in trees.unreadable.items():
        objects.report_unreadable(object_id, why)
    if objects.broken:
        for object_id, name in affected_files(store, tops, objects.broken):
            objects.blame(object_id, name)
    problems += [*trees.problems, *objects.problems]
    if contents:
        problems += _check_contents(store, versions)
    encoded = 0 if quick else int(table.entries["encoded_length"].sum())
    report = VerifyReport(quick, len(versions), len(table.names), len(table.entries), encoded, problems=problems)
    if store.base is not None:
        report.base, report.base_objects = str(store.base.path), len(table.elsewhere(trees.needed))
    return report


def _read_layer(store: Store, layer: str, tops: list[Top]) -> Iterator[Problem]:
    """Add to `tops` what the journal of a layer names."""
    name = layer_title(store.path, layer)
    try:
        for kind, object_id in set(LayerRoots(store.path).more_of(layer)):
            tops.append(Top(name, kind, object_id))
    except MoonclipError as error:
        message = f"{error}; what it needs cannot be told, and gc deletes nothing"
        yield Problem(ProblemKind.LAYER, name, message, [name + "/"])


def _check_log(store: Store, names: Names) -> Iterator[Problem]:
    """Read every record that there is, also those before the last checkpoint."""
    where = store.backend.path("log")
    for line in names.damaged:
        yield _lost_record(store, names, line)
    spare = "what it said is known from a later checkpoint"
    present: set[int] = set()
    for info in store.backend.list("log/"):
        sequence = record_sequence(info.key)
        # A record without bytes is one that somebody began to write.
        if not sequence or not info.size or sequence > names.sequence:
            continue
        present.add(sequence)
        try:
            decode_record(store.backend.read(info.key), sequence)
        except (CorruptError, BackendError) as error:
            message = f"{store.backend.path(info.key)}: {error}"
            if message not in names.damaged:
                yield Problem(ProblemKind.LOG, where, f"{message}; {spare}")
    for sequence in sorted(set(range(min(present, default=1), names.sequence)) - present):
        if not any(f"log record {sequence} " in line for line in names.damaged):
            yield Problem(ProblemKind.LOG, where, f"log record {sequence} is missing; {spare}")


def _lost_record(store: Store, names: Names, line: str) -> Problem:
    """The problem of a record that is left out, with the snapshot that it bound when that can still be read."""
    where, found = store.backend.path("log"), _LOG_RECORD.search(line)
    told = None
    if found is not None:
        with suppress(MoonclipError):
            told = read_bound(store.backend.read(record_name(int(found[1])), 0, limits.LOG_RECORD_BYTES))
    known = sorted(f"{version.path}@{version.number}" for version in names.all_versions())
    if told is not None:
        path, number = told
        name = path if number is None else f"{path}@{number}"
        if name not in known:  # else it is misread
            return Problem(ProblemKind.LOG, where, f"{line}; it bound {name}, as far as it can be read", [name + "/"])
    rest = f"the {len(known)} versions from {known[0]} to {known[-1]}" if known else "nothing"
    return Problem(
        ProblemKind.LOG, where, f"{line}; which names it changed cannot be told; of others, {rest} can be read"
    )


def _check_records(
    store: Store, table: PackTable, footers: Footers, condemned: Collection[str], quick: bool
) -> Iterator[Problem]:
    """Check that the records of each pack fill it, so that no byte of it goes unchecked."""
    for pack, size in zip(table.names, table.sizes.tolist(), strict=True):
        if pack in footers.damaged:
            continue
        entries = footers.entries(pack)
        starts = entries["offset"].astype(np.int64) - packfile.RECORD_BYTES
        ends = entries["offset"].astype(np.int64) + entries["encoded_length"].astype(np.int64)
        footer_at = size - packfile.TRAILER.size - entries.nbytes
        edges = np.concatenate([[packfile.HEADER.size], np.sort(ends)])
        gaps = edges != np.concatenate([np.sort(starts), [footer_at]])
        if gaps.any():
            message = f"bytes from {int(edges[gaps][0])} on belong to no record, or to two"
            yield Problem(ProblemKind.PACK, pack_key(pack), message)
        elif not quick and (wrong := _header_problem(store, pack)) and not has_gone(store, condemned, pack):
            yield Problem(ProblemKind.PACK, pack_key(pack), wrong)


def _header_problem(store: Store, pack: str) -> str:
    try:
        header = store.backend.read(pack_key(pack), 0, packfile.HEADER.size)
    except (NotFoundError, BackendError) as error:
        return f"its header cannot be read: {error}"
    return "" if header == packfile.pack_header() else "its header is damaged; its objects are not"


def _check_index(store: Store, footers: Footers) -> Iterator[Problem]:
    """Compare the index with the footers, and make it anew when they differ."""
    wrong = store.index.contradiction({pack: footers.entries(pack) for pack in footers.packs()}, footers.damaged)
    if wrong:
        store.index.rebuild()
        yield Problem(ProblemKind.INDEX, "index", f"{wrong}; it was made anew from the packs", repaired=True)


def _check_contents(store: Store, versions: Iterable[Version]) -> Iterator[Problem]:
    """Look into the files of every distinct tree."""
    seen: set[bytes] = set()
    for version in versions:
        if version.root in seen:
            continue
        seen.add(version.root)
        try:
            for finding in findings(_Files(store, version)):
                name = name_of(version, os.fsencode(finding.path))
                yield Problem(ProblemKind.CONTENTS, name, finding.message, [name])
        except MoonclipError as error:
            message = f"its files cannot be looked into: {error}"
            yield Problem(ProblemKind.CONTENTS, name_of(version), message)


class _Files:
    """The regular files of a version, as `formats.contents` wants them."""

    def __init__(self, store: Store, version: Version) -> None:
        self._store = store
        self._entries: dict[str, Entry] = {
            os.fsdecode(path): entry for path, entry in store.walk(version) if entry.type is EntryType.FILE
        }

    def paths(self) -> Iterable[str]:
        """The path of every file."""
        return self._entries

    def layout(self, path: str) -> Layout:
        """The layout of a file."""
        return self._store.layout(self._entries[path])

    def source(self, path: str) -> Source:
        """The bytes of a file."""
        return self._store.open_file(self._entries[path])
