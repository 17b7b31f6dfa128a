"""Experts of an overlay: read through its present contents, and written to in place and by renames."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.numpy import load, save

import moonclipfs
from moonclipfs import limits
from moonclipfs.errors import (
    BusyError,
    DirectoryError,
    ExistsError,
    MoonclipError,
    NoSpaceError,
    NotFoundError,
    NotPermittedError,
    QuotaError,
    TooManyOpenError,
    UsageError,
)
from moonclipfs.formats.experts import Component, Layers, recognise
from moonclipfs.formats.layout import Layout
from moonclipfs.layers.contents_records import content_of
from moonclipfs.layers.expertinodes import ExpertInode, Kind
from moonclipfs.layers.expertsknown import KnownExperts
from moonclipfs.layers.experttables import Expert, Source
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlayexperts import OverlayExperts
from moonclipfs.layers.staging import Generation
from moonclipfs.layers.tree import NotCachedError
from moonclipfs.store.cache import BoundedCache
from moonclipfs.store.store import Store
from moonclipfs.types import DType, EntryType
from tests.layers import filekit
from tests.layers.expertkit import Arrays, fused, fused_expert, gguf, mixtral, random, shards, torch_file
from tests.layers.overlaykit import LocalOverlayEncoder, create, everything
from tests.layers.publish import publish

NOW = 1_700_000_000_000_000_000
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
EXPERT = "L001/e00002.safetensors"
PART = "model.layers.1.block_sparse_moe.experts.2."
ARRAYS = mixtral(layers=2, experts=3, rows=600)


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.layers.overlay.OverlayEncoder", LocalOverlayEncoder)


@pytest.fixture(scope="module")
def files() -> Mapping[str, bytes]:
    """The files of a checkpoint with the parts of each expert in two of them."""
    return shards(ARRAYS)


@pytest.fixture
def overlay(store: Store, files: Mapping[str, bytes]) -> Iterator[Overlay]:
    publish(store, "base", {**files, "config.json": b"{}", "pool": {"e00003.npz": b"PK", "notes": b""}})
    made = create(store, "one", "base")
    yield made
    made.close()


@pytest.fixture
def experts(overlay: Overlay) -> OverlayExperts:
    return experts_of(overlay)


def read_all(overlay: Overlay, path: str) -> bytes:
    return filekit.read_all(overlay.layer, overlay.layer.resolve(path.encode()))


def write_file(overlay: Overlay, name: str, data: bytes) -> None:
    """Write a file of the root of an overlay, old or new, from its beginning."""
    layer = overlay.layer
    try:
        inode = layer.resolve(name.encode())
        layer.truncate(inode, 0, NOW)
    except NotFoundError:
        inode = filekit.make_file(layer, name.encode())
    overwrite(overlay, name, 0, data)


def overwrite(overlay: Overlay, name: str, offset: int, data: bytes) -> None:
    """Write a part of a file of the root of an overlay."""
    file = overlay.layer.open_file(overlay.layer.resolve(name.encode()), write=True)
    file.write(offset, data, NOW)
    file.close()


def experts_of(overlay: Overlay) -> OverlayExperts:
    return OverlayExperts(overlay.layer, BoundedCache(limits.EXPERT_CACHE_PARTS))


def at(experts: OverlayExperts, path: str) -> Inode:
    return experts.resolve(path.encode())


def read(experts: OverlayExperts, path: str = EXPERT) -> Arrays:
    """The tensors of an expert, by the file that it is."""
    inode = at(experts, path)
    file = experts.open_file(inode, write=False)
    data = file.read(0, file.size + 10)
    assert len(data) == file.size == experts.stat(inode).size
    file.close()
    return load(data)


def expected(arrays: Arrays = ARRAYS, prefix: str = PART) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def big(overlay: Overlay) -> Arrays:
    """All tensors of the overlay, by its large files."""
    return {name: array for file in (FIRST, SECOND) for name, array in load(read_all(overlay, file)).items()}


def temporary(experts: OverlayExperts, data: bytes, directory: str = "L001", name: bytes = b".tmp") -> Inode:
    """Make a file beside experts."""
    made = experts.make(at(experts, directory), name, EntryType.FILE, 0o600, 0, 0, NOW)
    file = experts.open_file(made, write=True)
    for start in range(0, len(data), 10_000):
        file.write(start, data[start : start + 10_000], NOW)
    file.flush()
    file.close()
    return made


def replace(experts: OverlayExperts, data: bytes, path: str = EXPERT) -> None:
    """What a program does that writes a file anew and renames it over the old one."""
    directory, _, name = path.rpartition("/")
    temporary(experts, data, directory)
    experts.rename(at(experts, directory), b".tmp", at(experts, directory), name.encode(), NOW)


def changed(by: float = 1.0) -> Arrays:
    return {name: array + np.float32(by) for name, array in expected().items()}


# Reading


def test_the_experts_of_an_overlay_show_its_present_contents(overlay: Overlay, experts: OverlayExperts) -> None:
    """@experts/@overlays/NAME shows the experts of an overlay as its files are, also when these change."""
    assert experts.names_in(experts.root) == [b"L000", b"L001", b"pool"]
    assert experts.names_in(at(experts, "L001")) == [
        b"e00000.safetensors",
        b"e00001.safetensors",
        b"e00002.safetensors",
    ]
    assert same(read(experts), expected())
    array = ARRAYS[PART + "w2.weight"] * 2
    data = read_all(overlay, SECOND)
    place = data.index(ARRAYS[PART + "w2.weight"].tobytes())
    overwrite(overlay, SECOND, place, array.tobytes())
    assert same(read(experts), {**expected(), "w2.weight": array})
    number = at(experts, EXPERT).number
    # The same tensors at other places, with more experts.
    more = {name: array for name, array in mixtral(layers=2, experts=4, rows=600).items() if "w2" in name}
    write_file(overlay, SECOND, save(more, metadata={"longer": "x" * 500}))
    assert same(read(experts), expected())
    assert at(experts, EXPERT).number != number
    assert len(experts.names_in(at(experts, "L001"))) == 3, "the fourth has no gates"
    overlay.layer.unlink(overlay.layer.root, SECOND.encode(), NOW)
    assert read(experts).keys() == {"w1.weight", "w3.weight"}
    overlay.layer.unlink(overlay.layer.root, FIRST.encode(), NOW)
    assert experts.names_in(experts.root) == [b"pool"]


def test_directories_and_files_that_are_experts_are_mirrored(overlay: Overlay, experts: OverlayExperts) -> None:
    assert experts.names_in(at(experts, "pool")) == [b"e00003.npz"]
    assert at(experts, "pool/e00003.npz") is overlay.layer.resolve(b"pool/e00003.npz")
    with pytest.raises(NotFoundError):
        at(experts, "pool/notes")
    for path in (FIRST, "L002", "L001/e00003.safetensors", "L001/x", "none"):
        with pytest.raises(NotFoundError):
            at(experts, path)
    layer = at(experts, "L001")
    assert [entry and entry[0] for entry in experts.children(layer, [b".", b".."])] == [layer, experts.root]
    (above,) = experts.children(at(experts, "pool"), [b".."])
    assert above is not None and above[0] is experts.root


def test_a_table_is_read_again_only_when_heads_changed(
    overlay: Overlay, experts: OverlayExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to tensors, by experts or by large files, parses nothing again."""
    count: list[int] = []

    def counted(files: Iterable[tuple[str, Layout]]) -> Layers:
        count.append(1)
        return recognise(files)

    monkeypatch.setattr("moonclipfs.layers.experttables.recognise", counted)
    assert same(read(experts), expected())
    replace(experts, save(changed()))
    overwrite(overlay, FIRST, len(read_all(overlay, FIRST)) - 4, b"\0\0\0\0")
    overlay.flush()
    read(experts)
    write_file(overlay, "notes.txt", b"x")
    read(experts)
    assert len(count) == 1
    overwrite(overlay, FIRST, 0, read_all(overlay, FIRST)[:8])
    read(experts)
    assert len(count) == 1, "the same bytes were written"
    write_file(overlay, FIRST, read_all(overlay, FIRST) + b"\0" * 8)
    read(experts)
    assert len(count) == 2


