"""Which versions of snapshots to keep: rules over lines, decided without touching the store, each decision explained.

A line is the snapshots that lie side by side under one parent path, in the order in which they were bound (never in
the order of their names: `checkpoint-10000` follows `checkpoint-9900`). Rules count the names of a line by their
newest version. What a later version replaced, or what was removed, is nothing that anyone sees at its path: a rule
drops it unless `keep_versions` or a pin keeps it.

A snapshot may tell how good it is: `metric` of its metadata is `{"name": "val_loss", "value": 0.31, "goal": "min"}`, or
"max". The best of a line by each metric stays as its newest does, unless `keep_best` is 0.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moonclipfs.errors import NotFoundError, UsageError
from moonclipfs.store.log import Names, parse_spec
from moonclipfs.types import Version

Key = tuple[str, int]
"""Path and number of a version."""
_LAST_INTEGER = re.compile(r"(\d+)(?!.*\d)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rules:
    """What to keep of each line; a version stays when any rule or pin keeps it.

    `names` limits the rules to snapshots: `NAME`, everything below `NAME`, or a glob; empty means all. Without any
    keep rule, `names` are what is to go, and `NAME@N` is one version. `pinned` are names, `NAME@N`, or globs: they
    never go and are never counted, nor what is pinned in the log.

    `keep_last` are the last ones of a line; `keep_every` the rollback points, whose step is a multiple of it, and
    `keep_every_last` the newest of these (None: all, 0: none); `keep_best` the best by each metric (None: one).
    `keep_total` bounds what the other rules keep, or, alone, all there is: past it the oldest go, but for the newest
    and the best.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_every_last: int | None = None
    keep_best: int | None = None
    keep_total: int | None = None
    keep_versions: int = 1
    names: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for what is no number of snapshots, and for half a rule."""
        _check_numbers(self)

    @property
    def has_keep_rule(self) -> bool:
        """True when rules choose among the snapshots, rather than `names` alone."""
        numbers = (self.keep_last, self.keep_every, self.keep_best, self.keep_total)
        return any(number is not None for number in numbers)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one version, and why."""

    version: Version
    keep: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision for each version that the rules looked at, ordered by line, then by binding."""

    decisions: tuple[Decision, ...]

    @property
    def keep(self) -> tuple[Version, ...]:
        """The versions that stay."""
        return tuple(decision.version for decision in self.decisions if decision.keep)

    @property
    def drop(self) -> tuple[Version, ...]:
        """The versions that go."""
        return tuple(decision.version for decision in self.decisions if not decision.keep)


def line_of(path: str) -> str:
    """The line that a snapshot belongs to: its parent path, empty at the top."""
    return path.rpartition("/")[0]


def step_of(version: Version) -> int | None:
    """The training step: `step` of the metadata, else the last integer in the last part of the name, else None."""
    step = version.metadata.get("step")
    if isinstance(step, int) and not isinstance(step, bool):
        return step
    found = _LAST_INTEGER.search(version.path.rpartition("/")[2])
    return int(found[1]) if found else None


def metric_of(version: Version) -> tuple[str, float] | None:
    """The name of a version's metric, and how good it is by that: the smaller, the better. None without a number."""
    metric = version.metadata.get("metric")
    if not isinstance(metric, Mapping):
        return None
    value = metric.get("value")
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        return None
    return str(metric.get("name", "")), -float(value) if metric.get("goal") == "max" else float(value)


def plan(names: Names, rules: Rules, held: Mapping[Key, Sequence[str]] | None = None) -> Plan:
    """Decide for every version in reach of `rules` whether it stays.

    `held` are versions, by path and number, that something beside the log and the rules needs, and why: they stay as
    pinned ones do. Raises UsageError for rules and names that say nothing, and for an explicit name that is pinned;
    NotFoundError for a name or a pin that no version has.
    """
    if not rules.names and not rules.has_keep_rule:
        raise UsageError("nothing to forget: give names, or --keep-last, --keep-every, --keep-best or --keep-total")
    versions = sorted(names.all_versions(), key=lambda version: version.order)
    _check_names(versions, rules)
    pinned = _select(versions, rules.pinned)
    chosen = _select(versions, rules.names) if rules.names else versions
    pins = _pins(names, pinned, held or {})
    if not rules.has_keep_rule:
        return _explicit(chosen, pins)
    bound = {path: version.number for path, version in names.bound().items()}
    lines: defaultdict[str, list[Version]] = defaultdict(list)
    for version in chosen:
        lines[line_of(version.path)].append(version)
    return Plan(
        tuple(decision for line in sorted(lines) for decision in _Line(lines[line], bound, rules, pins).decide())
    )


