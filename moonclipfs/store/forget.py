"""Forgetting versions for good, and what that frees."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moonclipfs.errors import CorruptError, NoSpaceError
from moonclipfs.store import reserve
from moonclipfs.store.gc import GcReport, collect, preview
from moonclipfs.store.log import Names
from moonclipfs.store.overlaydirs import pinned_versions
from moonclipfs.store.retention import Key, Plan, Rules, line_of, plan
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


def held(store: Store) -> dict[Key, list[str]]:
    """What keeps versions beside the log and any rules, each with its reasons."""
    overlays = pinned_versions(store.path, store.log.names).items()
    return {key: [f"overlay {name} stands on it" for name in names] for key, names in overlays}


def retain(store: Store, rules: Rules) -> Plan:
    """Forget what `rules` do not keep, in one record, decided from the names that it follows; gc is left to others.

    Here `rules.names` are runs: what lies right under one of them is looked at, and nothing further below, which is
    another run's. Rules that say of nothing how much of it is to stay drop nothing.

    So of several processes each sees what another saved, pinned or forgot meanwhile. Raises as `retention.plan` does,
    and what `Log.append` raises.
    """
    if not rules.has_keep_rule:
        return Plan(())
    decided = _of_runs(plan(store.names(), rules, held(store)), rules)
    if not decided.drop:
        return decided

    def body(names: Names) -> Mapping[str, object]:
        nonlocal decided
        decided = _of_runs(plan(names, rules, held(store)), rules)
        if not decided.drop:
            raise _NothingLeftError
        return {"versions": [(one.path, one.number) for one in decided.drop], "time_ns": time.time_ns()}

    try:
        store.log.append("forget", body)
    except _NothingLeftError:
        pass  # another process was faster
    return decided


def _of_runs(decided: Plan, rules: Rules) -> Plan:
    """The part of a plan that is about the runs that `rules` name."""
    if not rules.names:
        return decided
    return Plan(tuple(one for one in decided.decisions if line_of(one.version.path) in rules.names))


class _NothingLeftError(Exception):
    """Meanwhile everything that was to be forgotten has been, or is to be kept after all."""


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