def test_changes_that_the_journal_does_not_have_yet_are_seen(overlay: Overlay, experts: OverlayExperts) -> None:
    """Of a file that is open and being written, every change counts, also between records of the journal."""
    file = overlay.layer.open_file(overlay.layer.resolve(SECOND.encode()), write=True)
    data = file.read(0, file.size)
    file.write(len(data) - 1, data[-1:], NOW)
    assert read(experts).keys() == {"w1.weight", "w2.weight", "w3.weight"}
    file.write(0, b"\0" * 16, NOW)
    assert read(experts).keys() == {"w1.weight", "w3.weight"}
    file.write(0, data[:16], NOW)
    assert same(read(experts), expected())
    file.close()


def test_what_would_wait_is_not_told_without_waiting(overlay: Overlay) -> None:
    experts = experts_of(overlay)
    with pytest.raises(NotCachedError):
        experts.names_in(experts.root, wait=False)
    layer = at(experts, "L001")
    expert = at(experts, EXPERT)
    assert experts.children(layer, experts.names_in(layer, wait=False), wait=False)[2] is not None
    experts.open_file(expert, write=False, wait=False).close()
    temporary(experts, b"x")
    with pytest.raises(NotCachedError):
        experts.rename(layer, b".tmp", layer, b"e00002.safetensors", NOW, wait=False)


