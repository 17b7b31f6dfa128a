"""Seals: directories of a layer become versions, when they are told to, or by themselves when they are quiet and whole.

A seal is a capture (`capture.py`), then encoding, then publishing (`publishing.py`, in the encoder's process). A
capture that could not be published stays, over restarts too, and is tried again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moonclipfs import limits
from moonclipfs.errors import BusyError, CorruptError, MoonclipError, NotFoundError, StagingLostError, UsageError
from moonclipfs.layers.capture import Capture
from moonclipfs.layers.captured import encode_tree
from moonclipfs.layers.freezing import own_files, resolved, staged_paths
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.lost import ADVICE, lost_of_capture, lost_of_files
from moonclipfs.layers.names import Area
from moonclipfs.layers.openunits import (
    LayerBranch,
    has_new_contents,
    open_for_writing,
    open_units,
    what_is_missing,
)
from moonclipfs.layers.records import Sealed
from moonclipfs.store.log import Names
from moonclipfs.store.overlaydirs import pinned_versions
from moonclipfs.types import NO_ID, Kind, Version

if TYPE_CHECKING:
    from collections.abc import Collection

    from moonclipfs.layers.layer import Layer

log = logging.getLogger(__name__)

_WALK_SHARE = 20
"""Looking for units takes at most this part of the time."""


class Worker(Protocol):
    """What a seal needs of the encoder."""

    def drain(
        self, inodes: Collection[Inode] | None = None, timeout: float | None = None, *, urgent: bool = True
    ) -> None:
        """Store all that is staged, of these files; with all cores if `urgent`."""

    def call(self, op: str, **arguments: Any) -> Any:
        """Run an operation that writes to the store."""


@dataclass(slots=True)
class _Unit:
    """A unit with unsealed changes, as it was seen last."""

    branch: LayerBranch
    below: int
    next_try: float
    missing: tuple[str, ...] = ()


class Sealer:
    """Seals directories of one layer. Thread-safe."""

    def __init__(
        self,
        layer: Layer,
        encoder: Worker,
        *,
        seal_after: float | None = limits.SEAL_AFTER_SECONDS,
        keep_versions: int = limits.KEEP_VERSIONS,
    ) -> None:
        """Units are sealed after `seal_after` quiet seconds, None for never; of the versions that come about so, the
        last `keep_versions` of a name are kept.
        """
        self._layer = layer
        self._encoder = encoder
        self._seal_after = seal_after
        self._keep = max(1, keep_versions)
        self._units: dict[int, _Unit] = {}
        self._looked_at = -1
        """The layer's change counter at the last look."""
        self._next_look = 0.0
        self._next_publish = 0.0
        self._published: OrderedDict[int, Version | None] = OrderedDict()
        """What became of the last captures: somebody may still ask, whichever thread published them."""
        self._given_up: dict[int, str] = {}
        """Why a capture of each directory, by number, was given up, until the directory is sealed."""
        self._publishing = threading.Lock()
        """One capture at a time, in order."""
        self.before_publish: Callable[[Capture], None] = lambda capture: None
        """Called between capture and publishing, for tests."""

    # Told to

    def seal(self, path: bytes, *, wait: bool = True, metadata: Mapping[str, object] | None = None) -> Version | None:
        """Seal the directory at a path of the layer as it is now.

        Returns its version: the one before, when nothing is new. Without `wait` it is published in the background,
        and None is returned. A file that is open for writing is waited for shortly. Raises NotFoundError, UsageError,
        BusyError, StagingLostError, and what keeps files from being stored.
        """
        directory = self._layer.resolve(path)
        self._wait_for_writers(path, directory)
        with self._layer.lock:
            bound = self._unchanged(path, directory)
        if bound is not None:
            return bound
        self._require_staged(directory, f"/{os.fsdecode(path)} cannot be sealed: ")
        self._store_many(directory)
        capture = self._layer.captures.take(directory, self._metadata(directory, metadata or {}, automatic=False))
        if not wait:
            self._next_publish = 0.0
            return None
        self._drain(capture)
        return self._publish_one(capture)

    def _require_staged(self, directory: Inode, what: str = "") -> None:
        """Raise StagingLostError, which begins with `what`, where a capture would need staged bytes that are lost."""
        for file, lost in lost_of_files(self._layer, self._staged(directory)):
            raise StagingLostError(f"{what}{os.fsdecode(file)}: {lost}; {ADVICE}")

    def _store_many(self, directory: Inode) -> None:
        """Encode first where many files are staged, so that a capture does not have to hold all their bytes."""
        staged = self._staged(directory)
        if len(staged) > limits.CAPTURED_FILES:
            self._encoder.drain(staged)

    def _staged(self, directory: Inode) -> list[Inode]:
        """The files below a directory that are not stored yet."""
        with self._layer.lock:
            return [inode for inode in own_files(directory) if inode.content is not None and inode.content.is_staged]

    def _wait_for_writers(self, path: bytes, directory: Inode) -> None:
        """The kernel tells of a close when it has returned to the program: what was closed just now may seem open."""
        deadline = time.monotonic() + limits.SEAL_WRITERS_SECONDS
        while True:
            with self._layer.lock:
                files = open_for_writing(directory)
                names = sorted(self._layer.path(inode) for inode in files)
            if not names:
                return
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"/{os.fsdecode(path)} cannot be sealed: {os.fsdecode(names[0])} is open for writing"
                    + (f", and {len(names) - 1} more" if names[1:] else "")
                )
            time.sleep(0.02)

    def _unchanged(self, path: bytes, directory: Inode) -> Version | None:
        """The bound version of a directory that has nothing to seal."""
        version = self._layer.view.area(Area.LIVE).leaves.get(path)
        if not isinstance(version, Version) or directory.below or version.sequence != directory.sealed:
            return None
        return None if version.metadata.get("automatic") or version.metadata.get("incomplete") else version

    def _metadata(
        self, directory: Inode, more: Mapping[str, object], *, automatic: bool, incomplete: bool = False
    ) -> dict[str, object]:
        metadata: dict[str, object] = {"automatic": automatic, "layer": self._layer.name}
        with self._layer.lock:
            numbers = [directory.number, *(child.number for child in directory.entries.values() if child.is_directory)]
        if provenance := self._layer.captures.writers.provenance(numbers):
            metadata["provenance"] = provenance
        if incomplete:
            metadata["incomplete"] = True
        return {**metadata, **more}

    # By itself

    def tick(self, now: float) -> None:
        """Publish what waits, and seal what has become quiet and complete; `now` is of the monotonic clock.

        Called about once a second; cheap when nothing changed. Raises what keeps a capture from being published: it
        is tried again after `limits.RETRY_SECONDS`.
        """
        self._layer.captures.writers.look()
        failures: list[MoonclipError] = []
        if len(self._layer.captures) and now >= self._next_publish:
            self._next_publish = now + limits.RETRY_SECONDS
            try:
                self.publish_pending()
            except MoonclipError as error:
                failures.append(error)
        if self._seal_after is not None:
            self._look(now)
            failures += self._try_all(now)
        if failures:
            raise failures[0]

    def _try_all(self, now: float) -> list[MoonclipError]:
        failures = []
        for unit in list(self._units.values()):
            if now >= unit.next_try:
                try:
                    self._try(unit, now)
                except MoonclipError as error:
                    if isinstance(error, NotFoundError) and self._has_changed(unit):
                        continue  # something was removed or renamed meanwhile: the next look sees it
                    unit.missing = (str(error),)
                    failures.append(error)
        return failures

    def _has_changed(self, unit: _Unit) -> bool:
        inode = unit.branch.inode
        with self._layer.lock:
            return inode.below != unit.below or self._layer.state.path(inode) is None

    def missing(self) -> dict[str, list[str]]:
        """What units that are quiet lack, by path."""
        return {os.fsdecode(unit.branch.path): list(unit.missing) for unit in self._units.values() if unit.missing}

    def given_up(self) -> list[str]:
        """Which directories were not sealed as they were captured, and why; until they are sealed or removed."""
        with self._layer.lock:
            return [text for number, text in self._given_up.items() if number in self._layer.state.own]

    def publish_pending(self) -> None:
        """Publish all that was captured. Tries all, then raises the first error."""
        self._publish_pending()

    def close(self, clean: bool = True) -> None:
        """Publish what waits; at a clean end, seal what is left too, as `incomplete` where something is missing.

        Tries all, then raises the first error.
        """
        failure: MoonclipError | None = None
        try:
            self.publish_pending()
            units = open_units(self._layer) if clean and self._seal_after is not None else []
        except MoonclipError as error:
            failure, units = error, []
        for branch in units:
            try:
                self._seal_at_end(branch)
            except MoonclipError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _seal_at_end(self, branch: LayerBranch) -> None:
        with self._layer.lock:
            wanted = has_new_contents(branch.inode) and not open_for_writing(branch.inode)
        if wanted:
            self._require_staged(branch.inode)
            missing = what_is_missing(self._layer, branch.path, branch.inode)
            self._seal_unit(branch, incomplete=bool(missing))

    def _look(self, now: float) -> None:
        """Find the units with changes, unless there can be no others than at the last look."""
        counter = self._layer.counter
        if counter == self._looked_at or now < self._next_look:
            return
        began, after = time.monotonic(), self._seal_after or 0.0
        seen: dict[int, _Unit] = {}
        for branch in open_units(self._layer):
            known, below = self._units.get(branch.inode.number), branch.inode.below
            if known is None or known.below != below:
                known = _Unit(branch, below, now + after)
            known.branch = branch
            seen[branch.inode.number] = known
        self._units, self._looked_at = seen, counter
        self._next_look = now + _WALK_SHARE * (time.monotonic() - began)

    def _try(self, unit: _Unit, now: float) -> None:
        """Seal a unit that was quiet, if it is whole."""
        unit.next_try = now + limits.RETRY_SECONDS
        branch = unit.branch
        with self._layer.lock:
            writers = open_for_writing(branch.inode)
            if not branch.inode.links or branch.inode.below != unit.below:
                return  # the next look sees it
            if not has_new_contents(branch.inode):
                unit.missing = ()
                return
        if writers:
            unit.missing = (f"{len(writers)} files are open for writing",)
            unit.next_try = now + min(limits.RETRY_SECONDS, self._seal_after or 0.0)
            return
        self._require_staged(branch.inode)
        unit.missing = tuple(what_is_missing(self._layer, branch.path, branch.inode))
        if not unit.missing:
            self._seal_unit(branch)

    def _seal_unit(self, branch: LayerBranch, *, incomplete: bool = False) -> None:
        # Nobody waits, so that all is encoded in the background's own time before.
        staged = self._staged(branch.inode)
        if staged:
            self._encoder.drain(staged, urgent=False)
        metadata = self._metadata(branch.inode, {}, automatic=True, incomplete=incomplete)
        capture = self._layer.captures.take(branch.inode, metadata)
        version = self._publish_one(capture)
        if version is not None:
            self._forget_old(version)

    def _forget_old(self, version: Version) -> None:
        """Of the automatic versions of a name, keep the last ones only; all, while a damaged overlay may need any."""
        names = self._layer.store.names()
        try:
            held = pinned_versions(self._layer.store.path, names)
        except CorruptError as error:
            log.warning("%s: its older versions are kept: %s", version.path, error)
            return
        kept = [
            one
            for one in names.versions(version.path)
            if (key := (one.path, one.number)) not in names.pins() and key not in held
        ]
        automatic = [one.number for one in kept if one.metadata.get("automatic") and not one.removed]
        if old := automatic[: -self._keep]:
            try:
                self._layer.store.log.forget([(version.path, number) for number in old])
            except (NotFoundError, UsageError):
                return  # another process forgot or pinned one; what it left is for the next seal

    # Publishing

    def _drain(self, capture: Capture) -> None:
        """Encode with all cores what the capture needs; what has changed since is encoded when it is published."""
        with self._layer.lock:
            numbers = {entry.inode for entry in capture.tree.walk() if entry.parts}
            inodes = [inode for number in numbers if (inode := self._layer.state.own.get(number)) is not None]
        if inodes:
            self._encoder.drain(inodes)

    def _publish_one(self, capture: Capture) -> Version | None:
        """Publish a capture, unless another thread did; returns its version. Raises as `_publish_or_give_up`."""
        self._publish_pending(until=capture.number)
        if capture.number not in self._published and (why := self._given_up.get(capture.directory)):
            raise StagingLostError(why)  # another thread found it so
        return self._published.pop(capture.number, None)

    def _publish_pending(self, until: int | None = None) -> None:
        """Publish captures, all or one and those of the same directory before it, in their order.

        One that fails keeps back the later ones of its directory only; one whose staged bytes are lost is given up.
        Raises the first error in the end.
        """
        failed: dict[int, MoonclipError] = {}
        with self._publishing:
            pending = self._layer.captures.pending()
            wanted = [capture for capture in pending if until is None or capture.number == until]
            directories = {capture.directory for capture in wanted}
            for capture in pending:
                if capture.directory not in directories or (until is not None and capture.number > until):
                    continue
                if capture.directory in failed:
                    continue
                try:
                    self.before_publish(capture)
                    version = self._publish_or_give_up(capture)
                    self._published[capture.number] = version
                    while len(self._published) > limits.PUBLISHED_CAPTURES:
                        self._published.popitem(last=False)
                except StagingLostError:
                    if capture.number == until:
                        raise  # somebody waits for it; those before it are done
                except MoonclipError as error:
                    failed[capture.directory] = error
        if failed:
            raise next(iter(failed.values()))

    def _publish_or_give_up(self, capture: Capture) -> Version | None:
        """Raises StagingLostError when a capture was given up since its staged bytes are lost; else as `_publish`."""
        try:
            version = self._publish(capture)
        except MoonclipError as error:
            with self._layer.lock:
                tree = resolved(self._layer, capture.tree, capture.counter)
            lost = next(lost_of_capture(capture, tree), None)
            if lost is None:
                raise
            file, why = lost
            text = f"/{os.fsdecode(capture.path)} was not sealed as it was: {os.fsdecode(file)}: {why}"
            self._layer.captures.give_up(capture)
            self._given_up[capture.directory] = text
            log.error("%s; its next seal takes it as it is then", text)
            raise StagingLostError(text) from error
        self._given_up.pop(capture.directory, None)
        return version

    def _publish(self, capture: Capture) -> Version | None:
        layer = self._layer
        with layer.naming():
            with layer.lock:
                request = self._request(capture)
            answer = self._encoder.call("publish", **request)

            def settle(names: Names) -> None:
                self._settle(capture, answer)
                self._place(capture, _version(names, answer["sequence"]))

            layer.adopt_newest(time.time_ns(), settle)
            layer.follow()
            return _version(layer.store.log.names, answer["sequence"])

    def _path(self, capture: Capture) -> bytes | None:
        """Where the captured directory is now; None when it is gone."""
        directory = self._layer.state.own.get(capture.directory)
        return None if directory is None else self._layer.state.path(directory)

    def _request(self, capture: Capture) -> dict[str, Any]:
        """What `publishing.publish` is to do, and where. Under the lock."""
        path = self._path(capture)
        return {
            "path": capture.path if path is None else path,
            "tree": encode_tree(resolved(self._layer, capture.tree, capture.counter)),
            "staged": staged_paths(capture.pinned),
            "metadata": json.dumps({**capture.metadata, "capture": f"{self._layer.id.hex()}.{capture.number}"}),
            "base": capture.base if capture.base != NO_ID else capture.tree.child,
            "gone": path is None,
        }

    def _settle(self, capture: Capture, answer: Mapping[str, Any]) -> None:
        """Journal what became of a capture. Under the lock."""
        layer = self._layer
        record = Sealed(
            capture.number, answer["path"], answer["number"], answer["sequence"], answer["root"],
            tuple((number, object_id) for number, object_id in answer["directories"]), answer["ours"],
            answer["attributes"],
        )  # fmt: skip
        refs = [(Kind.DIRECTORY, answer["root"]), (Kind.DIRECTORY, answer["ours"])]
        refs += [(Kind.DIRECTORY, object_id) for _, object_id in answer["directories"]]
        before = {entry.inode: entry.child for entry in capture.tree.walk()}
        for number, freeze, recipe, size in answer["files"]:
            inode = layer.state.own.get(number)
            if inode is not None:
                layer.files.jobs.encoded(inode, freeze, before[number], recipe, size)
        layer.record(record, refs)
        directory = layer.state.own.get(capture.directory)
        if directory is not None:
            layer.captures.show_foreign(directory, list(answer["foreign"]))

    def _place(self, capture: Capture, version: Version | None) -> None:
        """Where the directory was renamed or removed while it was published, its name goes along. Under the lock."""
        if version is not None and not version.removed:
            self._layer.place_version(version, self._layer.state.own.get(capture.directory))


def _version(names: Names, sequence: int) -> Version | None:
    return next((one for one in names.all_versions() if one.sequence == sequence), None)


def note_writer(layer: Layer, inode: Inode, pid: int) -> None:
    """Process `pid` opened a file of a layer for writing: it is told in the log when that is sealed. Never fails."""
    with layer.lock:
        parent = next(iter(inode.links), None)
    if parent is not None:
        layer.captures.writers.note(parent[0], pid)
