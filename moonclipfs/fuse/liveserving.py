"""A mount that can be written to, at work: its layer is opened before it, and what was written is stored behind it."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from moonclipfs.errors import BusyError
from moonclipfs.fuse.control import ControlServer, Verb
from moonclipfs.fuse.liverefresh import LiveRefresher
from moonclipfs.fuse.mounts import all_mounts
from moonclipfs.fuse.overlaying import MountedOverlays
from moonclipfs.fuse.prepare import MountOptions
from moonclipfs.fuse.serving import Server
from moonclipfs.fuse.writing import LiveOperations
from moonclipfs.layers.live import Live, LiveOptions, default_layer
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.layerdirs import DIRECTORY, layer_holder

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.0
"""How long the last answers to commands may take to leave."""


class LiveServer(Server):
    """The parts of a mount that can be written to."""

    def set_up(self, options: MountOptions) -> None:
        """Open the layer. Raises BusyError when another process has it."""
        how = LiveOptions(
            layer=options.layer,
            staging=options.staging,
            staging_limit=options.staging_limit,
            seal_after=options.seal_after,
            keep_versions=options.keep_versions,
            keep_deleted=options.keep_deleted,
            dry_run=options.dry_run,
        )
        try:
            self.live = Live(self.store, how, mountpoint=self.place)
        except BusyError as error:
            layer = options.layer or default_layer()
            detached = detached_holder(self.store.path / DIRECTORY / layer)
            if detached is None:
                raise
            raise BusyError(f"layer {layer} is in use by {detached}, or take another with `--layer NAME`") from error
        self._ended = threading.Event()
        self._started = self._closed = False
        self.writing = LiveOperations(self.live, self.tree, self.holds, self.reads, self.store.path)
        self.operations = self.writing
        self.overlays = Overlays(self.store, live=self.live, mountpoint=self.place)
        self.mounted_overlays = MountedOverlays(self.overlays, self.writing)
        self.writing.overlays = self.mounted_overlays.directory
        self.writing.experts = self.mounted_overlays.experts
        self.refresher = LiveRefresher(self.store, self.writing, self.holds)
        verbs = {**self.live.verbs, **self.mounted_overlays.verbs}
        verbs |= {name: self._seen(verbs[name]) for name in ("seal", "overlay_commit")}
        self.verbs = {**verbs, "status": self.status, "ended": self.ended}

    def tasks(self) -> list[Callable[[], Awaitable[None]]]:
        """As of any mount, and what discards overlays."""
        return [*super().tasks(), self.mounted_overlays.run]

    async def answering(self) -> None:
        """Begin to encode and seal, unless the mount is gone again already."""
        if self._closed:
            return
        self._started = True
        await trio.to_thread.run_sync(self.live.start)

    async def stopping(self) -> None:
        """Let pages that programs changed in maps reach this process, and nobody wait for room any more."""
        self.writing.ending = True
        if self.is_there():
            await trio.to_thread.run_sync(sync_file_system, self.place)

    async def finish(self, control: ControlServer) -> None:
        """Store and seal what was written. The kernel is let go first: whoever waits for an answer gets none."""
        self.writing.ending = True
        await self.refresher.stop()
        self.unmount()
        self.writing.close_all()
        await trio.to_thread.run_sync(self.close)
        with trio.move_on_after(_ANSWER_SECONDS):
            await control.idle()

    def close(self) -> None:
        """Store and seal what was written, as far as that can be done. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        if not self._started:  # nobody could write
            self.live.encoder.stop()
            self.live.layer.close()
            return
        for end in (self.overlays.close, self.live.close):
            try:
                self.problems += end()
            except Exception as error:  # whoever unmounts is to know
                log.exception("closing the layers: unexpected error")
                self.problems.append(f"unexpected error: {error!r}")
        self.live.encoder.stop()
        self.live.layer.close()
        for problem in self.problems:
            log.error("not everything is stored, and stays staged: %s", problem)
        self._ended.set()

    def _seen(self, verb: Verb) -> Verb:
        """The same; whoever asked for a version finds it everywhere in the mount at once."""

        def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
            made = verb(request)
            trio.from_thread.run(self.refresher.look)
            return made

        return answer

    def status(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of the live layer, and of the overlays that are open here."""
        return {**self.live.status(), "overlays": [overlay.status() for overlay in self.overlays.opened()]}

    def ended(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        """For `umount`: answers when everything is stored, with what could not be."""
        self._ended.wait()
        return {"problems": self.problems}

    def stats(self) -> Mapping[str, Any]:
        """As of any mount, and what the layer has open."""
        writing = self.writing
        return {
            **super().stats(),
            "known": len(writing.layers.known),
            "open_files": len(writing.open_files),
            "open_directories": len(writing.open_directories),
        }


def detached_holder(layer: Path) -> str | None:
    """Who has a layer, and what to do, if that is a server of this host whose mount was unmounted already."""
    holder = layer_holder(layer) or {}
    pid, place = holder.get("pid"), holder.get("mountpoint")
    if not isinstance(pid, int) or not place or holder.get("host") != os.uname().nodename:
        return None
    try:
        if any(mount.is_ours and mount.mountpoint == place for mount in all_mounts(pid)):
            return None
    except OSError:  # it has just ended, or is of another user
        return None
    return (
        f"process {pid}, which serves what is still open of the mount that was unmounted at {place}, and ends when the "
        "last of it is closed and all is stored: wait for that"
    )


def sync_file_system(place: str) -> None:
    """Write back what the kernel has changed pages of. On a thread, while requests are served."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        log.info("cannot open %s to sync it: %s", place, error.strerror)
        return
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)
