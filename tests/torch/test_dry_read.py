"""What a program that learns while it reads needs of an overlay: nothing is lost in it, and nothing gets out of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import moonclipfs
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.alternates import make_private_store
from moonclipfs.store.store import Store
from moonclipfs.torch import ExpertStore, ExpertTiers, PagedExperts
from tests.fuse.conftest import Mounter, fuse, mounter
from tests.layers.expertkit import mixtral, shards
from tests.layers.publish import publish
from tests.nobody import Nobody
from tests.store.kit import contents
from tests.torch.expertkit import bits, expert, files, with_moments

__all__ = ["fuse", "mounter"]


def expert_files(tmp_path: Path, count: int = 3) -> dict[str, bytes]:
    """The files of experts with moments packed as mini-AGI packs them, made beside the store."""
    place = ExpertStore(tmp_path / "made", file_format="npz")
    for number in range(count):
        if not place.exists(number):
            place.write(number, with_moments(number, torch.bfloat16))
    return files(place.root)


def everything(root: Path) -> dict[str, tuple[object, ...]]:
    """Of every file and directory below a path: what stat tells, but the time of the last read, and a digest."""
    found = {}
    for path in (root, *root.rglob("*")):
        stat = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (
            stat.st_mode, stat.st_nlink, stat.st_size, stat.st_uid, stat.st_mtime_ns, stat.st_ctime_ns, digest,
        )  # fmt: skip
    return found


def learn(experts: PagedExperts, number: int) -> dict[str, torch.Tensor]:
    """Train one expert for two steps, and return it with its moments."""
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1)
    experts.attach_optimizer(optimizer)
    experts.swap_to([number])
    for _ in range(2):
        optimizer.zero_grad()
        sum(one.square().sum() for one in experts.slot_of(number).tensors().values()).backward()
        optimizer.step()
    tensors = experts.tensors_of(number)
    assert not torch.equal(tensors["w1"], expert(number)["w1"]) and tensors["w1_m"].any()
    return tensors


@pytest.fixture
def overlays(store: Store, tmp_path: Path) -> Iterator[Overlays]:
    """Those of a store with the snapshot `run`, which holds experts."""
    publish(store, "run", {"experts": expert_files(tmp_path), "core.npz": b"core"})
    with Overlays(store) as opened:
        yield opened


def paged(overlay: Overlay) -> PagedExperts:
    """The experts of an overlay, through one slot and a RAM of one."""
    return PagedExperts(ExpertTiers(ExpertStore(LayerPath(overlay, "experts")), 1), 1)


def test_a_changed_expert_comes_back_with_its_moments_and_the_base_does_not_change(
    store: Store, overlays: Overlays, tmp_path: Path
) -> None:
    before, root = contents(store, "run"), store.resolve("run").root
    experts = paged(overlays.create("dry", "run", dry_run=True))
    learned = learn(experts, 0)
    for number in (1, 2, 0):
        experts.swap_to([number])
    assert bits(experts.tensors_of(0)) == bits(learned)
    experts.flush()
    assert bits(experts.tiers.store.read(0)) == bits(learned)
    assert contents(store, "run") == before and store.resolve("run").root == root
    overlays.discard("dry")
    assert overlays.infos() == [] and not list((store.path / "layers").glob("overlay.*")), "nothing is left"
    assert contents(store, "run") == before


def test_a_deleted_expert_stays_deleted_in_the_overlay_and_exists_in_the_base(store: Store, overlays: Overlays) -> None:
    experts = paged(overlays.create("dry", "run"))
    experts.swap_to([1])
    experts.prune([1])
    assert experts.add(like=0) == 3
    experts.flush()
    experts.tiers.close()
    overlays.get("dry").flush()
    overlays.release(overlays.get("dry"))
    again = ExpertStore(LayerPath(overlays.get("dry"), "experts"))
    assert again.ids() == [0, 2, 3] and not again.exists(1)
    assert bits(again.read(3)) == bits(expert(0))
    assert b"e00001.npz" in b" ".join(name.encode() for name in contents(store, "run"))


def test_a_fresh_model_made_in_an_overlay_exists_only_there(store: Store, overlays: Overlays) -> None:
    overlay = overlays.create("fresh", "")
    place = ExpertStore(LayerPath(overlay, "weights/experts"))
    for number in range(3):
        place.create(expert(number))
    learn(PagedExperts(ExpertTiers(place, 1), 1), 2)
    assert place.ids() == [0, 1, 2]
    assert list(store.names().bound()) == ["run"]
    overlays.discard("fresh")
    assert list(store.names().bound()) == ["run"] and overlays.infos() == []


def test_a_commit_holds_exactly_what_the_overlay_showed(store: Store, overlays: Overlays, tmp_path: Path) -> None:
    overlay = overlays.create("trial", "run")
    experts = paged(overlay)
    learned = learn(experts, 0)
    experts.prune([1])
    experts.add(like=2)
    experts.flush()
    shown = {path.name: path.read_bytes() for path in LayerPath(overlay, "experts").iterdir()}
    assert shown.keys() == {"e00000.npz", "e00002.npz", "e00003.npz", ".next-expert"}
    overlay.commit("read")
    experts.swap_to([2])
    with torch.no_grad():
        experts.slot_of(2)["w1"].zero_()  # after the commit: it is not in it
    experts.flush()
    committed = contents(store, "read")
    assert committed == {"core.npz": b"core", **{f"experts/{name}": data for name, data in shown.items()}}
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "e00000.npz").write_bytes(committed["experts/e00000.npz"])
    assert bits(ExpertStore(tmp_path / "again").read(0)) == bits(learned)


def test_over_a_base_that_cannot_be_written_as_a_user_without_rights(
    nobody: Nobody, store: Store, tmp_path: Path
) -> None:
    publish(store, "run", {"experts": expert_files(tmp_path)})
    expected = contents(store, "run")
    store.close()
    with nobody.copy(store.path) as base:
        for path in (base, *base.rglob("*")):
            path.chmod(0o500 if path.is_dir() else 0o400)
        state = base.parent / "state"
        state.mkdir()
        state.chmod(0o777)
        before = everything(base)

        def read() -> None:
            os.environ["XDG_CACHE_HOME"] = str(state / "cache")
            with make_private_store(state / "store", base) as private, Overlays(private) as opened:
                overlay = opened.create("dry", "run", dry_run=True)
                experts = paged(overlay)
                learned = learn(experts, 0)
                experts.prune([1])
                for number in (2, 0):
                    experts.swap_to([number])
                assert bits(experts.tensors_of(0)) == bits(learned)
                experts.flush()
                opened.release(opened.get("dry"))
                again = ExpertStore(LayerPath(opened.get("dry"), "experts"))
                assert again.ids() == [0, 2] and bits(again.read(0)) == bits(learned)
                opened.discard("dry")

        nobody.run(read)
        assert everything(base) == before
    with Store.open(store.path) as opened:
        assert contents(opened, "run") == expected


def test_experts_of_any_mixture_are_paged_from_a_mount(store: Store, mounter: Mounter) -> None:
    arrays = mixtral(layers=2, experts=3)
    publish(store, "mix", shards(arrays))
    place = mounter(store.path).path / "@experts" / "mix"
    experts = PagedExperts(ExpertTiers(ExpertStore(place, read_only=True), 2, prefetch=2), 4)
    assert experts.ids() == [(layer, number) for layer in range(2) for number in range(3)]
    wanted = [(0, 2), (1, 0), (1, 1)]
    experts.swap_to(wanted)
    for layer, number in wanted:
        for name, parameter in experts.slot_of((layer, number)).tensors().items():
            array = arrays[f"model.layers.{layer}.block_sparse_moe.experts.{number}.{name}"]
            assert torch.equal(parameter, torch.from_numpy(array))
    experts.flush()
    experts.tiers.close()


def test_a_mixture_is_trained_by_its_experts_in_an_overlay_of_a_mount(store: Store, mounter: Mounter) -> None:
    arrays = mixtral(layers=2, experts=3)
    publish(store, "mix", shards(arrays))
    before = contents(store, "mix")
    mounted = mounter(store.path, read_only=False, seal_after=None)
    with moonclipfs.dry_run(mounted.path, "mix", commit="mix-2") as path:
        place = mounted.path / "@experts" / path.relative_to(mounted.path)
        experts = PagedExperts(ExpertTiers(ExpertStore(place), 1), 1)
        optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1)
        experts.attach_optimizer(optimizer, in_files=False)
        for expert_id in ((0, 1), (1, 2)):
            experts.swap_to([expert_id])
            optimizer.zero_grad()
            sum(one.square().sum() for one in experts.slot_of(expert_id).tensors().values()).backward()
            optimizer.step()
        learned = {name: one.detach().clone() for name, one in experts.slot_of((1, 2)).tensors().items()}
        experts.flush()
        assert experts.tiers.writebacks == 2
    assert contents(store, "mix") == before
    found = {}
    for name, data in contents(store, "mix-2").items():
        assert len(data) == len(before[name])
        found.update(load(data))
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, torch.from_numpy(arrays[name]))}
    assert changed == {
        f"model.layers.{layer}.block_sparse_moe.experts.{number}.{part}.weight"
        for layer, number in ((0, 1), (1, 2))
        for part in ("w1", "w2", "w3")
    }
    for name, tensor in learned.items():
        assert torch.equal(found[f"model.layers.1.block_sparse_moe.experts.2.{name}"], tensor)
