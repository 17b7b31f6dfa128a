"""Forgetting versions for good, and what that frees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonclipfs.errors import CorruptError, NoSpaceError
from moonclipfs.store import reserve
from moonclipfs.store.gc import GcReport, collect, preview
from moonclipfs.store.store import Store
from moonclipfs.store.survey import Survey
from moonclipfs.types import Version


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """`exclusive` are the stored bytes that nothing but `versions`, taken together, needs; None when one of them is
    too damaged to tell. `gc` says what was freed, or in a dry run would be, what was dead before included."""

    versions: tuple[Version, ...]
    exclusive: int | None
    gc: GcReport


def forget(
    store: Store,
    versions: Sequence[Version],
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ForgetReport:
    """Drop versions, also from `@versions`, and run gc. With `dry_run`, only say what that would free.

    Raises NotFoundError when one is gone meanwhile, CorruptError when what the others need cannot be read (in which
    case nothing is dropped), and what `gc.collect` raises.
    """
    names = [(version.path, version.number) for version in versions]
    exclusive = _exclusive(store, names)
    if dry_run:
        return ForgetReport(tuple(versions), exclusive, preview(store, names))
    drop(store, names)
    return ForgetReport(tuple(versions), exclusive, collect(store, progress=progress))


def drop(store: Store, versions: Sequence[tuple[str, int]]) -> None:
    """Drop versions (path, number), with the help of the store's reserve, which gc takes again, on a full disk.

    Raises NotFoundError when one is gone meanwhile.
    """
    try:
        if versions:
            store.log.forget(versions)
    except NoSpaceError:
        reserve.release(store.path)
        kept = {(version.path, version.number) for version in store.names().all_versions()}
        if left := [version for version in versions if version in kept]:
            store.log.forget(left)


def _exclusive(store: Store, versions: Sequence[tuple[str, int]]) -> int | None:
    survey = Survey(store)
    survey.mark(without=versions)
    table = survey.footers.table()
    kept = int(table.stored[survey.measure(table).needed].sum())
    try:
        survey.mark()
        return int(table.stored[survey.measure(table).needed].sum()) - kept
    except CorruptError:
        return None
