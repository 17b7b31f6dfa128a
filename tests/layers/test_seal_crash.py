"""After a crash at any point of a seal: each version is a captured state, whole, and what was captured is not lost."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.seal import Sealer
from moonclipfs.store.check import verify
from tests import faults
from tests.faults import CrashState, crash_states, kill_states
from tests.layers.sealkit import LocalEncoder, put, stored, tree
from tests.layers.test_layer_crash import Life, noise, opened

TOP = "run/a"
Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INLINE_BYTES", 64)
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", 256)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", 128)
    monkeypatch.setattr(faults, "EVERY_CUT", 2)
    monkeypatch.setattr(faults, "CUTS", 2)


class Seals:
    """A life in which a directory is sealed. `captured` are its states at that, `accepted` and `durable` how many of
    them are there after each mark, after a kill and after a power failure.
    """

    def __init__(self, root: Path) -> None:
        self.life = Life(root)
        self.layer: Layer = self.life.layer
        self.sealer = Sealer(self.layer, LocalEncoder(self.layer), seal_after=None)
        self.captured: list[Files] = []
        self.accepted: list[int] = []
        self.durable: list[int] = []
        self.written: set[bytes] = {b""}
        self._durable = 0
        self.mark()

    def mark(self, *, durable: bool = False) -> None:
        self._durable = len(self.captured) if durable else self._durable
        self.accepted.append(len(self.captured))
        self.durable.append(self._durable)
        self.life.recorder.mark(str(len(self.accepted) - 1))

    def put(self, name: str, data: bytes) -> None:
        self.written.add(data)
        put(self.layer, f"{TOP}/{name}", data)

    def capture(self) -> None:
        self.captured.append(tree(self.layer, TOP))
        self.sealer.seal(TOP.encode(), wait=False)
        self.mark()

    def publish(self) -> None:
        self.sealer.tick(float("inf"))
        self.mark(durable=True)

    def commit(self) -> None:
        self.layer.sync_all()
        self.mark(durable=True)

    def broken(self, state: CrashState, root: Path, boot: bytes | None) -> str:
        """What is wrong with a state; empty when nothing is."""
        marks = [int(mark) for mark in state.marks]
        if not marks:
            return ""
        state.write(root)
        try:
            with opened(root, boot) as layer:
                return self._look(layer, (self.accepted if boot is None else self.durable)[marks[-1]])
        finally:
            shutil.rmtree(root)

    def _look(self, layer: Layer, least: int) -> str:
        live = tree(layer)
        if strange := [path for path, data in live.items() if data not in self.written]:
            return f"strange contents: {strange}"
        Sealer(layer, LocalEncoder(layer), seal_after=None).tick(float("inf"))
        versions = layer.store.names().versions(TOP)
        found = [stored(layer.store, version) for version in versions]
        if found != self.captured[: len(found)] or len(found) < least:
            return f"{least} versions of {named(self.captured)} were promised, these are there: {named(found)}"
        if tree(layer) != live:
            return "the live tree has changed"
        problems = verify(layer.store).problems
        return str(problems) if problems else ""


def named(states: list[Files]) -> list[dict[str, str]]:
    """Short, for messages."""
    return [{path: data[:2].hex() + f"..{len(data)}" for path, data in files.items()} for files in states]


def check(seals: Seals, tmp_path: Path, every: int = 1) -> int:
    """Look at each `every`th state that a crash may leave; returns at how many."""
    seals.life.close()
    total = 0
    for states, boot in ((crash_states, b"other".ljust(16)), (kill_states, None)):
        for state in itertools.islice(states(seals.life.recorder), 0, None, every):
            assert seals.broken(state, tmp_path / "state", boot) == "", (state.at, boot)
            total += 1
    return total


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_seal_of_new_files(tmp_path: Path, every: int) -> None:
    """Captures that were durable become versions after any crash, whole and in order; no version is anything else."""
    seals = Seals(tmp_path / "store")
    seals.put("big", noise())
    seals.put("small", noise(20))
    seals.capture()
    seals.put("big", noise())
    seals.commit()
    seals.publish()
    assert check(seals, tmp_path, every) > 100 // every


@pytest.mark.slow
def test_seals_one_after_the_other(tmp_path: Path) -> None:
    seals = Seals(tmp_path / "store")
    seals.put("big", noise())
    seals.put("d/small", noise(20))
    seals.capture()
    seals.publish()
    seals.put("d/small", noise(20))
    seals.layer.unlink(seals.layer.resolve(b"run/a"), b"big", 5)
    seals.capture()
    seals.put("big", noise())
    seals.capture()
    seals.commit()
    seals.publish()
    seals.layer.files.checkpoint()
    seals.mark(durable=True)
    assert check(seals, tmp_path) > 50
