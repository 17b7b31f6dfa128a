"""Optimizer state dropped from older snapshots: what is needed to go on training, and not to use the weights.

A thinned snapshot is a new version of the same name without those files, which stands where the old one stood in its
line; the old version is forgotten, so that gc can free what only it needed. `thinned` of its metadata has the paths
that are gone, by which whoever would resume from it sees that it cannot.

A snapshot of which no weights would be left stays as it is: some sharded formats keep the only weights beside the
optimizer's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from moonclipfs.errors import NotFoundError, UsageError
from moonclipfs.store.forget import drop, held
from moonclipfs.store.gc import GcReport, collect, preview
from moonclipfs.store.log import Names
from moonclipfs.store.publish import Ingest
from moonclipfs.store.rebind import new_metadata
from moonclipfs.store.replay import is_at_or_below
from moonclipfs.store.retention import Key, line_of
from moonclipfs.store.store import Store
from moonclipfs.types import Entry, EntryType, ObjectId, Version

OPTIMIZER = (
    *("optimizer", "optimizer.*", "optimizer[-_]*", "optim", "optim.*", "*optim_states.*", "distrib_optim*"),
    *("rng.*", "rng[-_]state*", "random_states[-_]*", "zero_pp_rank_*", "bf16_zero_pp_rank_*"),
)
"""Names of files and directories with the state of optimizers and of random number generators, and ZeRO's shards."""
WEIGHTS = (
    *("model*.safetensors", "*model*.safetensors", "*.gguf", "consolidated*", "adapter_model*", "pytorch_model*.bin"),
    *("model*.pt", "model*.pth", "model*.bin", "mp_rank_*_model_states.pt", "*.distcp", "*.npz", "*.ckpt"),
)
"""Names of files with weights: one has to be left."""


@dataclass(frozen=True, slots=True)
class Thinned:
    """What becomes of one snapshot: the paths `dropped` from it, `bytes` of files in all; nothing when `reason` says
    why it stays as it is. `version` is the one that was looked at."""

    version: Version
    dropped: tuple[str, ...] = ()
    bytes: int = 0
    reason: str = ""


@dataclass(slots=True)
class ThinReport:
    """What was done, or in a dry run would be, in the order of the lines; `gc` tells what that freed."""

    snapshots: list[Thinned] = field(default_factory=list)
    gc: GcReport | None = None
    dry_run: bool = False


