"""Retention: golden decisions, each file of `retention_cases/` a history, rules, and what must come out.

A history is snapshot names in the order of binding; `-name` removes one; `[name, metadata]` binds with metadata. `pins`
are set after it: path, number, reason; `held` are the same, of what stands beside the log. Names of files that begin
with C and a number are those of faults that another checkpoint manager had.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs.errors import MoonclipError
from moonclipfs.store import retention
from moonclipfs.store.log import Names
from moonclipfs.store.replay import State
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID
from tests.store import kit

CASES = sorted((Path(__file__).parent / "retention_cases").glob("*.json"))


def build(history: Sequence[Any], pins: Sequence[Any] = ()) -> Names:
    """The names after a history and pins."""
    state = State()
    for sequence, event in enumerate(history, 1):
        path, metadata = event if isinstance(event, list) else (event, {})
        record: dict[str, Any] = {"type": "unbind", "paths": [path[1:]]}
        if not path.startswith("-"):
            number = state.highest.get(path, 0) + 1
            bind = {"path": path, "number": number, "root": NO_ID.hex(), "time_ns": 0, "metadata": metadata}
            record = {"type": "bind", **bind}
        state.apply({"sequence": sequence, **record})
    if pins:
        state.apply({"sequence": len(history) + 1, "type": "pin", "add": pins, "remove": []})
    return Names(state)


def decide(names: Names, rules: dict[str, Any], held: Sequence[Any] = ()) -> dict[str, dict[str, list[str]]]:
    """What the plan says, as the golden files write it."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in rules.items()}
    said: dict[str, dict[str, list[str]]] = {"keep": {}, "drop": {}}
    holds = {(path, number): [reason] for path, number, reason in held}
    for decision in retention.plan(names, retention.Rules(**fields), holds).decisions:
        key = f"{decision.version.path}@{decision.version.number}"
        said["keep" if decision.keep else "drop"][key] = list(decision.reasons)
    return said


def test_there_are_forty_cases() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=[case.stem for case in CASES])
def test_case(case: Path) -> None:
    document = json.loads(case.read_text())
    names, held = build(document["history"], document.get("pins", ())), document.get("held", ())
    if "error" in document:
        with pytest.raises(MoonclipError, match=document["error"]):
            decide(names, document["rules"], held)
        return
    said = decide(names, document["rules"], held)
    assert said == {"keep": document["keep"], "drop": document["drop"]}
    # Whatever else is in the store, a decision has a reason.
    assert all(reasons for decisions in said.values() for reasons in decisions.values())


PATHS = st.sampled_from(["a/1", "a/2", "a/10", "b/1", "b/2", "c", "a"])


@given(
    st.lists(st.tuples(PATHS, st.booleans()), max_size=30),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(0, 2),
    st.none() | st.integers(1, 3),
    st.none() | st.integers(0, 2),
    st.integers(1, 3),
    st.lists(PATHS, max_size=2),
)
def test_whatever_the_rules(
    steps: list[tuple[str, bool]],
    last: int | None,
    every: int | None,
    points: int | None,
    total: int | None,
    best: int | None,
    versions: int,
    pins: list[str],
) -> None:
    """The newest of each line and what is pinned stay, all is decided once, and a second pass drops nothing more."""
    history: list[Any] = []
    bound: set[str] = set()
    for at, (path, remove) in enumerate(steps):
        saved = [path, {"metric": {"name": "loss", "value": at * 7 % 5, "goal": "min"}}]
        history.append(f"-{path}" if remove and path in bound else saved)
        (bound.discard if remove and path in bound else bound.add)(path)
    names = build(history)
    pins = [pin for pin in pins if names.versions(pin)]
    if last is None and every is None:
        last = 1
    rules = retention.Rules(
        keep_last=last,
        keep_every=every,
        keep_every_last=None if every is None else points,
        keep_best=best,
        keep_total=total,
        keep_versions=versions,
        pinned=tuple(pins),
    )
    plan = retention.plan(names, rules)
    kept = {(version.path, version.number) for version in plan.keep}
    dropped = {(version.path, version.number) for version in plan.drop}
    assert not kept & dropped
    assert kept | dropped == {(version.path, version.number) for version in names.all_versions()}
    lines: dict[str, list[tuple[int, str, int]]] = {}
    for version in names.bound().values():
        line = retention.line_of(version.path)
        lines.setdefault(line, []).append((version.sequence, version.path, version.number))
    for members in lines.values():
        assert max(members)[1:] in kept
        assert len([one for one in members if one[1:] in kept]) >= min(last or 0, total or len(members), len(members))
    for version in names.all_versions():
        if version.path in pins:
            assert (version.path, version.number) in kept
    state = names._state.copy()
    if dropped:
        state.apply({"sequence": len(history) + 1, "type": "forget", "versions": sorted(dropped)})
    again = Names(state)
    if any(again.all_versions()):
        assert not retention.plan(again, rules).drop


def test_a_name_is_never_read_as_a_pattern_or_a_version(store: Store) -> None:
    for path in ("sweep/lr[1]", "sweep/lr1", "a", "a", "a@2", "b/x*", "b/xy"):
        kit.publish(store, path, {"f": path.encode() * 40})

    def dropped(*names: str) -> list[str]:
        return [f"{v.path}@{v.number}" for v in retention.plan(store.names(), retention.Rules(names=names)).drop]

    assert dropped("sweep/lr[1]") == ["sweep/lr[1]@1"]
    assert dropped("a@2") == ["a@2@1"]
    assert dropped("a@1") == ["a@1"]
    assert dropped("b/x*") == ["b/x*@1"]
    assert dropped("sweep/lr?") == ["sweep/lr1@1"]
    assert dropped("sweep/*@1") == ["sweep/lr[1]@1", "sweep/lr1@1"]
    assert dropped("b") == ["b/x*@1", "b/xy@1"]
