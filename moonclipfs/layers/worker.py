"""The encoder process: it turns staged files into objects, and does other work that writes to the store.

Files of one batch share an ingest, and so packs and their fsyncs. The ingest keeps what it refers to from gc until the
mount, which was told that the batch is durable, has journalled that.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import BusyError, CorruptError, MoonclipError, UsageError
from moonclipfs.layers import priority
from moonclipfs.layers.records import PART_RECIPE
from moonclipfs.layers.stagedsource import StagedSource, kept_parts
from moonclipfs.layers.wire import Channel, error_fields
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.ingest import worker_count
from moonclipfs.store.publish import Ingest
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Kind, ObjectId

log = logging.getLogger(__name__)

OPERATIONS: Mapping[str, str] = {
    "publish": "moonclipfs.layers.publishing:publish",
    "reclaim": "moonclipfs.layers.reclaim:reclaim",
    "capture": "moonclipfs.layers.committing:capture",
    "commit": "moonclipfs.layers.committing:commit",
}
"""What a mount may ask for by `Encoder.call`: module and function, called with the store and the arguments."""

_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0


class Worker:
    """Serves one mount until it hangs up. `run` is called on the main thread, which is never made polite."""

    def __init__(self, store: Store, channel: Channel, operations: Mapping[str, str] = OPERATIONS) -> None:
        self._store = store
        self._channel = channel
        self._operations = operations
        self._pools: dict[bool, ThreadPoolExecutor] = {}
        self._ingest: Ingest | None = None
        self._roots: list[tuple[Kind, ObjectId]] = []
        self._urgent = False
        self._stopping = False
        self._busy: set[threading.Thread] = set()
        self._trouble = ""

    def run(self) -> bool:
        """Serve. Returns False when work that does not end is still under way: then the process has to be left."""
        looked = time.monotonic()
        while True:
            readable, _, _ = select.select([self._channel], [], [], _LOOK_SECONDS)
            if time.monotonic() - looked >= _LOOK_SECONDS:
                self._look()
                looked = time.monotonic()
            if not readable:
                continue
            message = self._channel.receive()
            if message is None:
                return self._end()
            self._serve(message)

    def _serve(self, message: Mapping[str, Any]) -> None:
        op = message["op"]
        if "urgent" in message:
            self._set_urgent(message["urgent"])
        if op == "urgent":
            return
        work: Callable[[Mapping[str, Any]], Mapping[str, Any]] = getattr(self, f"_do_{op}")
        polite = message["polite"] if op == "call" else not self._urgent
        # Each request has a new thread: one that was made polite stays so.
        thread = threading.Thread(target=self._answer, args=(work, message, polite), name=op, daemon=True)
        self._busy = {one for one in self._busy if one.is_alive()} | {thread}
        thread.start()

    def _answer(
        self, work: Callable[[Mapping[str, Any]], Mapping[str, Any]], message: Mapping[str, Any], polite: bool
    ) -> None:
        if polite:
            priority.yield_to_others()
        try:
            answer = work(message)
        except Exception as error:
            if not isinstance(error, MoonclipError):
                log.exception("%s failed by an unexpected error", message["op"])
            answer = error_fields(error)
        try:
            self._channel.send({"id": message["id"], **answer})
        except OSError:
            return  # the mount is gone, which the main thread sees
        except MoonclipError as error:
            self._channel.send({"id": message["id"], **error_fields(error)})

    def _set_urgent(self, urgent: bool) -> None:
        if urgent not in self._pools:
            count = worker_count(1.0 if urgent else limits.ENCODE_CORE_SHARE)
            self._pools[urgent] = priority.thread_pool(count, "encode", polite=not urgent)
        if urgent != self._urgent:
            priority.set_group(polite=not urgent)
        self._urgent = urgent
        ingest = self._ingest
        if ingest is not None:
            ingest.use_pool(self._pools[urgent])

    # Requests; each runs on a thread of its own, and those of encoding come one after the other.

    def _do_encode(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Encode files: for each (number, recipe, size), or (number, error, text)."""
        if self._ingest is None:
            self._ingest = self._store.ingest()
            self._ingest.use_pool(self._pools[self._urgent])
        results: list[tuple[object, ...]] = []
        for job in message["jobs"]:
            try:
                recipe, size = self._encode(self._ingest, job)
                self._roots.append((Kind.RECIPE, recipe))
                results.append((job["number"], recipe, size))
            except Exception as error:  # whatever it is, the other files are not to wait for this one
                if not isinstance(error, MoonclipError):
                    log.exception("%s: not encoded by an unexpected error", os.fsdecode(job["path"]))
                results.append((job["number"], *error_fields(error).values()))
        return {"results": results}

    def _encode(self, ingest: Ingest, job: Mapping[str, Any]) -> tuple[ObjectId, int]:
        before = self._file(job["recipe"])
        previous = before or self._hint(job["hint"])
        parts: Sequence[tuple[int, int, int, int]] = job["parts"]
        if before is None and any(kind == PART_RECIPE for _, _, kind, _ in parts):
            raise CorruptError(f"{os.fsdecode(job['path'])}: some of it comes from a recipe, but none is named")
        kept = kept_parts(self._store.config.cut, parts, before)
        source = StagedSource(job["size"], parts, job["data"], job["files"], before)
        try:
            recipe, size, _ = ingest.put_file(source, previous, self._check_stopping, kept)
        finally:
            source.close()
        return recipe, size

    def _file(self, recipe: ObjectId) -> FileReader | None:
        if recipe == NO_ID:
            return None
        return FileReader(self._store.objects, self._store.recipe_object(recipe))

    def _hint(self, recipe: ObjectId) -> FileReader | None:
        try:
            return self._file(recipe)
        except CorruptError as error:
            log.info("a file that may be like a new one cannot be read: %s", error)
            return None

    def _do_complete(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make what was encoded since the last batch durable. When that fails, it is forgotten."""
        if self._ingest is not None:
            try:
                self._ingest.complete(self._roots)
            except BaseException:
                self._drop()
                raise
        return {}

    def _do_release(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch was journalled: the journal keeps it from gc now."""
        self._drop()
        return {}

    def _do_call(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        target = self._operations.get(message["name"])
        if target is None:
            raise UsageError(f"the encoder process knows no operation {message['name']!r}")
        module, _, name = target.partition(":")
        return {"value": getattr(importlib.import_module(module), name)(self._store, message["arguments"])}

    def _drop(self) -> None:
        ingest, self._ingest = self._ingest, None
        self._roots.clear()
        if ingest is not None:
            ingest.close()

    def _check_stopping(self, _: int) -> None:
        if self._stopping:
            raise BusyError("the encoder process is ending")

    def _look(self) -> None:
        """Tell others that we have seen the log: they may wait for that before they delete something."""
        try:
            self._store.names()
            self._trouble = ""
        except MoonclipError as error:
            if str(error) != self._trouble:
                log.warning("the encoder process cannot read the log: %s", error)
            self._trouble = str(error)

    def _end(self) -> bool:
        self._stopping = True
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._busy:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._busy):
            return False
        self._drop()
        for pool in self._pools.values():
            pool.shutdown()
        return True
