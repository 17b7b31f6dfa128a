"""How many threads are worth it: the cores, or what a control group leaves of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moonclipfs.store import cores, ingest
from moonclipfs.store.cores import usable_cores

ALL = 8


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups of a machine with `ALL` cores; this process is in a/b."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(ALL)))
    (tmp_path / "groups/a/b").mkdir(parents=True)
    (tmp_path / "own").write_text("9:name=systemd:/x\n0::/a/b\n")
    return tmp_path / "groups"


@pytest.mark.parametrize(
    ("place", "text", "expected"),
    [
        ("a/b", "max 100000\n", ALL),
        ("a/b", "200000 100000\n", 2),
        ("a/b", "150000 100000\n", 2),
        ("a/b", "10000 100000\n", 1),
        ("a/b", "6400000 100000\n", ALL),
        ("a", "300000 100000\n", 3),
        (".", "400000 100000\n", 4),
        ("a/b", "nonsense", ALL),
        ("a/b", "100000 0\n", ALL),
    ],
)
def test_a_group_limits_the_cores(groups: Path, place: str, text: str, expected: int) -> None:
    (groups / place / "cpu.max").write_text(text)
    assert usable_cores(groups, groups.parent / "own") == expected


def test_the_tightest_of_all_groups_counts(groups: Path) -> None:
    (groups / "a/b/cpu.max").write_text("500000 100000\n")
    (groups / "a/cpu.max").write_text("300000 100000\n")
    assert usable_cores(groups, groups.parent / "own") == 3


def test_a_group_that_is_elsewhere_is_looked_for_where_it_is_seen(groups: Path) -> None:
    """In a container, the path may lead out of what is mounted there: then its top is this process's group."""
    (groups.parent / "own").write_text("0::/../..\n")
    (groups / "cpu.max").write_text("200000 100000\n")
    assert usable_cores(groups, groups.parent / "own") == 2


def test_without_groups_all_cores_count(groups: Path) -> None:
    assert usable_cores(groups, groups.parent / "nothing") == ALL
    (groups.parent / "own").write_text("1:cpu:/a\n")
    assert usable_cores(groups, groups.parent / "own") == ALL


def test_threads_of_an_ingest_are_a_share_of_them(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (groups / "a/b/cpu.max").write_text("400000 100000\n")
    monkeypatch.setattr(ingest, "usable_cores", lambda: usable_cores(groups, groups.parent / "own"))
    assert [ingest.worker_count(share) for share in (1.0, 0.5, 0.1)] == [4, 2, 1]
    assert cores.usable_cores() >= 1
