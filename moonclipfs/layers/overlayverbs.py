"""What is asked of the overlays of a store, as JSON values: at the control socket of a mount, or by a command that has
opened the store itself. The answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moonclipfs.errors import UsageError
from moonclipfs.layers.arguments import argument
from moonclipfs.layers.carrying import commit_into
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlaydiff import layer_diff
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.layerdirs import DIRECTORY as LAYERS
from moonclipfs.store.layerdirs import layer_holder
from moonclipfs.store.overlaydirs import OverlayInfo, intact_infos, is_over
from moonclipfs.store.store import Store
from moonclipfs.types import Version

Json = Mapping[str, Any]
Verb = Callable[[Json], Json]


def verbs(overlays: Overlays) -> Mapping[str, Verb]:
    """What is answered for the overlays that one process has, by name. Thread-safe; each may take long."""
    return _Verbs(overlays).by_name


class _Verbs:
    """The verbs: each takes and returns JSON values."""

    def __init__(self, overlays: Overlays) -> None:
        self._overlays = overlays

    @property
    def by_name(self) -> Mapping[str, Verb]:
        """The verbs."""
        return {
            "overlay_create": self.create,
            "overlay_list": self.list,
            "overlay_status": self.status,
            "overlay_diff": self.diff,
            "dry_run_diff": self.dry_run_diff,
            "overlay_commit": self.commit,
            "overlay_flush": self.flush,
            "overlay_discard": self.discard,
            "overlay_rename": self.rename,
            "overlay_rebase": self.rebase,
        }

    def create(self, arguments: Json) -> Json:
        """name, base (see `Overlays.base_of`), quota in bytes or None, ephemeral, dry_run, owner. Answers with what
        `list` says of it."""
        overlay = self._overlays.create(
            argument(arguments, "name", str),
            argument(arguments, "base", str, ""),
            quota=argument(arguments, "quota", int, None),
            ephemeral=argument(arguments, "ephemeral", bool, False),
            dry_run=argument(arguments, "dry_run", bool, False),
            owner=argument(arguments, "owner", dict, None),
        )
        return info_json(overlay.store.path, overlay.info)

    def list(self, _: Json) -> Json:
        """See `listed`."""
        return listed(self._overlays.store.path)

    def status(self, arguments: Json) -> Json:
        """name. Answers with what `list` says of it, and what it has staged, stored and failed to store."""
        overlay = self._get(arguments)
        return {**info_json(overlay.store.path, overlay.info), **overlay.status()}

    def diff(self, arguments: Json) -> Json:
        """name. Answers as `LayerDiff.as_json`, and with the base."""
        overlay = self._get(arguments)
        found = layer_diff(overlay.layer, overlay.base_root)
        return {"name": overlay.name, "base": overlay.info.base, **found.as_json()}

    def dry_run_diff(self, arguments: Json) -> Json:
        """name, of an overlay on the whole live layer as that was. Answers as `diff`, of what the live layer shows now.
        Raises UsageError without a live layer."""
        overlay, live = self._get(arguments), self._overlays.live
        if live is None:
            raise UsageError("only a mount has a live layer to compare")
        found = layer_diff(live.layer, overlay.base_root)
        return {"name": live.layer.name, "base": overlay.info.base, **found.as_json()}

    def commit(self, arguments: Json) -> Json:
        """name, as (the snapshot's name, by default the overlay's), into (the path of another store, for the snapshot
        to be there), allow (also a dry run). Answers with path, number, new (whether there was no such version
        before), files and bytes of the version."""
        overlay = self._get(arguments)
        wanted, allow = argument(arguments, "as", str, None), argument(arguments, "allow", bool, False)
        into = argument(arguments, "into", str, None)
        if into is None:
            before = _numbers(overlay.store, wanted or overlay.name)
            version = overlay.commit(wanted, allow=allow)
        else:
            with Store.open(into, write=True, purpose="overlay commit") as target:
                before = _numbers(target, wanted or overlay.name)
                version = commit_into(overlay, target, wanted, allow=allow)
        return {**version_json(version), "new": version.number not in before}

    def flush(self, arguments: Json) -> Json:
        """name. Answers when all that was written to it is encoded and durable."""
        self._get(arguments).flush()
        return {}

    def discard(self, arguments: Json) -> Json:
        """name."""
        self._overlays.discard(argument(arguments, "name", str))
        return {}

    def rename(self, arguments: Json) -> Json:
        """name, new."""
        self._overlays.rename(argument(arguments, "name", str), argument(arguments, "new", str))
        return {}

    def rebase(self, arguments: Json) -> Json:
        """name, base (as of `create`; by default the newest version of the base's name). Answers with name, base, and
        conflicts: path, what, and `base`, the path in a mount of what the base has there, empty for nothing."""
        overlay = self._get(arguments)
        found = self._overlays.rebase(overlay.name, argument(arguments, "base", str, None))
        conflicts = [{"path": path, "what": what, "base": place} for path, what, place in found]
        return {"name": overlay.name, "base": overlay.info.base, "conflicts": conflicts}

    def _get(self, arguments: Json) -> Overlay:
        return self._overlays.get(argument(arguments, "name", str))


def listed(store: Path) -> Json:
    """overlays: name, base, created_ns, quota, ephemeral, dry_run, owner, and holder, who has it open or None; of
    ephemeral ones only those that somebody has. damaged: what is wrong with others, of which nothing else is known.
    """
    found, damaged = intact_infos(store)
    there = [info_json(store, info) for info in found if not is_over(store, info)]
    return {"overlays": there, "damaged": [str(error) for error in damaged]}


def info_json(store: Path, info: OverlayInfo) -> dict[str, Any]:
    """JSON values of what is known of an overlay without opening it."""
    return {
        "name": info.name,
        "base": info.base,
        "created_ns": info.created_ns,
        "quota": info.quota,
        "ephemeral": info.ephemeral,
        "dry_run": info.dry_run,
        "owner": dict(info.owner),
        "holder": layer_holder(store / LAYERS / info.layer),
    }


def version_json(version: Version) -> dict[str, Any]:
    """JSON values of a version: path, number, files, bytes."""
    counts = {key: version.metadata.get(key) for key in ("files", "bytes")}
    return {"path": version.path, "number": version.number, **counts}


def _numbers(store: Store, name: str) -> set[int]:
    return {version.number for version in store.names().versions(name.strip("/"))}
