"""Random changes, seals, remounts and publishes by others: every version is what the layer showed at its moment."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moonclipfs.errors import MoonclipError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.seal import Sealer
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.layers.filekit import encode, overwrite, write_file
from tests.layers.sealkit import LocalEncoder, identities, picture, stored_picture, tree

TOP = b"run/a"
NAMES = st.sampled_from([b"a", b"b", b"c"])
PLACES = st.sampled_from([b"", b"d", b"e", b"d/d"])


class SealMachine(RuleBasedStateMachine):
    """Everything happens below one directory, which is sealed now and then."""

    @initialize()
    def begin(self) -> None:
        self.place = Path(tempfile.mkdtemp())
        Store.create(self.place / "s").close()
        self.store = Store.open(self.place / "s", write=True, index_path=self.place / "i")
        self.now = 10
        self.captured: list[dict[str, tuple[object, ...]]] = []
        self.versions: dict[int, dict[str, tuple[object, ...]]] = {}
        self.open()
        run = self.layer.make(self.layer.root, b"run", EntryType.DIRECTORY, 0o755, 0, 0, 1)
        self.layer.make(run, b"a", EntryType.DIRECTORY, 0o755, 0, 0, 1)

    def open(self) -> None:
        self.layer = Layer.open(self.store, "host")
        self.sealer = Sealer(self.layer, LocalEncoder(self.layer), seal_after=None)

    def teardown(self) -> None:
        if hasattr(self, "layer"):
            self.layer.close()
            self.store.close()
            shutil.rmtree(self.place)

    def at(self, place: bytes) -> Inode | None:
        try:
            inode = self.layer.resolve(TOP + b"/" + place if place else TOP)
        except MoonclipError:
            return None
        return inode if inode.is_directory else None

    def change(self, place: bytes, body: Any) -> None:
        inode = self.at(place)
        self.now += 1
        if inode is not None:
            try:
                body(inode)
            except MoonclipError:
                pass  # as the state is, that cannot be done

    @rule(place=PLACES, name=NAMES, data=st.binary(max_size=3), times=st.sampled_from([1, 40_000]))
    def write(self, place: bytes, name: bytes, data: bytes, times: int) -> None:
        def body(inode: Inode) -> None:
            try:
                found = self.layer.lookup(inode, name)
            except MoonclipError:
                write_file(self.layer, name, data * times, inode)
            else:
                overwrite(self.layer, found, data * times)

        self.change(place, body)

    @rule(place=PLACES, name=st.sampled_from([b"d", b"e"]))
    def mkdir(self, place: bytes, name: bytes) -> None:
        self.change(place, lambda inode: self.layer.make(inode, name, EntryType.DIRECTORY, 0o755, 0, 0, self.now))

    @rule(place=PLACES, name=NAMES)
    def unlink(self, place: bytes, name: bytes) -> None:
        self.change(place, lambda inode: self.layer.unlink(inode, name, self.now))

    @rule(place=PLACES, name=st.sampled_from([b"d", b"e"]))
    def rmdir(self, place: bytes, name: bytes) -> None:
        self.change(place, lambda inode: self.layer.rmdir(inode, name, self.now))

    @rule(
        place=PLACES, name=st.sampled_from([b"a", b"b", b"d", b"e"]), to=PLACES,
        new=st.sampled_from([b"a", b"c", b"d", b"e"]), exchange=st.booleans(),
    )  # fmt: skip
    def rename(self, place: bytes, name: bytes, to: bytes, new: bytes, exchange: bool) -> None:
        def body(inode: Inode) -> None:
            target = self.at(to)
            if target is not None:
                self.layer.rename(inode, name, target, new, self.now, exchange=exchange)

        self.change(place, body)

    @rule(place=PLACES, name=NAMES, to=PLACES, new=NAMES)
    def link(self, place: bytes, name: bytes, to: bytes, new: bytes) -> None:
        def body(inode: Inode) -> None:
            target = self.at(to)
            if target is not None:
                self.layer.link(self.layer.lookup(inode, name), target, new, self.now)

        self.change(place, body)

    @rule(place=PLACES, name=NAMES)
    def chmod(self, place: bytes, name: bytes) -> None:
        self.change(
            place,
            lambda inode: self.layer.set_attributes(
                self.layer.lookup(inode, name), mode=self.now % 0o777, now_ns=self.now
            ),
        )

    @rule()
    def encode(self) -> None:
        encode(self.layer, *self.layer.take_jobs(0.0, urgent=True))

    @rule(wait=st.booleans())
    def seal(self, wait: bool) -> None:
        before, shown = identities(self.layer, TOP.decode()), picture(self.layer, TOP.decode())
        if wait:
            self.publish()
            version = self.sealer.seal(TOP)
            assert version is not None
            self.versions[version.number] = shown
        else:
            self.sealer.seal(TOP, wait=False)
            if len(self.layer.captures) > len(self.captured):
                self.captured.append(shown)
        assert identities(self.layer, TOP.decode()) == before

    @rule()
    def publish(self) -> None:
        before = identities(self.layer, TOP.decode())
        known = self.store.names().highest("run/a")
        self.sealer.tick(float("inf"))
        new = [one for one in self.store.names().versions("run/a") if one.number > known]
        assert len(new) <= len(self.captured)
        if len(new) == len(self.captured):
            for version, shown in zip(new, self.captured, strict=True):
                self.versions[version.number] = shown
        self.captured = []
        self.layer.refresh(self.now)
        assert identities(self.layer, TOP.decode()) == before
        self.check()

    @rule(rewrite=st.booleans(), crash=st.booleans())
    def reopen(self, rewrite: bool, crash: bool) -> None:
        before, shown = identities(self.layer, TOP.decode()), tree(self.layer)
        self.layer.sync_all()
        if rewrite:
            self.layer.files.checkpoint()
        self.layer.close()
        self.open()
        assert len(self.layer.captures) == len(self.captured)
        assert tree(self.layer) == shown
        assert identities(self.layer, TOP.decode()) == before

    @precondition(lambda self: hasattr(self, "layer"))
    @rule()
    def check(self) -> None:
        for version in self.store.names().versions("run/a"):
            if version.number in self.versions:
                assert stored_picture(self.store, version) == self.versions[version.number]


SealMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestSeals = SealMachine.TestCase