def test_what_stat_says_of_experts_of_an_overlay(overlay: Overlay, experts: OverlayExperts) -> None:
    expert = at(experts, EXPERT)
    before = experts.stat(expert)
    assert before.mode & 0o777 == 0o644
    overlay.layer.set_attributes(overlay.layer.resolve(SECOND.encode()), now_ns=NOW + 5, mode=0o440)
    status = experts.stat(expert)
    assert (status.mode & 0o777, status.ctime_ns, status.mtime_ns) == (0o440, NOW + 5, before.mtime_ns)
    assert experts.path(expert) == EXPERT.encode()
    assert experts.xattr(expert, b"user.moonclip.overlay") == b"one"
    assert experts.xattr_names(expert) == []
    with pytest.raises(NotFoundError):
        experts.xattr(expert, b"user.moonclip.stored_size")


def test_an_open_expert_stays_what_it_was(overlay: Overlay, experts: OverlayExperts) -> None:
    """An expert's file that is open reads the files that it was made of, whatever takes their names."""
    inode = at(experts, EXPERT)
    file = experts.open_file(inode, write=False)
    write_file(overlay, "new", b"no checkpoint")
    root = overlay.layer.root
    for name in (FIRST, SECOND):
        overlay.layer.unlink(root, name.encode(), NOW)
    overlay.layer.rename(root, b"new", root, FIRST.encode(), NOW)
    assert same(load(file.read(0, file.size)), expected())
    file.close()
    with pytest.raises(NotFoundError):
        experts.open_file(inode, write=False)


# Writing


def test_a_rename_over_an_expert_replaces_its_bytes_in_the_large_files(
    overlay: Overlay, experts: OverlayExperts
) -> None:
    """A file that is renamed over an expert becomes it: its bytes are those of the large files from then on."""
    base = everything(overlay.layer)
    replace(experts, save(changed(), metadata={"other": "words"}))
    assert same(read(experts), changed())
    wanted = {**ARRAYS, **{PART + name: array for name, array in changed().items()}}
    assert same(big(overlay), wanted)
    assert everything(overlay.layer).keys() == base.keys()
    version = overlay.commit("kept")
    store = overlay.store
    for file in (FIRST, SECOND):
        reader = store.open_file(store.lookup(version, file.encode()))
        assert same(
            load(reader.read(0, reader.size)),
            {name: wanted[name] for name in wanted if ("w2" in name) == (file == SECOND)},
        )
    reader = store.open_file(store.lookup(store.resolve("base"), SECOND.encode()))
    assert np.array_equal(load(reader.read(0, reader.size))[PART + "w2.weight"], ARRAYS[PART + "w2.weight"])
    assert same(read(experts), changed())


@pytest.mark.parametrize("settled", [True, False])
def test_replaced_experts_are_there_when_the_overlay_is_opened_again(
    store: Store, overlay: Overlay, settled: bool
) -> None:
    """What was written to experts is kept in the overlay's files, as any change of these."""
    experts = experts_of(overlay)
    replace(experts, save(changed()))
    temporary(experts, b"left behind")
    if settled:
        overlay.flush()
    overlay.close()
    with Overlay.open(store, "one") as again:
        assert same(read(experts_of(again)), changed())
        names = again.layer.names_in(again.layer.root)
        assert names == [b"config.json", FIRST.encode(), SECOND.encode(), b"pool"]
        assert experts_of(again).names_in(at(experts_of(again), "L001"))[0] == b"e00000.safetensors"
        again.layer.sync_all()
        assert again.layer.staging.used == (0 if settled else 3 * 600 * 8 * 4)


