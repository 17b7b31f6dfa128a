"""Pins: versions that nothing forgets, neither a rule nor a mount that needs room, each with its reasons.

They stand in the log, so a pin is seen by every process, survives a restart, follows a version that is moved, and no
two processes overwrite each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from moonclipfs.errors import NotFoundError, UsageError
from moonclipfs.store.config import PINS, enable
from moonclipfs.store.log import Names
from moonclipfs.store.store import Store

PINNED = "pinned"
"""The reason of a pin that a person set. Others are names of whoever keeps a version, as `best`."""

Key = tuple[str, int]
"""Path and number of a version."""


def pin(store: Store, versions: Iterable[Key], reason: str = PINNED) -> list[Key]:
    """Keep versions, whatever rules say, until they are unpinned; returns those that were not pinned for `reason`.

    Raises NotFoundError for a version that is not kept, UsageError for a store that is open for reading only, and what
    `Log.append` raises.
    """
    asked = list(dict.fromkeys(versions))

    def choose(names: Names) -> tuple[list[Key], list[Key]]:
        for path, number in asked:
            if all(version.number != number for version in names.versions(path)):
                raise NotFoundError(f"{path} has no version {number}")
        return [key for key in asked if reason not in names.pins().get(key, ())], []

    return change(store, choose, reason)[0]


def unpin(store: Store, versions: Iterable[Key], reason: str = PINNED) -> list[Key]:
    """Let rules have versions back; returns those that were pinned for `reason`. Raises as `pin` does."""
    asked = list(dict.fromkeys(versions))

    def choose(names: Names) -> tuple[list[Key], list[Key]]:
        return [], [key for key in asked if reason in names.pins().get(key, ())]

    return change(store, choose, reason)[1]


def change(
    store: Store, choose: Callable[[Names], tuple[list[Key], list[Key]]], reason: str
) -> tuple[list[Key], list[Key]]:
    """Pin and unpin in one step, as one record of the log, or none when there is nothing to do; returns both lists.

    `choose` tells from the newest names which versions are to be pinned and unpinned; it is asked again when another
    process was faster, so that of two that choose the best of all, one comes last and sees the other's.
    """
    if not store.write:
        raise UsageError(f"{store.path} is open for reading only")
    add, remove = choose(store.names())
    if not add and not remove:
        return add, remove
    store.config = enable(store.backend, store.config, PINS)

    def body(names: Names) -> Mapping[str, object]:
        nonlocal add, remove
        add, remove = choose(names)
        return {
            "add": [[path, number, reason] for path, number in add],
            "remove": [[path, number, reason] for path, number in remove],
        }

    store.log.append("pin", body)
    return add, remove


def pinned(names: Names, reason: str = PINNED) -> list[Key]:
    """The versions that are pinned for a reason, oldest first."""
    found = [key for key, reasons in names.pins().items() if reason in reasons]
    bound = {(version.path, version.number): version.sequence for version in names.all_versions()}
    return sorted(found, key=lambda key: bound.get(key, 0))
