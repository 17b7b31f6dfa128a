"""Where overlays are asked for: in the mount that has them, else in the store itself. The answers are the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.fuse.control import ask
from moonclipfs.fuse.inside import Inside, inside_mount
from moonclipfs.fuse.mounts import Mount, mount_at
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlays import Overlays
from moonclipfs.layers.overlayverbs import listed, verbs
from moonclipfs.store.layerdirs import DIRECTORY as LAYERS
from moonclipfs.store.layerdirs import layer_holder
from moonclipfs.store.overlaydirs import find_overlay
from moonclipfs.store.store import Store
from moonclipfs.store.target import OVERLAYS, default_store, is_store, mounted, parse_target


class Place(Protocol):
    """Where overlays are asked for. `store` is the directory of the store."""

    store: Path

    def ask(self, verb: str, /, **arguments: Any) -> Mapping[str, Any]:
        """Call a verb of `layers/overlayverbs.py`, and return its answer. Raises its errors."""

    def path(self, name: str) -> str | None:
        """Where an overlay is seen; None where only this process can use it."""

    def close(self) -> None:
        """Let go of what was opened. Harmless when repeated."""


class InMount:
    """The overlays of a mount that can be written to."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount
        self.store = Path(mount.store)

    def ask(self, verb: str, /, **arguments: Any) -> Mapping[str, Any]:
        """Ask the server of the mount, for as long as it takes."""
        return ask(self.mount.mountpoint, verb, None, **arguments)

    def path(self, name: str) -> str:
        """The directory of an overlay."""
        return os.path.join(self.mount.mountpoint, OVERLAYS, name)

    def close(self) -> None:
        """Nothing was opened."""


class InStore:
    """The overlays of a store, which this process opens. A context manager."""

    def __init__(self, store: Path | Store) -> None:
        """A store that is open for writing is left so."""
        self.store = store.path if isinstance(store, Store) else store
        self._given = store if isinstance(store, Store) else None
        self._opened: Store | None = None
        self._overlays: Overlays | None = None

    @property
    def overlays(self) -> Overlays:
        """Those that are open here; the store is opened for it."""
        if self._overlays is None:
            store = self._given
            if store is None:
                store = self._opened = Store.open(self.store, write=True, purpose="overlays")
            try:
                self._overlays = Overlays(store)
            except BaseException:
                self.close()
                raise
        return self._overlays

    def ask(self, verb: str, /, **arguments: Any) -> Mapping[str, Any]:
        """Call a verb in this process; listing opens nothing, and works in a store that can only be read."""
        if verb == "overlay_list":
            return listed(self.store)
        return verbs(self.overlays)[verb](arguments)

    def opened(self) -> list[Overlay]:
        """The overlays that are open here."""
        return [] if self._overlays is None else self._overlays.opened()

    def path(self, name: str) -> None:
        """None: nobody sees it."""

    def close(self) -> None:
        """Let go of all. Raises nothing: overlays at rest have nothing to lose."""
        if self._overlays is not None:
            self._overlays.close()
            self._overlays = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def place_of(where: str | os.PathLike[str]) -> tuple[InMount | InStore, str | None]:
    """The place that a path in a mount or the directory of a store means, and the overlay that the path lies in, if it
    does. A mount that only reads stands for its store.

    Raises NotFoundError, FormatVersionError, and UsageError for a snapshot.
    """
    text = os.fspath(where)
    inside = inside_mount(text)
    if inside is not None:
        if inside.mount.writable:
            return InMount(inside.mount), inside.overlay
        return InStore(default_store(inside.mount.store)), inside.overlay
    target = parse_target(text)
    if target.spec:
        raise UsageError(f"{text} is a snapshot: name a mount or a store, which has overlays")
    return InStore(target.store), None


def for_overlay(place: InMount | InStore, name: str) -> InMount | InStore:
    """Where an overlay is asked for: in the mount that has it open, if it is seen here. Raises NotFoundError."""
    if isinstance(place, InMount):
        return place
    try:
        info = find_overlay(place.store, name)
    except CorruptError:
        return place  # a damaged one can be discarded there, and whoever wants more of it is told
    holder = layer_holder(place.store / LAYERS / info.layer) or {}
    mountpoint = holder.get("mountpoint")
    mount = mount_at(mountpoint) if isinstance(mountpoint, str) and mountpoint else None
    if mount is None or not mount.is_ours or not mount.writable or not _same(mount.store, place.store):
        return place
    return InMount(mount)


def for_base(place: InMount | InStore, base: str | os.PathLike[str] | None) -> InMount | InStore:
    """Where an overlay on `base` is made: what is live in a mount is known there only."""
    inside = inside_mount(os.fspath(base)) if base is not None and isinstance(place, InStore) else None
    if (
        inside is None
        or inside.path.startswith("@versions/")
        or _sealed(inside)
        or not inside.mount.writable
        or not _same(inside.mount.store, place.store)
    ):
        return place
    return InMount(inside.mount)


def base_spec(base: str | os.PathLike[str] | None, store: Path) -> str:
    """What an overlay is to stand on, as `Overlays.base_of` understands it: a path in a mount of `store`, STORE:NAME
    [@VERSION], the name of a snapshot or of an overlay; nothing for None. Raises UsageError for anything else.
    """
    if base is None:
        return ""
    text = os.fspath(base)
    looks_like_path = text.startswith(("/", "./", "../")) or text in (".", "..")
    inside = inside_mount(text) if looks_like_path or os.path.lexists(text) else None
    if inside is not None:
        if not _same(inside.mount.store, store):
            raise UsageError(f"{text} is in a mount of {inside.mount.store}, not of {store}")
        return _sealed(inside) or _spec_inside(inside.path)
    if looks_like_path and ":" not in text and not is_store(text):
        raise UsageError(f"{text} is in no mount: store it with `moonclipfs add`, and name the snapshot")
    target = parse_target(text, store)
    if not _same(target.store, store):
        raise UsageError(f"{text} is in another store than {store}: a base is in the same one")
    if not target.spec:
        raise UsageError(f"{text} is a whole store: name a snapshot in it")
    return target.spec


def _sealed(inside: Inside) -> str | None:
    """The version that a directory of a mount shows as it is, None when it is not the whole of one."""
    if inside.path.startswith("@"):
        return None
    found = mounted(os.path.join(inside.mount.mountpoint, inside.path))
    name, _, number = ("" if found is None else found.spec).rpartition("@")
    return f"{name}@{number}" if name == inside.path and number.isdigit() else None


def _spec_inside(path: str) -> str:
    """A path below a mountpoint: what stands in @versions is that version, what is live is captured."""
    if path.startswith("@versions/"):
        name, _, number = path.removeprefix("@versions/").rpartition("/")
        if not name or not number.isdigit():
            raise UsageError(f"{path} is no version: name one, as @versions/NAME/1")
        return f"{name}@{number}"
    if path.startswith(OVERLAYS + "/") or not path.startswith("@"):
        return path if path.startswith("@") else "/" + path
    raise UsageError(f"{path} cannot be a base: name a snapshot, an overlay or a directory")


def _same(left: str | Path, right: str | Path) -> bool:
    return os.path.realpath(left) == os.path.realpath(right)
