"""The overlays of a mount: those that are open, what the kernel knows of them, and how they come and go meanwhile.

Requests find an open overlay here. What is asked at the control socket is done here too, and the kernel told of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyfuse3
import trio

from moonclipfs import limits
from moonclipfs.errors import BusyError, NotFoundError, UsageError
from moonclipfs.fuse.control import Verb
from moonclipfs.fuse.expertserving import (
    EXPERTS_OVERLAYS_NUMBER,
    ExpertsOfOverlays,
    ServedExpertNames,
    ServedWithExperts,
)
from moonclipfs.fuse.filewriting import FileOperations
from moonclipfs.fuse.overlaydir import OVERLAYS_NAME, OVERLAYS_NUMBER, ServedNames
from moonclipfs.fuse.refresh import invalidate
from moonclipfs.layers.arguments import argument
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlays import Overlays
from moonclipfs.layers.overlayverbs import verbs
from moonclipfs.store.overlaydirs import DIRECTORY

log = logging.getLogger(__name__)
T = TypeVar("T")

_CLOSING_SECONDS = 1.0
"""How long what a program has closed just before may take to be closed here."""
_POLL_SECONDS = 0.02
_CROWDED_SHARE = 0.75
"""When so many overlays are open, of all that may be, some that nobody uses are closed."""


class ServedOverlay(ServedWithExperts):
    """An open overlay, as requests need it."""

    def __init__(self, overlay: Overlay) -> None:
        super().__init__(overlay.layer, overlay.encoder, overlay.make_room)
        self.overlay = overlay
        self._epoch = object()
        self.renamed()

    @property
    def epoch(self) -> object:
        """Another one since the overlay was rebased."""
        return self._epoch

    def renamed(self) -> None:
        """The overlay is called otherwise."""
        self.place = OVERLAYS_NAME + b"/" + os.fsencode(self.overlay.name)

    def rebased(self) -> None:
        """Names of the overlay mean something else."""
        self._epoch = object()


class MountedOverlays:
    """The overlays that a mount has open. But for `by_name` and `by_root`, all may block: it is for worker threads.

    A mount that keeps nothing has those only that were made in it, and they end with it.
    """

    def __init__(self, overlays: Overlays, operations: FileOperations) -> None:
        self._overlays = overlays
        self._operations = operations
        self._dry = operations.live.dry_run
        self._directory = os.fsencode(overlays.store.path / DIRECTORY)
        self._lock = threading.Lock()
        """Of the two below, when they change."""
        self.by_name: dict[bytes, ServedOverlay] = {}
        self.by_root: dict[int, ServedOverlay] = {}
        """By the numbers of their roots."""
        self.directory = ServedNames(self, operations.live)
        self.experts = ServedExpertNames(ExpertsOfOverlays(self), operations.live)
        self._changed: set[str] = set()
        """Names of which the kernel may know something else."""
        self._dropped: list[int] = []
        """Numbers of files that are open in overlays that are gone."""
        self._owners, self._new_owners = trio.open_memory_channel[tuple[int, str]](limits.OVERLAYS_OPEN)
        self._crowded = trio.Event()
        """Many are open."""
        self._clearing = threading.Lock()
        self._rounds = 0
        """How often room was made."""
        overlays.on_change = self._has_changed

    # For requests: the kernel knows by itself what it has asked for

    def names(self) -> list[str]:
        """Of all overlays of the store, or of this mount."""
        if not self._dry:
            return self._overlays.names()
        return sorted(overlay.name for overlay in self._overlays.opened() if overlay.info.ephemeral)

    def opened(self, name: bytes) -> ServedOverlay | None:
        """An overlay, opened unless it is; None where there is none. Raises BusyError, CorruptError, BackendError."""
        found = self.by_name.get(name)
        if found is not None and not found.gone:
            return found
        if self._dry and os.fsdecode(name) not in self.names():
            return None
        if not os.path.lexists(os.path.join(self._directory, name)):  # else it would wait for others that come and go
            return None
        try:
            served = self._serve(self._overlays.get(os.fsdecode(name)))
        except (NotFoundError, UsageError):
            return None
        if served.overlay.closed:  # for want of room, just then
            self._remove(served)
            return self.opened(name)
        if len(self.by_name) > limits.OVERLAYS_OPEN * _CROWDED_SHARE:
            self._on_loop(self._crowded.set)
        return served

    def make(self, name: str) -> ServedOverlay:
        """Make an empty overlay. Raises ExistsError, UsageError, TooManyOpenError."""
        self._overlays.create(name, ephemeral=self._dry, dry_run=self._dry)
        served = self.opened(os.fsencode(name))
        if served is None:
            raise NotFoundError(f"overlay {name} was discarded just after it was made")
        return served

    def rename(self, old: str, new: str) -> None:
        """Call an overlay otherwise. Raises NotFoundError, ExistsError, UsageError, BusyError."""
        self._overlays.rename(old, new)

    def discard(self, name: str, force: bool = False) -> None:
        """Throw an overlay away. One that files are open in is kept, unless by `force`: whoever uses these gets ESTALE
        from then on. Raises NotFoundError, BusyError.
        """
        served = self.by_name.get(os.fsencode(name))
        if served is not None:
            deadline = time.monotonic() + (0.0 if force else _CLOSING_SECONDS)
            while (using := self._on_loop(self._let_go, served, force)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if using:
                raise BusyError(_in_use(name, using))
        self._overlays.discard(name)

    def _let_go(self, served: ServedOverlay, force: bool) -> list[str]:
        """On the event loop: the files that are open in an overlay. If there are none, or by `force`, no request gets
        at the overlay any more.
        """
        operations = self._operations
        files = [handle for handle in operations.open_files.values() if handle.served in (served, served.experts)]
        if files and not force:
            return [handle.place for handle in files]
        self._drop(served)
        return []

    def _drop(self, served: ServedOverlay) -> None:
        """On the event loop: no request gets at an overlay any more. Pages of open files are to be forgotten, too."""
        operations, experts = self._operations, served.experts
        files = operations.open_files.values()
        self._dropped += [handle.inode.number for handle in files if handle.served in (served, experts)]
        operations.layers.drop(served)
        if experts is not None:
            operations.layers.drop(experts)
            experts.experts.let_go()

    def _remove(self, served: ServedOverlay) -> None:
        """Nobody finds it any more."""
        served.gone = True
        name, number = os.fsencode(served.overlay.name), served.layer.root.number
        with self._lock:
            if self.by_name.get(name) is served:
                del self.by_name[name]
            if self.by_root.get(number) is served:
                del self.by_root[number]

    def make_room(self) -> None:
        """Let go of overlays that nobody uses, the ones that were opened first: the kernel is asked to forget them.

        Not for requests about names in `@overlays`, during which the kernel cannot forget any.
        """
        if len(self.by_name) <= limits.OVERLAYS_OPEN // 2:
            return
        round_ = self._rounds
        with self._clearing:
            if self._rounds != round_:
                return  # somebody else has made what room there was meanwhile
            self._rounds += 1
            idle = self._on_loop(self._unused)
            names = [os.fsencode(served.overlay.name) for served in idle]
            invalidate([(number, name) for number in (OVERLAYS_NUMBER, EXPERTS_OVERLAYS_NUMBER) for name in names])
            deadline = time.monotonic() + _CLOSING_SECONDS
            while not (ready := self._on_loop(self._forgotten, idle)) and idle and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            for served in ready:
                if not self._overlays.release(served.overlay):
                    continue  # somebody commits it
                self._remove(served)
                again = self.by_name.get(os.fsencode(served.overlay.name))
                if (
                    again is not None and again.overlay is served.overlay
                ):  # somebody came just then: the kernel asks anew
                    self._on_loop(self._drop, again)
                    self._remove(again)

    def _unused(self) -> list[ServedOverlay]:
        """On the event loop: some overlays in which nothing is open. Ephemeral ones would end, and so would files that
        wait to become experts.
        """
        operations = self._operations
        busy = {file.served for file in operations.open_files.values()}
        busy |= {directory.served for directory in operations.open_directories.values()}
        idle = [
            one
            for one in list(self.by_name.values())  # which other threads change
            if not ({one, one.experts} & busy or one.overlay.info.ephemeral or one.is_waited_for)
        ]
        return idle[: limits.OVERLAYS_OPEN // 8]

    def _forgotten(self, idle: list[ServedOverlay]) -> list[ServedOverlay]:
        """On the event loop: those of which the kernel knows nothing any more; no request gets at them from here on."""
        known = set(self._operations.layers.beside.values())
        ready = [served for served in idle if not {served, served.experts} & known]
        for served in ready:
            self._drop(served)
        return ready

    def _serve(self, overlay: Overlay) -> ServedOverlay:
        with self._lock:
            found = self.by_root.get(overlay.layer.root.number)
            if found is None or found.overlay is not overlay or found.gone:  # it could not be discarded
                found = ServedOverlay(overlay)
                self.by_root[overlay.layer.root.number] = found
                self.by_name[os.fsencode(overlay.name)] = found
            return found

    def _has_changed(self, name: str) -> None:
        """A name came, went, or leads to something else."""
        with self._lock:
            self._changed.add(name)
            served = self.by_name.get(os.fsencode(name))
            if served is None:
                return
            there = {overlay.name: overlay for overlay in self._overlays.opened()}
            if there.get(name) is served.overlay:
                served.rebased()
                return
            del self.by_name[os.fsencode(name)]
            if there.get(served.overlay.name) is served.overlay:
                served.renamed()
                self.by_name[os.fsencode(served.overlay.name)] = served
                return
            self.by_root.pop(served.layer.root.number, None)
        self._on_loop(self._drop, served)

    # For commands

    @property
    def verbs(self) -> Mapping[str, Verb]:
        """What the control socket of the mount offers: the kernel is told of what was done before that is answered."""
        offered = verbs(self._overlays)
        create = self._create_verb(offered["overlay_create"])
        rebase = self._rebase_verb(offered["overlay_rebase"])
        own = {**offered, "overlay_create": create, "overlay_discard": self._discard_verb, "overlay_rebase": rebase}
        return {name: self._telling(verb, needs=self._dry and verb is not create) for name, verb in own.items()}

    def _telling(self, verb: Verb, *, needs: bool) -> Verb:
        """`needs` restricts it to the overlays of this mount."""

        def told(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            name = arguments.get("name")
            if needs and name is not None and name not in self.names():
                raise NotFoundError(f"no overlay {name} was made in this mount, which is a dry run and has no others")
            try:
                return verb(arguments)
            finally:
                self.tell()

        return told

    def _create_verb(self, create: Verb) -> Verb:
        def created(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            if self._dry:
                dry_run = not argument(arguments, "committable", bool, False)  # whoever made the mount may ask for it
                arguments = {**arguments, "ephemeral": True, "dry_run": dry_run}
            owner = arguments.get("owner")
            if not arguments.get("ephemeral") or not isinstance(owner, dict) or "pid" not in owner:
                return create(arguments)
            descriptor = _open_process(owner["pid"])
            try:
                answer = create(arguments)
            except BaseException:
                os.close(descriptor)
                raise
            layer = self._overlays.get(argument(arguments, "name", str)).info.layer
            self._on_loop(self._owners.send_nowait, (descriptor, layer))
            return answer

        return created

    def _discard_verb(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self.discard(argument(arguments, "name", str), argument(arguments, "force", bool, False))
        return {}

    def _rebase_verb(self, rebase: Verb) -> Verb:
        def rebased(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            served = self.by_name.get(os.fsencode(argument(arguments, "name", str)))
            # What is in use keeps its name in the kernel, and has none in the overlay afterwards.
            names, _ = ([], []) if served is None else self._on_loop(self._known, [served])
            try:
                return rebase(arguments)
            finally:
                invalidate(names)

        return rebased

    def tell(self) -> None:
        """Make the kernel forget what names of overlays meant before they changed, and what it knows below them."""
        with self._lock:
            changed, self._changed = self._changed, set()
            below = [self.by_name[name] for name in map(os.fsencode, changed) if name in self.by_name]
        names, files = self._on_loop(self._known, below)
        for number in (OVERLAYS_NUMBER, EXPERTS_OVERLAYS_NUMBER):
            names += [(number, os.fsencode(name)) for name in changed]
        if names or files:
            invalidate(names, files)

    def _known(self, below: list[ServedOverlay]) -> tuple[list[tuple[int, bytes]], list[int]]:
        """On the event loop: the names and files that the kernel knows in overlays, and the files of those that are
        gone, which are asked for once.
        """
        names: list[tuple[int, bytes]] = []
        files, self._dropped = self._dropped, []
        for overlay in below:
            for served in filter(None, (overlay, overlay.experts)):
                for inode in self._operations.layers.known_of(served):
                    names += [(parent.number, name) for parent, name in served.links(inode)]
                    files += [inode.number] if inode.is_file else []
        return names, files

    # The ends of owners

    async def run(self) -> None:
        """Discard the overlays of processes when these end, and keep few open, for as long as the mount lives."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_few_open)
            async for descriptor, layer in self._new_owners:
                nursery.start_soon(self._await_end, descriptor, layer)

    async def _keep_few_open(self) -> None:
        while True:
            await self._crowded.wait()
            self._crowded = trio.Event()
            try:
                await trio.to_thread.run_sync(self.make_room)
            except Exception:  # which must not end the mount
                log.exception("overlays that nobody uses stay open")

    async def _await_end(self, descriptor: int, layer: str) -> None:
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        await trio.to_thread.run_sync(self._end, layer)

    def _end(self, layer: str) -> None:
        """Discard the overlay of a layer, whatever it is called by now."""
        for name in [overlay.name for overlay in self._overlays.opened() if overlay.info.layer == layer]:
            try:
                self.discard(name, force=True)
                log.info("overlay %s is discarded: its process has ended", name)
            except Exception:  # which must not end the mount
                log.exception("overlay %s, whose process has ended, cannot be discarded", name)
        self.tell()

    def _on_loop(self, work: Callable[..., T], *args: Any) -> T:
        return trio.from_thread.run_sync(work, *args, trio_token=pyfuse3.trio_token)


def _open_process(pid: object) -> int:
    """A descriptor that is readable when a process has ended. Raises NotFoundError, UsageError."""
    if not isinstance(pid, int) or isinstance(pid, bool):
        raise UsageError(f"the number of a process is needed, not {pid!r}")
    try:
        return os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError, ValueError) as error:
        raise NotFoundError(f"no process {pid}: an overlay of a process lives as long as that") from error


def _in_use(name: str, places: list[str]) -> str:
    lines = [f"overlay {name} is in use; close these, or discard it with --force:"]
    lines += [f"  {place}" for place in places[: limits.HOLDERS_NAMED]]
    if len(places) > limits.HOLDERS_NAMED:
        lines.append(f"  and {len(places) - limits.HOLDERS_NAMED} more")
    return "\n".join(lines)
