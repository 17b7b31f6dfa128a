"""Overlays from Python: made, compared, committed and discarded, in a mount or without one.

with moonclipfs.create_overlay("/mnt/ckpt", "arm1", base="run1/checkpoint-500") as arm:
    train(arm.path)
    print(arm.diff()["tensors"])
    arm.commit("run1/arm1")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.overlayplaces import InStore, Place, base_spec, for_base, for_overlay, place_of

Where = str | os.PathLike[str]
"""A path in a mount, or the directory of a store."""


class Overlay:
    """One overlay. A context manager: at the end of the block it is let go of, as it is. Thread-safe.

    In a mount, it is there for every process. In a store that is not mounted, this process holds it until `close`.
    """

    def __init__(self, place: Place, name: str) -> None:
        """Use `create_overlay` or `overlay`."""
        self._place = place
        self._name = name

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name

    @property
    def path(self) -> Path | LayerPath:
        """Its directory: a real path in a mount; else one that this process alone can use, with what pathlib offers."""
        if not isinstance(self._place, InStore):
            return Path(self._place.path(self._name) or "")
        return LayerPath(self._place.overlays.get(self._name), label=f"{self._place.store}:@overlays/{self._name}")

    def status(self) -> Mapping[str, Any]:
        """By the keys of `moonclipfs overlay status --json`."""
        return self._ask("overlay_status")

    def diff(self) -> Mapping[str, Any]:
        """What it changed of its base, by the keys of `moonclipfs overlay diff --json`."""
        return self._ask("overlay_diff")

    def commit(self, name: str | None = None) -> str:
        """Make what it shows now the next version of a snapshot, by default of its own name; returns it as NAME@N.

        Makes nothing when the newest version is the same. Raises UsageError for a dry run.
        """
        answer = self._ask("overlay_commit", **{"as": name})
        return f"{answer['path']}@{answer['number']}"

    def flush(self) -> None:
        """Return when all that was written to it is encoded and durable. Raises what kept it from that."""
        self._ask("overlay_flush")

    def rename(self, name: str) -> None:
        """Call it otherwise. Raises ExistsError, UsageError."""
        self._ask("overlay_rename", new=name)
        self._name = name

    def rebase(self, onto: Where | None = None) -> list[Mapping[str, str]]:
        """Put it onto another base, by default the newest version of its own; returns the conflicts: path, what, and
        base, the path in a mount of what the base has there, if it has. Raises BusyError while its files are written.
        """
        base = None if onto is None else base_spec(onto, self._place.store)
        return list(self._ask("overlay_rebase", base=base)["conflicts"])

    def discard(self, *, force: bool = False) -> None:
        """Throw it away, with `force` though its files are open. Raises BusyError."""
        self._ask("overlay_discard", force=force)

    def close(self) -> None:
        """Let go of it, as it is. Harmless when repeated, and in a mount."""
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, verb: str, **arguments: Any) -> Mapping[str, Any]:
        return self._place.ask(verb, name=self._name, **arguments)


def create_overlay(
    where: Where, name: str, base: Where | None = None, *, quota: int | None = None, ephemeral: bool = False
) -> Overlay:
    """Make an overlay over `base` as it is now, or over nothing: NAME[@VERSION] of a snapshot, an overlay, or a path in
    the mount. `quota` is in bytes; an `ephemeral` one ends with its mount, or without one when it is closed.

    Raises ExistsError, NotFoundError, UsageError, BusyError.
    """
    place, _ = place_of(where)
    place = for_base(place, base)
    try:
        place.ask("overlay_create", name=name, base=base_spec(base, place.store), quota=quota, ephemeral=ephemeral)
        return Overlay(place, name)
    except BaseException:
        place.close()
        raise


def overlay(where: Where, name: str | None = None) -> Overlay:
    """The overlay of a name, or that in which the path `where` lies. Raises NotFoundError, UsageError, BusyError."""
    place, inside = place_of(where)
    wanted = name or inside
    if wanted is None:
        raise UsageError(f"{os.fspath(where)} lies in no overlay: say which with name=")
    place = for_overlay(place, wanted)
    try:
        if isinstance(place, InStore):
            place.overlays.get(wanted)
        else:
            place.ask("overlay_status", name=wanted)
        return Overlay(place, wanted)
    except BaseException:
        place.close()
        raise


def overlays(where: Where) -> list[Mapping[str, Any]]:
    """The overlays of a mount or store, by the keys of `moonclipfs overlay list --json`. Raises CorruptError."""
    place, _ = place_of(where)
    answer = place.ask("overlay_list")
    if answer["damaged"]:
        raise CorruptError("; ".join(answer["damaged"]))
    return [{**one, "path": place.path(one["name"])} for one in answer["overlays"]]
