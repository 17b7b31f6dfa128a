"""Two layers change one directory at random: once both have sealed, both show what the newest version holds."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from moonclipfs.errors import MoonclipError
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.seal import Sealer
from moonclipfs.store.store import Store
from tests.layers.sealkit import LocalEncoder, directory, picture, put, stored_picture

TOP = "run/a"
PATHS = st.sampled_from(["x", "y", "d/x", "d/y", "e/x"])
OPERATIONS = st.tuples(
    st.booleans(), st.sampled_from(["put", "unlink", "rename", "link", "seal", "refresh"]), PATHS, PATHS
)


def change(layer: Layer, sealer: Sealer, what: str, path: str, other: str, now: int) -> None:
    """Do one thing, if it can be done."""
    above, _, name = f"{TOP}/{path}".encode().rpartition(b"/")
    try:
        if what == "put":
            put(layer, f"{TOP}/{path}", b"%d" % now * 30)
        elif what == "unlink":
            layer.unlink(layer.resolve(above), name, now)
        elif what in ("rename", "link"):
            target, _, new = f"{TOP}/{other}".rpartition("/")
            place = directory(layer, target, now)
            if what == "rename":
                layer.rename(layer.resolve(above), name, place, new.encode(), now)
            else:
                layer.link(layer.lookup(layer.resolve(above), name), place, new.encode(), now)
        elif what == "seal":
            sealer.seal(TOP.encode())
        else:
            layer.refresh(now)
    except MoonclipError:
        pass  # as the state is, that cannot be done


@settings(max_examples=40)
@given(st.lists(OPERATIONS, max_size=25))
def test_two_layers_come_to_show_the_same(operations: list[tuple[bool, str, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        Store.create(Path(place) / "s").close()
        with Store.open(Path(place) / "s", write=True, index_path=Path(place) / "i") as store:
            layers = [Layer.open(store, name) for name in ("one", "two")]
            sealers = [Sealer(layer, LocalEncoder(layer), seal_after=None) for layer in layers]
            for layer in layers:
                put(layer, f"{TOP}/base-{layer.name}", b"b")
            for now, (which, what, path, other) in enumerate(operations, 10):
                change(layers[which], sealers[which], what, path, other, now)
            for _ in range(2):
                for layer, sealer in zip(layers, sealers, strict=True):
                    layer.refresh(1000)
                    sealer.seal(TOP.encode())
            newest = store.names().bound()[TOP]
            for layer in layers:
                layer.refresh(1001)
                assert picture(layer, TOP) == stored_picture(store, newest)
                assert layer.conflicts() == []
                layer.close()
            again = Layer.open(store, "one")
            assert picture(again, TOP) == stored_picture(store, newest)
            again.close()