def thin(
    store: Store,
    run: str,
    *,
    keep_optimizer_last: int,
    also: Sequence[str] = (),
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ThinReport:
    """Drop the optimizer's files from all but the last snapshots of each line at or below `run`, and free their space.

    `also` are further names to drop, with `*`. What is pinned, or stood on by an overlay, stays as it is. Raises
    NotFoundError when there is no such run, UsageError for a number below 1, CorruptError for a snapshot whose
    directories cannot be read, and what `Ingest.publish` and `gc.collect` raise: what was thinned until then is.
    """
    if keep_optimizer_last < 1:
        raise UsageError(
            f"--keep-optimizer-last {keep_optimizer_last}: must be 1 or more, so that the newest can be resumed from"
        )
    report = ThinReport(dry_run=dry_run)
    patterns = (*OPTIMIZER, *also)
    gone: list[Key] = []
    for version, reason in _older(store, store.names(), run, keep_optimizer_last):
        found = Thinned(version, reason=reason) if reason else _look(store, version, patterns)
        if found.dropped and not dry_run:
            found = _publish(store, found, patterns)
        elif found.dropped:
            gone.append((version.path, version.number))
        report.snapshots.append(found)
    gone += _replaced(store, store.names(), [found.version.path for found in report.snapshots])
    if gone and dry_run:
        report.gc = preview(store, gone)
    elif gone:
        drop(store, gone)
        report.gc = collect(store, progress=progress)
    return report


def _replaced(store: Store, names: Names, paths: Iterable[str]) -> list[Key]:
    """The versions of `paths` that thinned ones stand in for: also those that a run left which did not get that far."""
    kept = {*names.pins(), *held(store)}
    found = []
    for path in paths:
        bound = names.bound().get(path)
        if bound is not None and "in_place_of" in bound.metadata:
            same = [one for one in names.versions(path) if one.order[0] == bound.order[0] and one is not bound]
            found += [(path, one.number) for one in same if (path, one.number) not in kept]
    return found


def _older(store: Store, names: Names, run: str, keep: int) -> Iterator[tuple[Version, str]]:
    """The snapshots of each line in their order, each with why it stays as it is, if that is known."""
    lines: dict[str, list[Version]] = {}
    for version in sorted(names.bound().values(), key=lambda one: one.order):
        if is_at_or_below(version.path, run):
            lines.setdefault(line_of(version.path), []).append(version)
    if not lines:
        raise NotFoundError(f"no snapshot is called {run!r}, or lies below it; `moonclipfs ls` lists them")
    reasons = {key: tuple(why) for key, why in held(store).items()} | dict(names.pins())
    for line in sorted(lines):
        for at, version in enumerate(lines[line]):
            why = ", ".join(reasons.get((version.path, version.number), ()))
            yield version, f"among the last {keep}" if at >= len(lines[line]) - keep else why


def _look(store: Store, version: Version, patterns: Sequence[str]) -> Thinned:
    """What would be dropped from a version."""
    dropped: list[str] = []
    size = 0
    weights = False
    above = b""
    for path, entry in store.walk(version):
        if above and path.startswith(above):
            size += entry.size if entry.type is EntryType.FILE else 0
        elif _matches(entry.name, patterns):
            dropped.append(os.fsdecode(path))
            above = path + b"/"
            size += entry.size if entry.type is EntryType.FILE else 0
        else:
            weights |= entry.type is EntryType.FILE and _matches(entry.name, WEIGHTS)
    if not dropped:
        return Thinned(version, reason="has no optimizer state")
    if not weights:
        return Thinned(version, reason="no file with weights would be left")
    return Thinned(version, tuple(dropped), size)


def _matches(name: bytes, patterns: Iterable[str]) -> bool:
    text = os.fsdecode(name)
    return any(fnmatchcase(text, pattern) for pattern in patterns)


class _ChangedError(Exception):
    """Another process bound, removed or pinned the snapshot meanwhile."""


def _publish(store: Store, found: Thinned, patterns: Sequence[str]) -> Thinned:
    """Bind what is left as the next version, unless another process changed the name meanwhile."""
    version = found.version
    key = (version.path, version.number)

    def unchanged(names: Names) -> None:
        current = names.bound().get(version.path)
        if current is None or current.number != version.number or key in names.pins() or key in held(store):
            raise _ChangedError

    metadata: Mapping[str, object] = {
        **new_metadata(version),
        **_counts(store, version, found),
        "thinned": sorted({*_thinned(version), *found.dropped}),
        "in_place_of": version.order[0],
    }
    try:
        with store.ingest() as ingest:
            unchanged(store.names())
            ingest.publish(version.path, _without(store, ingest, version.root, patterns), metadata, unchanged)
    except _ChangedError:
        return Thinned(version, reason="changed meanwhile")
    return found


def _without(store: Store, ingest: Ingest, root: ObjectId, patterns: Sequence[str]) -> ObjectId:
    """The directory without what matches, at any depth."""
    entries = []
    for name, entry in store.directory(root).items():
        if not _matches(name, patterns):
            child = entry.child
            if entry.type is EntryType.DIRECTORY:
                child = _without(store, ingest, entry.child, patterns)
            entries.append(Entry(name, entry.type, entry.attributes, entry.size, child, entry.target, entry.link_group))
    return ingest.put_directory(entries)


def _counts(store: Store, version: Version, found: Thinned) -> dict[str, object]:
    """The numbers of files and bytes that are left."""
    sizes = [
        entry.size
        for path, entry in store.walk(version)
        if entry.type is EntryType.FILE and not any(is_at_or_below(os.fsdecode(path), one) for one in found.dropped)
    ]
    return {"files": len(sizes), "bytes": sum(sizes)}


def _thinned(version: Version) -> list[str]:
    """What was taken out of a version before."""
    before = version.metadata.get("thinned")
    return [str(one) for one in before] if isinstance(before, list) else []
