"""A private store and its base store, each used and cleaned up in any order: every kept version reads back."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from moonclipfs.store.alternates import copy_version_into, make_private_store
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from tests.store.kit import contents, noise, publish, series

STEPS = series(6, 2000)
FILES = st.dictionaries(st.sampled_from(["m.safetensors", "n", "o"]), st.integers(0, 2 * len(STEPS) - 1), min_size=1)
"""Names, and which bytes: a step of the series, or noise."""


def filled(files: dict[str, int]) -> dict[str, bytes]:
    """The bytes of files."""
    return {name: STEPS[one] if one < len(STEPS) else noise(one, 5000) for name, one in files.items()}


class PrivateStores(RuleBasedStateMachine):
    """What the private store may refer to stays in the base store: nothing can be promised otherwise."""

    kept = Bundle("kept")

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.cache = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = str(self.root / "cache")
        Store.create(self.root / "base").close()
        self.base = Store.open(self.root / "base", write=True)
        self.private = make_private_store(self.root / "state", self.root / "base")
        self.shown: dict[str, dict[str, bytes]] = {}
        self.there: dict[str, dict[str, bytes]] = {}
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "root"):
            assert verify(self.private).problems == []
            assert verify(self.base).problems == []
            self.private.close()
            self.base.close()
            shutil.rmtree(self.root)
            if self.cache is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = self.cache

    @rule(files=FILES)
    def publish_there(self, files: dict[str, int]) -> None:
        """Beside something large that is forgotten again: what stays is repacked."""
        self.count += 1
        name, found = f"b/{self.count}", filled(files)
        publish(self.base, name, {**found, "junk": noise(100 + self.count, 40_000)})
        publish(self.base, name, found)
        self.base.log.forget([(name, 1)])
        self.there[name] = found

    @rule(target=kept, files=FILES)
    def publish_here(self, files: dict[str, int]) -> str:
        self.count += 1
        name = f"p/{self.count}"
        self.shown[name] = filled(files)
        root = publish(self.private, name, self.shown[name]).root
        for _, entry in self.private.walk_directory(root):
            for one in self.private.recipe(entry).object_ids():
                # With no more than CHAIN_DEPTH bases behind it, over both stores.
                assert self.private.index.find(one, usable=True) is not None
        return name

    @rule(name=consumes(kept))
    def forget_here(self, name: str) -> None:
        self.private.log.forget([(name, 1)])
        del self.shown[name]

    @rule(pressed=st.booleans())
    def collect_here(self, pressed: bool) -> None:
        collect(self.private, pressed=pressed, wait_seconds=0)

    @rule(pressed=st.booleans())
    def collect_there(self, pressed: bool) -> None:
        collect(self.base, pressed=pressed, wait_seconds=0)

    @rule(name=kept)
    def copy_there(self, name: str) -> None:
        copy_version_into(self.private, self.private.resolve(name).root, self.base, f"c/{name}", {})
        self.there[f"c/{name}"] = self.shown[name]

    @rule(target=kept)
    def reopen(self) -> object:
        self.private.close()
        self.private = make_private_store(self.root / "state", self.root / "base")
        return multiple()

    @invariant()
    def everything_reads_back(self) -> None:
        if hasattr(self, "root"):
            for store, expected in ((self.private, self.shown), (self.base, self.there)):
                for name, files in expected.items():
                    assert contents(store, name) == files


TestPrivateStores = PrivateStores.TestCase
TestPrivateStores.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
