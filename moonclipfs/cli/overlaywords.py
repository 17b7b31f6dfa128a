"""Arguments of the commands about overlays, and how their answers are told."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem

from moonclipfs.cli.diff import tensor_row
from moonclipfs.cli.output import human, printable, table, when
from moonclipfs.cli.progress import with_left_bar
from moonclipfs.cli.target import STORE_VARIABLE, default_store
from moonclipfs.errors import MoonclipError, UsageError
from moonclipfs.fuse.control import ask
from moonclipfs.overlayplaces import InMount, InStore, for_overlay, place_of
from moonclipfs.store.overlaydirs import overlay_names

_LISTED = 40
"""Lines of one kind that a person is shown; all of them are in the JSON."""
_MARKS = {"added": "+", "removed": "-", "changed": "~", "attributes": "="}

Place = InMount | InStore


@contextmanager
def one_place(text: str | None) -> Iterator[Place]:
    """The mount or store that `text` names; that of $MOONCLIPFS_STORE when it is None."""
    named = text or default_store()
    if named is None:
        raise UsageError(f"no mount or store given: name one, or set ${STORE_VARIABLE}")
    place, _ = place_of(named)
    try:
        yield place
    finally:
        place.close()


@contextmanager
def one_overlay(words: Sequence[str], more: int = 0) -> Iterator[tuple[Place, str, list[str]]]:
    """What `[MOUNT_OR_STORE] NAME`, or a path in an overlay, and `more` words behind mean: where to ask, the name of
    the overlay, and these words.
    """
    rest = list(words[len(words) - more :]) if more else []
    first = list(words[: len(words) - more])
    if len(words) < more + 1 or len(first) > 2:
        raise UsageError(f"name a mount or store, and an overlay{' and what follows' if more else ''}")
    place, name = place_of(first[0]) if len(first) == 2 or _is_path(first[0]) else (None, None)
    name = first[1] if len(first) == 2 else name
    if place is None:
        named, name = default_store(), first[0]
        if named is None:
            raise UsageError(f"{name} is in no mount or store: name that first, or set ${STORE_VARIABLE}")
        place, _ = place_of(named)
    if name is None:
        raise UsageError(f"{first[0]} lies in no overlay: name one, as {first[0]} NAME")
    try:
        yield for_overlay(place, name), name, rest
    finally:
        place.close()


def _is_path(text: str) -> bool:
    return os.path.lexists(text) or "/" in text


def complete_place(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """First a path; behind one that is a mount or store, the names of overlays there."""
    words = context.params.get(param.name or "") or ()
    where = words[0] if words else default_store()
    names: list[str] = []
    if where is not None:
        try:
            with one_place(where) as place:
                names = [name for name in overlay_names(place.store) if name.startswith(incomplete)]
        except MoonclipError:
            names = []
    if words:
        return [CompletionItem(name) for name in names]
    return [*(CompletionItem(name) for name in names), CompletionItem(incomplete, type="file")]


def ask_long(place: Place, verb: str, title: str, **arguments: Any) -> Mapping[str, Any]:
    """Ask for what may take long; on a terminal, show how much is staged meanwhile. Raises as `Place.ask`."""
    return with_left_bar(title, lambda: place.ask(verb, **arguments), lambda: _staged(place, arguments["name"]))


def _staged(place: Place, name: str) -> int:
    """Bytes of an overlay that are not stored yet."""
    if isinstance(place, InStore):
        return sum(one.layer.staged()["staged_bytes"] for one in place.opened() if one.name == name)
    try:
        answer = ask(place.mount.mountpoint, "status")
    except MoonclipError:
        return 0  # the answer to the question itself tells what is wrong
    return sum(int(one["staged_bytes"]) for one in answer.get("overlays", ()) if one["name"] == name)


def overlay_row(found: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of a table for an overlay as a listing tells it."""
    notes = [word for word, key in (("dry run", "dry_run"), ("ephemeral", "ephemeral")) if found[key]]
    if found["quota"] is not None:
        notes.append(f"quota {human(found['quota'])}")
    if (holder := found["holder"]) is not None:
        where = holder.get("mountpoint")
        notes.append(f"mounted at {where}" if where else f"in use by process {holder.get('pid', '?')}")
    return (
        printable(found["name"]),
        printable(found["base"] or "-"),
        when(found["created_ns"]),
        printable(", ".join(notes)),
    )


def print_diff(found: Mapping[str, Any], *, err: bool = False) -> None:
    """What an overlay changed, as `LayerDiff.as_json` tells it; on stderr if `err`."""
    files, tensors = found["files"], found["tensors"]
    for one in files[:_LISTED]:
        what = f" ({', '.join(one['attributes'])})" if one["attributes"] else ""
        slash = "/" if one["type"] == "directory" else ""
        click.echo(f"{_MARKS[one['change']]} {printable(one['path'])}{slash}{what}", err=err)
    _more(len(files), "paths", err)
    if tensors:
        click.echo("tensors:", err=err)
        table(((" ", *tensor_row(one)) for one in tensors[:_LISTED]), err=err)
        _more(len(tensors), "tensors", err)
    click.echo(summary(found), err=err)


def summary(found: Mapping[str, Any]) -> str:
    """One line: how many paths and tensors are not as in the base."""
    if not found["files"]:
        return "nothing was changed"
    text = f"{_count(len(found['files']), 'path')}: {_counts(found['files'])}"
    if found["tensors"]:
        text += f"; {_count(len(found['tensors']), 'tensor')}: {_counts(found['tensors'])}"
    return text


def print_commit(answer: Mapping[str, Any], *, err: bool = False) -> None:
    """NAME@N, and what is in it."""
    new = f"{_count(answer['files'] or 0, 'file')}, {human(answer['bytes'] or 0)}" if answer["new"] else "nothing new"
    click.echo(f"{printable(answer['path'])}@{answer['number']}: {new}", err=err)


def _counts(found: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(one["change"] for one in found)
    return ", ".join(f"{number} {what}" for what, number in counts.items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _more(number: int, what: str, err: bool) -> None:
    if number > _LISTED:
        click.echo(f"  and {number - _LISTED} more {what}", err=err)
