"""Random changes of an overlay, with commits, remounts and crashes in between, against the reference model."""

from __future__ import annotations

import os
import secrets
import shutil

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from moonclipfs.layers.basing import held
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.types import Entry, EntryType, ObjectId
from tests.layers.machine import BASE, PICK, LayerMachine
from tests.layers.model import Node
from tests.layers.overlaykit import LocalOverlayEncoder, create
from tests.layers.publish import Files, publish

WHOLE: Files = {"run1": {"a": BASE, "b": {"z": b"other", "sub": {"w": b"1"}}}, **BASE, "c": {}}


class OverlayMachine(LayerMachine):
    """The layer of an overlay. What others do to names of the log is nothing to it."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("moonclipfs.layers.overlay.OverlayEncoder", LocalOverlayEncoder)
        super().__init__()
        self.model.reserved = False
        self.generation = 0

    @initialize(base=st.booleans())
    def begin(self, base: bool) -> None:
        if base:
            publish(self.store, "base", WHOLE)
        self._use(create(self.store, "x", "base" if base else ""))
        self.model.root = self._see(self.layer.root)

    def _use(self, overlay: Overlay) -> None:
        self.overlay, self.layer = overlay, overlay.layer

    def teardown(self) -> None:
        try:
            problems = verify(self.store).problems
            super().teardown()
            assert problems == []
        finally:
            self.patch.undo()

    # Instead of seals, and of what others do

    @rule(pick=PICK)
    def seal(self, pick: int) -> None:
        """A commit: it is what the model says, and nothing that the overlay shows changes by it."""
        version = self.overlay.commit(f"result{pick % 2}")
        self._compare_stored(version.root, self.model.root, {})
        assert self.overlay.commit(f"result{pick % 2}") == version

    def _compare_stored(self, object_id: ObjectId, node: Node, groups: dict[int, Node]) -> None:
        entries = self.store.directory(object_id)
        assert set(entries) == set(node.entries)
        for name, entry in entries.items():
            there = node.entries[name]
            self._compare_entry(entry, there)
            assert entry.link_group or there.links == 1 or not _is_file(there)
            if entry.link_group:
                assert groups.setdefault(entry.link_group, there) is there
            if there.is_directory:
                self._compare_stored(entry.child, there, groups)

    def _compare_entry(self, entry: Entry, node: Node) -> None:
        attributes = entry.attributes
        assert entry.type is node.type and attributes.mode == node.mode
        assert (attributes.uid, attributes.gid) == (node.uid, node.gid)
        assert (attributes.mtime_ns, attributes.ctime_ns) == (node.mtime_ns, node.ctime_ns)
        assert entry.target == node.target and dict(attributes.xattrs) == node.xattrs
        if entry.type is EntryType.FILE:
            assert entry.size == node.size and self.store.open_file(entry).read(0, entry.size) == node.data

    @rule()
    def push_names(self) -> None:
        assert self.layer.push_names() == 0

    @rule(pick=PICK)
    def others_publish(self, pick: int) -> None:
        path, _ = self._node(pick, directory=True)
        if len(path) < 1000:
            self.foreign += 1
            publish(self.store, os.fsdecode(path + b"/f%d" % self.foreign).lstrip("/@"), BASE)
            assert self.layer.refresh(self._time()) == []

    @rule(pick=PICK)
    def others_bind(self, pick: int) -> None:
        publish(self.store, "base", {f"v{pick}": b"new"})

    @rule(pick=PICK)
    def others_remove(self, pick: int) -> None:
        """The base is forgotten, and gc runs."""
        for version in self.store.names().versions("base"):
            self.store.log.forget([("base", version.number)])
        collect(self.store)

    @rule(pick=PICK)
    def others_move(self, pick: int) -> None:
        """The overlay of this one is what it was then: from here on that one is changed."""
        if pick % 4 or any(node.links > 1 and not _is_file(node) for _, node, _, _ in self.model.root.walk()):
            return  # groups of hard links are of regular files in a store
        self.generation += 1
        with held(self.store):
            child = create(self.store, f"x{self.generation}", self.overlay.as_base())
        self.kept.clear()
        self.overlay.discard()
        self._use(child)
        for _, node, _, _ in self.model.root.walk():
            node.number = 0
        self.model.root.number = 0
        self._forget_access_times(self.model.root)

    def _forget_access_times(self, node: Node) -> None:
        """A directory object has none."""
        node.atime_ns = node.mtime_ns
        for child in node.entries.values():
            self._forget_access_times(child)

    # Ends and beginnings

    @rule()
    def reopen(self) -> None:
        self.kept.clear()
        self.overlay.close()
        self._use(Overlay.open(self.store, self.overlay.name))
        self.compare()

    @rule()
    def crash(self) -> None:
        """What a killed process leaves is an overlay with the same tree; and what it leaves else is cleared away."""
        self.kept.clear()
        old, layer = self.overlay, f"overlay.{secrets.token_hex(8)}"
        layers = self.path / "store" / "layers"
        shutil.copytree(layers / old.info.layer, layers / layer)
        name = self.path / "store" / "overlays" / old.name
        name.write_text(name.read_text().replace(old.info.layer, layer))
        old.layer.close()
        with Overlays(self.store):
            assert [path.name for path in layers.iterdir()] == [layer]
        self._use(Overlay.open(self.store, old.name))
        self.compare()


def _is_file(node: Node) -> bool:
    return node.type is EntryType.FILE


OverlayMachine.TestCase.settings = hypothesis.settings(max_examples=8, stateful_step_count=25, deadline=None)


class TestOverlay(OverlayMachine.TestCase):
    """The tree is what POSIX says, after every change, and after every end and crash."""


class _Long(OverlayMachine):
    pass


_Long.TestCase.settings = hypothesis.settings(max_examples=300, stateful_step_count=60, deadline=None)


@pytest.mark.slow
class TestOverlayForLong(_Long.TestCase):
    """The same, for longer."""