def _check_numbers(rules: Rules) -> None:
    for option, value, least in (
        ("--keep-last", rules.keep_last, 1),
        ("--keep-every", rules.keep_every, 1),
        ("--keep-total", rules.keep_total, 1),
        ("--keep-versions", rules.keep_versions, 1),
        ("--keep-every-last", rules.keep_every_last, 0),
        ("--keep-best", rules.keep_best, 0),
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise UsageError(f"{option} {value!r}: must be a whole number")
        if value is not None and value < least:
            raise UsageError(f"{option} {value}: must be {least} or more" + ("; to remove everything, name it" * least))
    if rules.keep_every_last is not None and rules.keep_every is None:
        raise UsageError("--keep-every-last says how many of --keep-every stay: give that, too")


def _check_names(versions: Sequence[Version], rules: Rules) -> None:
    for name in rules.names if rules.has_keep_rule else ():
        if parse_spec(name)[1] is not None and not _called(versions, name):
            raise UsageError(f"{name} is one version, while the --keep rules choose among names")


def _select(versions: Sequence[Version], patterns: Iterable[str]) -> list[Version]:
    """The versions that any pattern names, in their order. Raises NotFoundError for a pattern that names none."""
    found: set[int] = set()
    for pattern in patterns:
        matching = _matching(versions, pattern)
        if not matching:
            raise NotFoundError(f"no snapshot is called {pattern!r}; `moonclipfs ls` lists them")
        found |= matching
    return [versions[at] for at in sorted(found)]


def _matching(versions: Sequence[Version], pattern: str) -> set[int]:
    """Places of the versions that a pattern stands for. What is a name is never read as `NAME@N` or as a glob."""
    if named := _called(versions, pattern):
        return named
    path, number = parse_spec(pattern)
    candidates = _called(versions, path, below=number is None) or {
        at for at, version in enumerate(versions) if fnmatchcase(version.path, path)
    }
    return {at for at in candidates if number in (None, versions[at].number)}


def _called(versions: Sequence[Version], path: str, *, below: bool = True) -> set[int]:
    """Places of the versions at a path, and of those below it."""
    prefix = path + "/"
    return {
        at for at, version in enumerate(versions) if version.path == path or (below and version.path.startswith(prefix))
    }


def _pins(names: Names, pinned: Iterable[Version], held: Mapping[Key, Sequence[str]]) -> dict[Key, list[str]]:
    """Why versions stay whatever the rules say: those of a command, those of the log, and what holds them."""
    pins: defaultdict[Key, list[str]] = defaultdict(list)
    for version in pinned:
        pins[version.path, version.number].append("pinned")
    for key, reasons in (*names.pins().items(), *held.items()):
        pins[key] += [reason for reason in reasons if reason not in pins[key]]
    return dict(pins)


def _explicit(chosen: Iterable[Version], pins: Mapping[Key, Sequence[str]]) -> Plan:
    for version in chosen:
        if reasons := pins.get((version.path, version.number)):
            why = "is pinned" if "pinned" in reasons else f"stays: {reasons[0]}"
            raise UsageError(f"{version.path}@{version.number} {why}: it cannot be forgotten")
    return Plan(tuple(Decision(version, False, ("named",)) for version in chosen))


class _Line:
    """One line of versions, in the order of binding, and what the rules say of them."""

    def __init__(
        self, versions: list[Version], bound: Mapping[str, int], rules: Rules, pins: Mapping[Key, Sequence[str]]
    ) -> None:
        self._versions = versions
        self._bound = bound
        self._rules = rules
        self._pins = pins
        self._beyond: dict[str, str] = {}
        """Names that a bound of a rule lets go, and which."""
        self._kept_names = self._choose_names()

    def decide(self) -> Iterator[Decision]:
        """Decisions in the order of the versions."""
        later: Counter[str] = Counter()  # versions of each name that come after the one in hand
        decisions = []
        for version in reversed(self._versions):
            reasons = self._reasons(version, later[version.path])
            later[version.path] += self._present(version)
            decisions.append(Decision(version, bool(reasons), tuple(reasons) or (self._why_dropped(version),)))
        return reversed(decisions)

    def _present(self, version: Version) -> bool:
        """True for what stands at its path, or stood there until a version of the same name replaced it."""
        return version.removed == 0 and version.path in self._bound

    def _choose_names(self) -> dict[str, list[str]]:
        """The names that stay, each with its reasons."""
        rules = self._rules
        current = [version for version in self._versions if self._bound.get(version.path) == version.number]
        reasons: defaultdict[str, list[str]] = defaultdict(list)
        if current:
            reasons[current[-1].path].append("newest of its line")
        counted = [version for version in current if (version.path, version.number) not in self._pins]
        for version in counted[-rules.keep_last :] if rules.keep_last is not None else ():
            reasons[version.path].append(f"among the last {rules.keep_last}")
        for version in self._rollback_points(current):
            reasons[version.path].append(f"step {step_of(version)} is a multiple of {rules.keep_every}")
        for version, metric in self._best(current):
            reasons[version.path].append(f"best of its line by {metric}" if metric else "best of its line")
        if rules.keep_total is not None:
            self._bound_total(counted, reasons)
        return dict(reasons)

    def _rollback_points(self, current: Sequence[Version]) -> list[Version]:
        """Those that `keep_every` names, as many as `keep_every_last` allows."""
        every, most = self._rules.keep_every, self._rules.keep_every_last
        if every is None:
            return []
        points = [version for version in current if (step := step_of(version)) is not None and step % every == 0]
        cut = 0 if most is None else max(0, len(points) - most)
        self._beyond |= {one.path: f"a multiple of {every}, but beyond the newest {most}" for one in points[:cut]}
        return points[cut:]

    def _best(self, current: Sequence[Version]) -> Iterator[tuple[Version, str]]:
        """The best by each metric, of equals the earliest, with the metric's name."""
        by_metric: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for at, version in enumerate(current):
            if (metric := metric_of(version)) is not None:
                by_metric[metric[0]].append((metric[1], at))
        most = 1 if self._rules.keep_best is None else self._rules.keep_best
        for name, found in sorted(by_metric.items()):
            for _, at in sorted(found)[:most]:
                yield current[at], name

    def _bound_total(self, counted: Sequence[Version], reasons: defaultdict[str, list[str]]) -> None:
        """Let the oldest go of what is kept, but for the newest and the best, or of all when nothing else chooses."""
        rules = self._rules
        alone = rules.keep_last is None and rules.keep_every is None and rules.keep_best is None
        kept = [version for version in counted if alone or version.path in reasons]
        over = len(kept) - (rules.keep_total or 0)
        for version in kept:
            if any(reason.startswith(("newest", "best")) for reason in reasons.get(version.path, ())):
                continue
            if over > 0:
                over -= 1
                reasons.pop(version.path, None)
                self._beyond[version.path] = f"more than {rules.keep_total} in all"
            elif alone:
                reasons[version.path].append(f"no more than {rules.keep_total} in all")

    def _reasons(self, version: Version, later: int) -> list[str]:
        reasons = list(self._pins.get((version.path, version.number), ()))
        if not self._present(version):
            return reasons
        if later == 0:
            return reasons + self._kept_names.get(version.path, [])
        if later < self._rules.keep_versions and version.path in self._kept_names:
            reasons.append(f"among the newest {self._rules.keep_versions} versions of a kept name")
        return reasons

    def _why_dropped(self, version: Version) -> str:
        if not self._present(version):
            return "removed"
        current = self._bound[version.path]
        if current != version.number:
            return f"replaced by version {current}"
        return self._beyond.get(version.path, "no rule keeps it")