WRONG: dict[str, Callable[[Arrays], bytes]] = {
    "another name": lambda arrays: save({name.replace("w1", "w4"): one for name, one in arrays.items()}),
    "one less": lambda arrays: save({name: one for name, one in arrays.items() if name != "w2.weight"}),
    "one more": lambda arrays: save({**arrays, "w4.weight": random(2)}),
    "another shape": lambda arrays: save({name: one.reshape(8, 600) for name, one in arrays.items()}),
    "another dtype": lambda arrays: save({name: one.view(np.int32) for name, one in arrays.items()}),
    "cut off": lambda arrays: save(arrays)[:-1],
    "no safetensors": lambda arrays: b"x" * 1000,
    "nothing": lambda arrays: b"",
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_what_has_other_tensors_does_not_replace_an_expert(overlay: Overlay, experts: OverlayExperts, how: str) -> None:
    """A rename over an expert of what has other names, shapes or dtypes is EINVAL, and leaves both as they were."""
    before, data = everything(overlay.layer), WRONG[how](changed())
    with pytest.raises(UsageError):
        replace(experts, data)
    assert everything(overlay.layer) == before
    assert same(read(experts), expected())
    file = experts.open_file(at(experts, "L001/.tmp"), write=False)
    assert file.read(0, len(data) + 1) == data
    file.close()


def test_when_a_replacement_fails_half_way_both_are_as_they_were(
    overlay: Overlay, experts: OverlayExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space, and no room in a quota, leave expert and temporary as they were; the next attempt succeeds."""
    temporary(experts, save(changed()))
    before, used = everything(overlay.layer), overlay.layer.staging.used
    layer = at(experts, "L001")

    def rename() -> None:
        experts.rename(layer, b".tmp", layer, b"e00002.safetensors", NOW)

    writes, write = itertools.count(), Generation.write

    def full(self: Generation, offset: int, data: bytes) -> None:
        if next(writes) == 2:
            raise NoSpaceError("the disk is full")
        write(self, offset, data)

    with monkeypatch.context() as patched:
        patched.setattr(Generation, "write", full)
        with pytest.raises(NoSpaceError):
            rename()
    journals, append = itertools.count(), overlay.layer.journal.append

    def refuses(*arguments: object) -> None:
        if "Contents" in type(arguments[0]).__name__ and next(journals) == 1:
            raise NoSpaceError("the journal is full")
        append(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(overlay.layer.journal, "append", refuses)
        with pytest.raises(NoSpaceError):
            rename()
    assert next(writes) >= 2 and next(journals) >= 1
    assert {path: facts[-1] for path, facts in everything(overlay.layer).items()} == {
        path: facts[-1] for path, facts in before.items()
    }
    assert same(read(experts), expected())
    rename()
    assert same(read(experts), changed())
    overlay.flush()
    assert overlay.layer.staging.used == 0 and used


def test_a_quota_counts_experts(store: Store, files: Mapping[str, bytes]) -> None:
    publish(store, "base", {**files})
    with create(store, "small", "base", quota=100_000) as overlay:
        experts = experts_of(overlay)
        with pytest.raises(QuotaError):
            replace(experts, save(changed()))  # 57600 bytes beside as many
        assert same(read(experts), expected())
        experts.unlink(at(experts, "L001"), b".tmp", NOW)
        file = experts.open_file(at(experts, EXPERT), write=True)
        file.write(file.size - 40_000, b"x" * 40_000, NOW)
        file.close()


def test_captures_meanwhile_are_whole(
    overlay: Overlay, experts: OverlayExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured while an expert is replaced holds the old bytes, and nothing of the new ones is lost."""
    temporary(experts, save(changed()))
    frozen: list[object] = []
    inode = overlay.layer.resolve(FIRST.encode())
    write = Generation.write

    def captured(self: Generation, offset: int, data: bytes) -> None:
        write(self, offset, data)
        if len(frozen) < 2:
            with overlay.layer.lock:
                overlay.layer.state.generations += 1
                frozen.append(content_of(inode).freeze(overlay.layer.state.generations))

    monkeypatch.setattr(Generation, "write", captured)
    layer = at(experts, "L001")
    experts.rename(layer, b".tmp", layer, b"e00002.safetensors", NOW)
    assert len(frozen) == 2
    assert same(read(experts), changed())
    temporary(experts, save(changed(2)))
    frozen.clear()
    monkeypatch.setattr("moonclipfs.layers.patching._ATTEMPTS", 1)
    with pytest.raises(BusyError):
        experts.rename(layer, b".tmp", layer, b"e00002.safetensors", NOW)
    assert same(read(experts), changed())


def test_readers_see_old_or_new_experts(overlay: Overlay, experts: OverlayExperts) -> None:
    """Whoever reads a large file while an expert is replaced sees all of its old bytes or all of the new ones."""
    values: list[set[float]] = []
    stop = threading.Event()
    same_everywhere = [{name: np.full_like(array, value) for name, array in expected().items()} for value in range(6)]
    replace(experts, save(same_everywhere[0]))

    def look() -> None:
        file = overlay.layer.open_file(overlay.layer.resolve(FIRST.encode()), write=False)
        while not stop.is_set():
            arrays = load(file.read(0, file.size))
            values.append({float(one) for name in ("w1", "w3") for one in np.unique(arrays[f"{PART}{name}.weight"])})
        file.close()

    reader = threading.Thread(target=look)
    reader.start()
    for arrays in same_everywhere * 3:
        replace(experts, save(arrays))
        time.sleep(0.005)
    stop.set()
    reader.join()
    assert values and all(len(one) == 1 for one in values)


def test_experts_are_replaced_by_many_at_once(overlay: Overlay, experts: OverlayExperts) -> None:
    """Several writers replace their own experts of the same files, while these are encoded, and none loses anything."""
    problems: list[BaseException] = []

    def work(layer: int, number: int) -> None:
        path, directory = f"L{layer:03}/e{number:05}.safetensors", at(experts, f"L{layer:03}")
        name = f".{number}".encode()
        try:
            for step in range(1, 16):
                arrays = {part: np.full((600, 8), step * 100 + 10 * layer + number, np.float32) for part in expected()}
                temporary(experts, save(arrays), f"L{layer:03}", name)
                experts.rename(directory, name, directory, path.rpartition("/")[2].encode(), NOW)
                assert same(read(experts, path), arrays)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=[layer, number]) for layer in range(2) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        overlay.flush()
    assert problems == []
    for layer, number in itertools.product(range(2), range(3)):
        found = read(experts, f"L{layer:03}/e{number:05}.safetensors")
        assert {float(one) for array in found.values() for one in np.unique(array)} == {1500.0 + 10 * layer + number}
    overlay.flush()
    assert overlay.layer.staging.used == 0
    assert same(expected(big(overlay)), read(experts))


def test_an_expert_whose_file_is_cut_off_is_not_there(overlay: Overlay, experts: OverlayExperts) -> None:
    file = experts.open_file(at(experts, EXPERT), write=False)
    overlay.layer.truncate(overlay.layer.resolve(FIRST.encode()), 3000, NOW)
    with pytest.raises(NotFoundError, match="cut off"):
        file.read(0, file.size)
    assert file.cached(0, file.size) is None
    file.close()
    with pytest.raises(NotFoundError):
        at(experts, EXPERT)


def test_writes_in_place_reach_the_large_files(overlay: Overlay, experts: OverlayExperts) -> None:
    """The tensors of an expert's file can be written in place; its head and its length are EPERM."""
    inode = at(experts, EXPERT)
    file = experts.open_file(inode, write=True)
    data = file.read(0, file.size)
    head = int.from_bytes(data[:8], "little") + 8
    new = data[:head] + bytes(byte ^ 255 for byte in data[head:])
    for start in range(head, len(data), 7001):
        assert file.write(start, new[start : start + 7001], NOW) == len(new[start : start + 7001])
    for offset, part in ((head - 1, b"xy"), (0, b"x"), (len(data) - 1, b"xy"), (len(data), b"x")):
        with pytest.raises(NotPermittedError):
            file.write(offset, part, NOW)
    file.flush()
    file.sync()
    file.close()
    assert same(read(experts), load(new))
    assert same(expected(big(overlay)), load(new))
    experts.truncate(inode, len(data), NOW)
    for size in (0, len(data) + 1):
        with pytest.raises(NotPermittedError):
            experts.truncate(inode, size, NOW)


def test_what_files_cannot_hold_is_refused(overlay: Overlay, experts: OverlayExperts) -> None:
    """Experts are not deleted, added, moved or exchanged by names: that is EPERM, since files hold all of them."""
    layer, root = at(experts, "L001"), experts.root
    before = everything(overlay.layer)
    temporary(experts, save(changed()))
    refused: list[Callable[[], object]] = [
        lambda: experts.unlink(layer, b"e00002.safetensors", NOW),
        lambda: experts.make(layer, b"e00009.safetensors", EntryType.FILE, 0o600, 0, 0, NOW),
        lambda: experts.make(layer, b"d", EntryType.DIRECTORY, 0o700, 0, 0, NOW),
        lambda: experts.make(layer, b"l", EntryType.SYMLINK, 0o777, 0, 0, NOW, target=b"x"),
        lambda: experts.make(root, b"f", EntryType.FILE, 0o600, 0, 0, NOW),
        lambda: experts.rename(layer, b".tmp", layer, b"e00009.safetensors", NOW),
        lambda: experts.rename(layer, b".tmp", root, b"x", NOW),
        lambda: experts.rename(layer, b"e00002.safetensors", layer, b"e00001.safetensors", NOW),
        lambda: experts.rename(layer, b"e00002.safetensors", layer, b".x", NOW),
        lambda: experts.rename(root, b"L001", root, b"L002", NOW),
        lambda: experts.rmdir(root, b"L001", NOW),
        lambda: experts.link(at(experts, EXPERT), layer, b"x", NOW),
        lambda: experts.set_attributes(at(experts, EXPERT), now_ns=NOW, mode=0o600),
        lambda: experts.set_attributes(layer, now_ns=NOW, mtime_ns=1),
        lambda: experts.set_xattr(layer, b"user.a", b"b", NOW),
        lambda: experts.unlink(at(experts, "pool"), b"e00003.npz", NOW),
    ]
    for call in refused:
        with pytest.raises(NotPermittedError):
            call()
    with pytest.raises(UsageError):
        experts.rename(layer, b".tmp", layer, b"e00002.safetensors", NOW, exchange=True)
    with pytest.raises(ExistsError):
        experts.rename(layer, b".tmp", layer, b"e00002.safetensors", NOW, replace=False)
    with pytest.raises(ExistsError):
        experts.make(layer, b"e00002.safetensors", EntryType.FILE, 0o600, 0, 0, NOW)
    with pytest.raises(NotFoundError):
        experts.unlink(layer, b".none", NOW)
    with pytest.raises(NotFoundError):
        experts.rename(layer, b".none", layer, b"e00002.safetensors", NOW)
    with pytest.raises(DirectoryError):
        experts.open_file(layer, write=False)
    assert everything(overlay.layer) == before


def test_a_temporary_is_no_expert_and_not_in_the_overlay(overlay: Overlay, experts: OverlayExperts) -> None:
    """A file made beside experts is hidden: found by its name only, it is not in the overlay and in no commit."""
    before = everything(overlay.layer)
    made = temporary(experts, b"x" * 100_000, name=b"e00000.safetensors.tmp")
    layer = at(experts, "L001")
    assert experts.lookup(layer, b"e00000.safetensors.tmp") is made
    assert experts.stat(made).size == 100_000 and experts.stat(made).nlink == 1
    assert len(experts.names_in(layer)) == 3
    assert everything(overlay.layer) == before
    with pytest.raises(ExistsError):
        experts.make(layer, b"e00000.safetensors.tmp", EntryType.FILE, 0o600, 0, 0, NOW)
    experts.rename(layer, b"e00000.safetensors.tmp", at(experts, "L000"), b".other", NOW)
    experts.set_attributes(made, now_ns=NOW, mode=0o640)
    experts.truncate(made, 50_000, NOW)
    assert experts.stat(at(experts, "L000/.other"))[:5] == (0o100640, 1, 0, 0, 50_000)
    version = overlay.commit("kept")
    assert version.root == overlay.store.resolve("base").root
    temporary(experts, b"y", "L000", b".third")
    experts.rename(at(experts, "L000"), b".third", at(experts, "L000"), b".other", NOW)
    assert overlay.layer.staging.used == 1
    file = experts.open_file(at(experts, "L000/.other"), write=True)
    experts.unlink(at(experts, "L000"), b".other", NOW)
    assert file.read(0, 5) == b"y"
    file.close()
    assert overlay.layer.staging.used == 0
    with pytest.raises(NotFoundError):
        at(experts, "L000/.other")


def test_temporaries_that_were_left_behind_go(overlay: Overlay, experts: OverlayExperts) -> None:
    temporary(experts, b"x" * 100_000, name=b".left")
    held = temporary(experts, b"held", name=b".held")
    file = experts.open_file(held, write=False)
    late = NOW + int(limits.EXPERT_TEMPORARY_SECONDS * 1e9) + 1
    directory = at(experts, "L001")
    experts.make(directory, b".new", EntryType.FILE, 0o600, 0, 0, late - 2)
    assert experts.stat(at(experts, "L001/.left")).size == 100_000
    experts.make(directory, b".newer", EntryType.FILE, 0o600, 0, 0, late)
    with pytest.raises(NotFoundError):
        at(experts, "L001/.left")
    assert experts.lookup(directory, b".held") is held and experts.lookup(directory, b".new")
    assert file.read(0, 9) == b"held"
    assert overlay.layer.staging.used == 4
    file.close()


def test_temporaries_are_bounded(experts: OverlayExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXPERT_TEMPORARIES", 2)
    temporary(experts, b"", name=b".a")
    temporary(experts, b"", name=b".b")
    with pytest.raises(TooManyOpenError):
        temporary(experts, b"", name=b".c")


def test_experts_of_paths_without_a_mount(overlay: Overlay) -> None:
    """A path in a layer leads to its experts, where programs read and write them as files."""
    top = LayerPath(overlay, label="one").experts()
    assert str(top / "L001") == "one(experts)/L001"
    assert [path.name for path in top.iterdir()] == ["L000", "L001", "pool"]
    assert top.experts() is top and top.parent == top
    path = top / EXPERT
    assert path.is_file() and path.parent.is_dir() and not (path.parent / "none").exists()
    assert path.stat().st_size == len(path.read_bytes())
    assert same(load(path.read_bytes()), expected())
    temporary = path.with_name(".new")
    temporary.write_bytes(save(changed()))
    assert temporary not in list(path.parent.iterdir())
    temporary.replace(path)
    assert not temporary.exists()
    assert same(load(path.read_bytes()), changed())
    assert same(expected(big(overlay)), changed())
    with pytest.raises(PermissionError):
        path.unlink()
    with pytest.raises(PermissionError):
        path.write_bytes(b"")
    temporary.write_bytes(b"x")
    with pytest.raises(OSError, match="safetensors"):
        temporary.replace(path)
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(np.float32(5).tobytes())
    assert load(path.read_bytes())["w3.weight"][-1, -1] == 5


def test_experts_of_a_dry_run_without_a_mount(store: Store, files: Mapping[str, bytes]) -> None:
    publish(store, "base", {**files})
    with moonclipfs.dry_run(store.path, "base", mount=False) as path:
        assert isinstance(path, LayerPath)
        expert = moonclipfs.experts(path) / EXPERT
        assert moonclipfs.is_dry_run(expert)
        expert.with_name(".new").write_bytes(save(changed()))
        expert.with_name(".new").replace(expert)
        assert same(load((path / FIRST).read_bytes()), {**load(files[FIRST]), **part_of_first(changed())})
    reader = store.open_file(store.lookup(store.resolve("base"), FIRST.encode()))
    assert reader.read(0, reader.size) == files[FIRST]


def part_of_first(arrays: Arrays) -> Arrays:
    """What of an expert the first file holds, under its names there."""
    return {PART + name: array for name, array in arrays.items() if "w2" not in name}


def test_an_expert_store_works_without_a_mount(overlay: Overlay) -> None:
    torch = pytest.importorskip("torch")
    from moonclipfs.torch.experts import ExpertStore

    store = ExpertStore(moonclipfs.experts(LayerPath(overlay)))
    assert store.ids() == [(layer, number) for layer in range(2) for number in range(3)] and not store.is_temporary
    tensors = store.read((1, 2))
    assert torch.equal(tensors["w1.weight"], torch.from_numpy(ARRAYS[PART + "w1.weight"]))
    store.write((1, 2), {name: tensor + 1 for name, tensor in tensors.items()})
    assert same(expected(big(overlay)), changed())


def test_gguf_experts_are_written_and_torch_ones_are_not(store: Store) -> None:
    """Experts can be written where no checksum stands elsewhere in the file: of safetensors and GGUF, not of torch."""
    q8 = np.random.default_rng(0).bytes(3 * 4 * 34)
    stack = gguf({"blk.0.ffn_up_exps.weight": (8, (32, 4, 3), q8)})
    publish(store, "base", {"g": {"m.gguf": stack}, "t": {"m.pt": torch_file(mixtral(1, 2))}})
    with create(store, "one", "base") as overlay:
        experts = experts_of(overlay)
        path = "g/L000/e00001.safetensors"
        arrays = read(experts, path)
        assert arrays["ffn_up.weight"].tobytes() == q8[136:272]
        replace(experts, save({"ffn_up.weight": arrays["ffn_up.weight"] ^ 1}), path)
        assert read_all(overlay, "g/m.gguf") == stack.replace(q8[136:272], (arrays["ffn_up.weight"] ^ 1).tobytes())
        torch = at(experts, "t/L000/e00001.safetensors")
        assert experts.stat(torch).mode & 0o222 == 0
        with pytest.raises(NotPermittedError):
            experts.open_file(torch, write=True)
        with pytest.raises(NotPermittedError):
            replace(experts, save(read(experts, "t/L000/e00001.safetensors")), "t/L000/e00001.safetensors")


def test_the_kernel_is_told_of_what_shows_the_same_bytes(overlay: Overlay, experts: OverlayExperts) -> None:
    first, second = (overlay.layer.resolve(name.encode()) for name in (FIRST, SECOND))
    expert, layer = at(experts, EXPERT), at(experts, "L001")
    assert set(experts.holding(expert)) == {first.number, second.number}
    assert experts.depending(first, None) == ([], False)
    other = at(experts, "L001/e00001.safetensors")
    for known in (expert, expert, other):
        experts.remember(known)
    place = read_all(overlay, FIRST).index(ARRAYS[PART + "w1.weight"].tobytes())
    end = place + ARRAYS[PART + "w1.weight"].nbytes
    assert experts.depending(first, (place, place + 1)) == experts.depending(first, (end - 1, end)) == ([expert], False)
    assert experts.depending(first, (place - 1, place)) != ([expert], False)
    assert experts.depending(first, (0, 1)) == ([expert, other], True)
    assert experts.depending(second, None) == ([expert, other], True)
    assert experts.depending(overlay.layer.root, None) == ([expert, other], True)
    whole = experts.depending(first, (2000, 10**9))
    assert {inode.number for inode in whole[0]} == {expert.number, other.number} and not whole[1]
    assert experts.links(expert) == [(layer, b"e00002.safetensors")]
    assert experts.links(layer) == [(experts.root, b"L001")]
    replace(experts, save(changed()))
    assert set(experts.holding(layer)) == {first.number, second.number, expert.number}
    assert not experts.holding(layer)
    experts.forget(expert, 1)
    assert experts.depending(second, None) == ([expert, other], True)
    experts.forget(expert, 1)
    experts.forget(other, 1)
    assert experts.depending(second, None) == ([], False) and not experts._known


def test_experts_that_share_bytes_are_all_told(overlay: Overlay) -> None:
    known, real = KnownExperts(), overlay.layer.root
    source = Source(overlay.layer.resolve(FIRST.encode()), (b"", 0, 0), 10, b"", True)
    inodes = []
    for number, (start, length) in enumerate([(10, 990), (100, 100), (300, 100)]):
        part = Component("w", DType.U8, (length,), FIRST, start, length, "w")
        inode = ExpertInode(number + 1, Kind.EXPERT, real, b"L000", b"e%05d" % number)
        inode.expert = Expert("L000", number, (part,), {FIRST: source}, 0, b"")
        known.add(inode)
        inodes.append(inode)

    def told(start: int, end: int) -> set[int]:
        return {inode.number for inode in known.of_file(source.inode.number, (start, end))[0]}

    assert told(500, 600) == {1}
    assert told(150, 310) == {1, 2, 3}
    assert told(999, 2000) == {1}
    assert told(1000, 2000) == set()
    assert told(9, 10) == {1, 2, 3}, "the head"
    for inode in inodes:
        known.drop(inode)
    assert not known and known.of_directory(real.number) == []


# All of it together


class Machine(RuleBasedStateMachine):
    """An overlay with stacks of four experts, written to from all sides, beside arrays in memory."""

    FILE = "model.safetensors"
    place: Path

    @initialize()
    def begin(self) -> None:
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr("moonclipfs.layers.overlay.OverlayEncoder", LocalOverlayEncoder)
        self.store = Store.create(Path(tempfile.mkdtemp(dir=self.place)) / "store")
        self.arrays = fused(experts=4, inner=3, outer=40)
        publish(self.store, "base", {self.FILE: save(self.arrays)})
        self.overlay = create(self.store, "one", "base")
        self.experts = experts_of(self.overlay)
        self.steps = itertools.count(1)
        self.there = True

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self.overlay.close()
            self.store.close()
            self.patches.undo()

    def _path(self, number: int) -> str:
        return f"L003/e{number:05}.safetensors"

    def _set(self, number: int, new: Mapping[str, np.ndarray]) -> None:
        at = "model.layers.3.mlp.experts"
        self.arrays[f"{at}.down_proj"][number] = new["down_proj"]
        self.arrays[f"{at}.gate_up_proj"][number] = np.concatenate([new["gate_proj"], new["up_proj"]])

    @precondition(lambda self: self.there)
    @rule(number=st.integers(0, 3))
    def replaces(self, number: int) -> None:
        value = np.float32(next(self.steps))
        new = {name: np.full_like(array, value) for name, array in read(self.experts, self._path(number)).items()}
        replace(self.experts, save(new), self._path(number))
        self._set(number, new)

    @precondition(lambda self: self.there)
    @rule(number=st.integers(0, 3), start=st.floats(0, 1), length=st.integers(1, 700))
    def writes(self, number: int, start: float, length: int) -> None:
        file = self.experts.open_file(at(self.experts, self._path(number)), write=True)
        data = bytearray(file.read(0, file.size))
        head = int.from_bytes(data[:8], "little") + 8
        offset = head + int(start * (len(data) - head - 1))
        part = bytes([next(self.steps) & 127]) * min(length, len(data) - offset)
        file.write(offset, part, NOW)
        file.close()
        data[offset : offset + len(part)] = part
        self._set(number, load(bytes(data)))

    @precondition(lambda self: self.there)
    @rule(name=st.sampled_from(["gate_up_proj", "down_proj"]), whole=st.booleans(), pad=st.integers(0, 40))
    def saves(self, name: str, whole: bool, pad: int) -> None:
        """The large file is written in place, or anew with a head of another length."""
        array = self.arrays[f"model.layers.3.mlp.experts.{name}"]
        array += np.float32(1)
        data = save(self.arrays, metadata={"pad": "x" * pad})
        if whole:
            write_file(self.overlay, "new", data)
            root = self.overlay.layer.root
            self.overlay.layer.rename(root, b"new", root, self.FILE.encode(), NOW)
        else:
            old = read_all(self.overlay, self.FILE)
            head = int.from_bytes(old[:8], "little") + 8
            overwrite(self.overlay, self.FILE, head, data[int.from_bytes(data[:8], "little") + 8 :])

    @rule()
    def removes(self) -> None:
        root = self.overlay.layer.root
        if self.there:
            self.overlay.layer.unlink(root, self.FILE.encode(), NOW)
        else:
            write_file(self.overlay, self.FILE, save(self.arrays))
        self.there = not self.there

    @rule(number=st.integers(0, 3))
    def is_refused(self, number: int) -> None:
        with pytest.raises(MoonclipError):
            replace(self.experts, save({"x": random(3)}), self._path(number))
        if self.there:
            self.experts.unlink(at(self.experts, "L003"), b".tmp", NOW)

    @rule()
    def encodes(self) -> None:
        self.overlay.flush()

    @rule()
    def commits(self) -> None:
        version = self.overlay.commit("kept")
        if self.there:
            reader = self.store.open_file(self.store.lookup(version, self.FILE.encode()))
            assert same(load(reader.read(0, reader.size)), self.arrays)

    @rule()
    def opens_again(self) -> None:
        self.overlay.close()
        self.overlay = Overlay.open(self.store, "one")
        self.experts = experts_of(self.overlay)

    @invariant()
    def all_agree(self) -> None:
        if not self.there:
            assert self.experts.names_in(self.experts.root) == []
            return
        assert same(load(read_all(self.overlay, self.FILE)), self.arrays)
        for number in range(4):
            found = {name: array.tobytes() for name, array in read(self.experts, self._path(number)).items()}
            assert found == fused_expert(self.arrays, number)


def test_experts_and_large_files_agree_whatever_is_done(tmp_path: Path) -> None:
    class Here(Machine):
        place = tmp_path

    run_state_machine_as_test(Here, settings=settings(max_examples=15, stateful_step_count=15, deadline=None))
