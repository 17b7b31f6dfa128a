"""The arguments that name stores and snapshots, and opening what they name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from moonclipfs.errors import MoonclipError, UsageError
from moonclipfs.store.gc import open_to_reclaim
from moonclipfs.store.store import Store
from moonclipfs.store.target import Target, parse_target

STORE_VARIABLE = "MOONCLIPFS_STORE"


def complete_target(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of snapshots after `STORE:` or with $MOONCLIPFS_STORE; else leave it to the shell's own paths."""
    store, colon, typed = incomplete.rpartition(":")
    try:
        with Store.open(one_target(store or None).store) as opened:
            names = sorted(name for name in opened.names().bound() if name.startswith(typed))
    except MoonclipError:
        names = []
    items = [CompletionItem(f"{store}{colon}{name}") for name in names]
    return items or [CompletionItem(incomplete, type="file")]


def default_store() -> str | None:
    """The store of the environment; None when there is none."""
    return os.environ.get(STORE_VARIABLE) or None


def one_target(text: str | None) -> Target:
    """The target that `text` names; the default store when it is None. Raises UsageError when there is none."""
    if text is not None:
        return parse_target(text, default_store())
    return parse_target(":", _needed(default_store()))


def many_targets(texts: Sequence[str]) -> list[Target]:
    """Targets in one store: after the first, a bare NAME belongs to the store of the first.

    A first STORE that NAMEs follow only says where they are. Raises UsageError for targets in several stores.
    """
    if not texts:
        return [one_target(None)]
    first = one_target(texts[0])
    found = [first, *(parse_target(text, first.store) for text in texts[1:])]
    if any(not same_path(target.store, first.store) for target in found):
        raise UsageError("all targets must be in one store")
    return found[1:] if len(found) > 1 and not first.spec else found


def same_path(left: Path, right: Path) -> bool:
    """True when both lead to the same directory."""
    return os.path.realpath(left) == os.path.realpath(right)


def whole_store(text: str | None) -> Path:
    """The store that `text` names. Raises UsageError when it names a snapshot."""
    target = one_target(text)
    if target.spec:
        raise UsageError(f"this command works on a whole store, not on {target.spec}")
    return target.store


@contextmanager
def opened(target: Target | Path, *, write: bool = False, reclaim: bool = False) -> Iterator[Store]:
    """Open the store of a target for the time of a command; with `reclaim`, for writing even on a full disk. Raises
    UsageError for writing in a dry run.
    """
    path = target.store if isinstance(target, Target) else target
    if isinstance(target, Target) and target.dry_run and (write or reclaim):
        raise UsageError("that is a dry run, which changes nothing in its store: name the store itself")
    purpose = click.get_current_context().command_path
    with open_to_reclaim(path, purpose) if reclaim else Store.open(path, write=write, purpose=purpose) as store:
        yield store


def _needed(text: str | None) -> str:
    if text is None:
        raise UsageError(f"no store given: name one, or set ${STORE_VARIABLE}")
    return text
