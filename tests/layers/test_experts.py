"""`@experts` without a mount: files made of the bytes of others."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from moonclipfs import limits
from moonclipfs.errors import CorruptError, NotFoundError
from moonclipfs.formats import experts as recognition
from moonclipfs.formats.layout import Layout
from moonclipfs.layers import experts
from moonclipfs.layers.names import Area
from moonclipfs.layers.tree import Node, NotCachedError, Tree
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, Entry
from tests.layers.expertkit import (
    Arrays,
    Expert,
    fused,
    fused_expert,
    gguf,
    mixtral,
    mixtral_expert,
    random,
    shards,
    torch_file,
)
from tests.layers.publish import MTIME, File, publish


def at(tree: Tree, path: str) -> Node:
    return tree.resolve(Area.EXPERTS, path.encode())


def read(tree: Tree, path: str) -> bytes:
    node = at(tree, path)
    reader = tree.open(node)
    assert reader.size == tree.stat(node).size
    return reader.read(0, reader.size)


def tensors_of(data: bytes, place: Path) -> Expert:
    """What safetensors' own loader finds in a file of these bytes."""
    place.write_bytes(data)
    with safe_open(place, "numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - it is no mapping


def listed(tree: Tree, path: str) -> list[str]:
    return [name.decode() for name in tree.names_in(at(tree, path))]


def test_every_snapshot_has_a_directory_of_its_experts(store: Store, tmp_path: Path) -> None:
    """@experts/NAME/L003/e00017.safetensors is a safetensors file of one expert of one layer."""
    arrays = mixtral(layers=2, experts=3)
    publish(store, "run1/ckpt", {"model.safetensors": save(arrays), "config.json": b"{}"})
    publish(store, "run1/dense", {"model.safetensors": save({"w": random(2, 2)})})
    tree = Tree(store)
    assert listed(tree, "") == ["run1"]
    assert listed(tree, "run1") == ["ckpt", "dense"]
    assert listed(tree, "run1/ckpt") == ["L000", "L001"]
    assert listed(tree, "run1/ckpt/L001") == [f"e{number:05}.safetensors" for number in range(3)]
    assert listed(tree, "run1/dense") == []
    for layer in range(2):
        for number in range(3):
            data = read(tree, f"run1/ckpt/L{layer:03}/e{number:05}.safetensors")
            assert tensors_of(data, tmp_path / "x") == mixtral_expert(arrays, layer, number)
    for missing in ("run1/ckpt/model.safetensors", "run1/ckpt/L002", "run1/ckpt/L001/e00003.safetensors", "none"):
        with pytest.raises(NotFoundError):
            at(tree, missing)


def test_parts_of_an_expert_come_from_several_files(store: Store, tmp_path: Path) -> None:
    """Tensors of one expert that lie in different files of a directory come together."""
    arrays = mixtral(layers=1, experts=2)
    publish(store, "a", shards(arrays))
    tree = Tree(store)
    assert tensors_of(read(tree, "a/L000/e00001.safetensors"), tmp_path / "x") == mixtral_expert(arrays, 0, 1)


def test_experts_of_a_directory_inside_a_snapshot(store: Store, tmp_path: Path) -> None:
    """A checkpoint in a directory of a snapshot has its experts at the same path below @experts."""
    arrays = fused(experts=4)
    publish(store, "run", {"sub": {"deep": {"model.safetensors": save(arrays)}}, "empty": {}, "x": b"1"})
    publish(store, "run/bound", {"model.safetensors": save(arrays)})
    tree = Tree(store)
    assert listed(tree, "run") == ["bound", "empty", "sub"]
    assert listed(tree, "run/bound") == listed(tree, "run/sub/deep") == ["L003"]
    data = read(tree, "run/sub/deep/L003/e00002.safetensors")
    assert tensors_of(data, tmp_path / "x") == fused_expert(arrays, 2)
    assert read(tree, "run/bound/L003/e00002.safetensors") == data


def whole(arrays: Arrays, path: str, expected: Expert, files: dict[str, bytes], store: Store, place: Path) -> None:
    publish(store, "a", files)
    assert tensors_of(read(Tree(store), f"a/{path}"), place) == expected


def test_experts_of_torch_files(store: Store, tmp_path: Path) -> None:
    """Tensors of torch.save are offered as safetensors files too, where their bytes are one run."""
    arrays = mixtral(layers=1, experts=2)
    expected = mixtral_expert(arrays, 0, 1)
    whole(arrays, "L000/e00001.safetensors", expected, {"pytorch_model.bin": torch_file(arrays)}, store, tmp_path / "x")


def test_experts_of_gguf_files(store: Store, tmp_path: Path) -> None:
    """Experts of a GGUF file hold whole rows of blocks as bytes, and their heads name the kind of blocks."""
    q8 = np.random.default_rng(0).bytes(3 * 4 * 34)
    full = random(3, 2, 32)
    files = {
        "m.gguf": gguf(
            {
                "blk.0.ffn_up_exps.weight": (8, (32, 4, 3), q8),
                "blk.0.ffn_down_exps.weight": (0, (32, 2, 3), full.tobytes()),
            }
        )
    }
    expected = {"ffn_up.weight": q8[2 * 136 :], "ffn_down.weight": full[2].tobytes()}
    whole({}, "L000/e00002.safetensors", expected, files, store, tmp_path / "x")
    with safe_open(tmp_path / "x", "numpy") as file:
        assert file.metadata()["kind:ffn_up.weight"] == "Q8_0 [4, 32]"
        assert file.get_tensor("ffn_up.weight").shape == (4, 34)


def test_experts_that_are_files_are_offered_as_they_are(store: Store) -> None:
    """Files called e00017.npz, .safetensors or .pt are experts, and the very same files."""
    pool = {
        "e00000.npz": b"PK not looked at",
        "e00012.npz": b"x" * 9,
        "e00012.npz.tmp": b"half",
        ".e00013.npz": b"half",
    }
    publish(store, "pool", {"experts": {**pool, "index.json": b"{}"}, "e00001.safetensors": b"y"})
    tree = Tree(store)
    assert listed(tree, "pool") == ["e00001.safetensors", "experts"]
    assert listed(tree, "pool/experts") == ["e00000.npz", "e00012.npz"]
    assert read(tree, "pool/experts/e00012.npz") == b"x" * 9


def test_experts_take_nothing_in_the_store(store: Store) -> None:
    """What is read below @experts is the bytes of the same objects: it takes no space."""
    arrays = fused(experts=2, inner=1500, outer=300)
    publish(store, "a", {"model.safetensors": save(arrays)})
    before = sorted((path, path.stat().st_size) for path in store.path.rglob("*") if path.is_file())
    tree = Tree(store)
    reader = tree.open(at(tree, "a/L003/e00001.safetensors"))
    data = reader.read(0, reader.size)
    objects = {*store.recipe(store.lookup(store.resolve("a"), b"model.safetensors")).object_ids()}
    assert objects.issuperset(reader.recipe.object_ids())
    assert sum(extent.length for extent in reader.recipe.extents if extent.literal is not None) < 1000
    assert sorted((path, path.stat().st_size) for path in store.path.rglob("*") if path.is_file()) == before
    assert reader.cached(5000, 100) == data[5000:5100]
    out = bytearray(64)
    assert reader.read_into(len(data) - 10, memoryview(out)) == 10
    assert out[:10] == data[-10:]


def test_what_stat_says_of_experts(store: Store) -> None:
    """An expert's file has the latest times of the files that it is made of, and may be read by who may read these."""
    first, second = shards(mixtral(layers=1, experts=1)).items()
    files = {first[0]: File(first[1], 0o640), second[0]: File(second[1], 0o604, MTIME + 5)}
    publish(store, "a", files)
    tree, again = Tree(store), Tree(store)
    node = at(tree, "a/L000/e00000.safetensors")
    file = tree.stat(node)
    assert (file.mode, file.mtime_ns, file.nlink) == (stat.S_IFREG | 0o400, MTIME + 5, 1)
    layer = at(tree, "a/L000")
    assert tree.stat(layer).mode == stat.S_IFDIR | 0o500
    assert node.inode == at(again, "a/L000/e00000.safetensors").inode
    assert len({tree.root.inode, at(tree, "").inode, at(tree, "a").inode, layer.inode, node.inode}) == 5
    assert at(tree, "a").inode != tree.resolve(Area.LIVE, b"a").inode
    assert tree.xattr(node, b"user.moonclip.snapshot") == b"a"
    with pytest.raises(NotFoundError):
        tree.xattr(node, b"user.moonclip.stored_size")


def test_files_of_different_owners_are_read_by_who_may_read_each(store: Store) -> None:
    mine, other = Attributes(0o644, 1, 1), Attributes(0o640, 2, 1)
    assert experts._attributes([mine, mine]).mode == 0o444
    assert experts._attributes([mine, other]).mode == 0
    assert experts._attributes([mine, Attributes(0o644, 2, 1)]).mode == 0o444


def test_nothing_is_looked_for_before_a_directory_is_opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing @experts reads no checkpoint; opening one does, once, and never where nothing may wait."""
    count: list[int] = []

    def recognise(files: Iterable[tuple[str, Layout]]) -> recognition.Layers:
        count.append(1)
        return recognition.recognise(files)

    monkeypatch.setattr(experts, "recognise", recognise)
    for name in ("a", "b"):
        publish(store, name, {"model.safetensors": save(mixtral(layers=1, experts=2))})
    tree = Tree(store)
    top = at(tree, "")
    tree.children(top, tree.names_in(top))
    assert not count
    node = at(tree, "a")
    with pytest.raises(NotCachedError):
        tree.names_in(node, wait=False)
    threads = [threading.Thread(target=tree.names_in, args=[node]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    layer = tree.lookup(node, b"L000", wait=False)
    assert tree.names_in(layer, wait=False) == [b"e00000.safetensors", b"e00001.safetensors"]
    tree.children(layer, tree.names_in(layer), wait=False)
    assert len(count) == 1


def test_experts_are_found_again_when_they_were_too_many_to_keep(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(limits, "EXPERT_CACHE_PARTS", 20)
    arrays = mixtral(layers=1, experts=2)
    publish(store, "a", {"model.safetensors": save(arrays)})
    publish(store, "b", {"model.safetensors": save(fused(experts=30))})
    tree = Tree(store)
    node = at(tree, "a/L000/e00001.safetensors")
    for number in range(3):
        assert len(listed(tree, "b/L003")) == 30
        at(tree, f"b/L003/e0000{number}.safetensors")
    publish(store, "c", {"model.safetensors": save(mixtral(layers=3, experts=2))})
    tree.adopt(tree.look(0) or tree.view)
    assert listed(tree, "c") == ["L000", "L001", "L002"]
    reader = tree.open(node)
    assert tensors_of(reader.read(0, reader.size), tmp_path / "x") == mixtral_expert(arrays, 0, 1)


def test_broken_files_take_nothing_from_others(store: Store) -> None:
    data = save(mixtral(layers=1, experts=2))
    files = {"model.safetensors": data, "cut.safetensors": data[:60], "x.gguf": b"GGUF" + b"\xff" * 99, "y.pt": b"PK"}
    publish(store, "a", {**files, "z.npz": b"", "d.safetensors": {}, "l.safetensors": "model.safetensors"})
    assert listed(Tree(store), "a") == ["L000", "d.safetensors"]


def test_a_damaged_file_is_told_and_not_left_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the head of a file cannot be read, nobody is told that there are no experts: listing them is an error."""
    publish(store, "a", {"model.safetensors": save(mixtral(layers=1, experts=2)), "sub": {"x": b""}})
    tree = Tree(store)

    def damaged(entry: Entry) -> Layout:
        raise CorruptError(f"a flipped bit in {entry.name!r}")

    monkeypatch.setattr(store, "layout", damaged)
    with pytest.raises(CorruptError, match="flipped"):
        listed(tree, "a")
    assert listed(tree, "") == ["a"]
    monkeypatch.undo()
    assert listed(tree, "a") == ["L000", "sub"]
