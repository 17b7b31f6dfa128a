"""Which directories are units, and what keeps a unit from being complete."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from typing import TypeAlias, Union

import pytest

from moonclipfs.formats.layout import Layout
from moonclipfs.formats.sniff import parse
from moonclipfs.layers.completeness import missing
from moonclipfs.layers.units import is_checkpoint_file, is_temporary, units
from moonclipfs.types import BytesSource
from tests.formats.samples import entry, safetensors

Names: TypeAlias = Mapping[str, Union[bytes, "Names"]]


class Branch:
    """Directories in memory; `bound` are the paths of snapshots."""

    def __init__(self, names: Names, path: str = "", bound: Iterable[str] = ()) -> None:
        self.names = names
        self.path = path
        self.bound = tuple(bound)

    @property
    def is_top(self) -> bool:
        return not self.path

    def files(self) -> list[bytes]:
        return [name.encode() for name, value in self.names.items() if isinstance(value, bytes)]

    def folders(self) -> list[bytes]:
        return [name.encode() for name, value in self.names.items() if not isinstance(value, bytes)]

    def has_snapshots_below(self) -> bool:
        return any(path.startswith(self.path + "/") for path in self.bound)

    def open(self, name: bytes) -> Branch:
        below = self.names[name.decode()]
        assert not isinstance(below, bytes)
        return Branch(below, f"{self.path}/{name.decode()}".strip("/"), self.bound)


def found(names: Names, bound: Iterable[str] = ()) -> list[str]:
    return sorted(unit.path for unit in units(Branch(names, bound=bound)))


MODEL: Names = {"model.safetensors": b"", "config.json": b""}


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "a.pt", "pytorch_model.bin", "last.ckpt", "arrays.npz", "q4.gguf", "model_index.json",
        "trainer_state.json", ".metadata", "model.safetensors.index.json", "optimizer.pth",
    ],
)  # fmt: skip
def test_a_directory_with_a_checkpoint_file_is_a_unit(name: str) -> None:
    """The unit is the topmost directory that itself holds a checkpoint file or the index of one."""
    assert is_checkpoint_file(name.encode())
    assert found({"run": {"step": {name: b"", "deep": {"a.pt": b""}}, "logs": {"events.1": b""}}}) == ["run/step"]


@pytest.mark.parametrize(
    "name", ["config.json", "events.out.tfevents.1", "model.safetensors.tmp", "tmpabc.pt", "a.txt"]
)
def test_other_files_make_no_unit(name: str) -> None:
    assert found({"run": {name: b""}}) == []


@pytest.mark.parametrize("name", ["tmp", "tmp-checkpoint-5", ".tmp-1", "checkpoint-5.tmp", "model.incomplete"])
def test_temporary_names_are_no_units(name: str) -> None:
    """What is called tmp*, .tmp*, *.tmp or *.incomplete is no unit, and nothing in it is."""
    assert is_temporary(name.encode())
    assert found({"run": {name: MODEL, "x": {name: {"y": MODEL}}}}) == []


def test_the_root_and_what_lies_in_it_is_no_unit() -> None:
    """Files in the root of the mount belong to no snapshot."""
    assert found({"model.safetensors": b"", "a": MODEL}) == ["a"]


def test_a_directory_with_a_snapshot_below_is_no_unit() -> None:
    """A directory that has a snapshot below it is sealed only when it is told to be."""
    names: Names = {"run": {"model.safetensors": b"", "a": MODEL, "b": MODEL}}
    assert found(names) == ["run"]
    assert found(names, ["run"]) == ["run"]
    assert found(names, ["run/a"]) == ["run/a", "run/b"]


def test_a_run_of_numbered_checkpoints_is_no_unit() -> None:
    """A directory that holds checkpoint-N directories is a run, not a unit, whatever files lie beside them."""
    run: Names = {"checkpoint-500": MODEL, "checkpoint-1000": MODEL, "trainer_state.json": b"", **MODEL}
    assert found({"run": run}) == ["run/checkpoint-1000", "run/checkpoint-500"]
    assert found({"run": {"checkpoint_0": MODEL, "model.safetensors": b""}}) == ["run/checkpoint_0"]


def test_what_savers_lay_out() -> None:
    assert found({"zero": {"checkpoint-5": {**MODEL, "global_step5": {"mp_rank_00_model_states.pt": b""}}}}) == [
        "zero/checkpoint-5"
    ]
    assert found({"pipe": {"model_index.json": b"", "unet": MODEL, "vae": MODEL}}) == ["pipe"]
    lightning: Names = {"version_0": {"hparams.yaml": b"", "checkpoints": {"epoch=0-step=5.ckpt": b""}}}
    assert found({"lightning_logs": lightning}) == ["lightning_logs/version_0/checkpoints"]
    assert found({"dcp": {"step-5": {"__0_0.distcp": b""}, "step-4": {".metadata": b"", "__0_0.distcp": b""}}}) == [
        "dcp/step-4"
    ]
    # huggingface_hub's cache: the names of models are symbolic links to blobs without a suffix.
    assert found({"models--a": {"blobs": {"0123abc": b""}, "snapshots": {"f00": {}}, "refs": {"main": b""}}}) == []


class Tree:
    """Files in memory."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def paths(self) -> Iterable[str]:
        return self._files

    def layout(self, path: str) -> Layout:
        return parse(self.source(path))

    def source(self, path: str) -> BytesSource:
        return BytesSource(self._files[path])


def whole(*names: str) -> bytes:
    return safetensors({name: entry("U8", [1], at, at + 1) for at, name in enumerate(names)}, bytes(len(names)))


def index(**weights: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weights}).encode()


def test_a_whole_checkpoint_misses_nothing() -> None:
    files = {"model.safetensors": whole("w"), "config.json": b"{}", "tmpleft": b"", "rng_state_0.pth": b"PK"}
    assert missing(Tree(files)) == []
    assert missing(Tree({})) == []


def test_a_truncated_file_is_missing_bytes() -> None:
    """A unit with a truncated file stays open."""
    (line,) = missing(Tree({"model.safetensors": whole("w")[:-1]}))
    assert line.startswith("model.safetensors: truncated")


@pytest.mark.parametrize("data", [b"", bytes(1000)])
def test_a_checkpoint_file_without_contents_is_not_written_yet(data: bytes) -> None:
    assert missing(Tree({"model.safetensors": data, "empty.txt": b""})) == ["model.safetensors: has no contents yet"]


def test_bytes_of_no_format_are_whole() -> None:
    assert missing(Tree({"weights.bin": b"\x01\x02\x03", "odd.pt": b"anything"})) == []


def test_shards_that_an_index_names_are_needed() -> None:
    """A unit without a shard that its index names stays open; shards that no index names do not matter."""
    files = {
        "model.safetensors.index.json": index(
            a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors"
        ),
        "model-00001-of-00002.safetensors": whole("a"),
    }
    (line,) = missing(Tree(files))
    assert "model-00002-of-00002.safetensors" in line
    files |= {"model-00002-of-00002.safetensors": whole("b"), "model-00003-of-00003.safetensors": whole("old")}
    assert missing(Tree(files)) == []


class _Where:
    """Stands for torch's own class: it is read by its opcodes only."""

    def __init__(self, relative_path: str) -> None:
        self.relative_path = relative_path


def test_files_that_distributed_metadata_names_are_needed() -> None:
    """A unit without a file that the metadata of a distributed checkpoint names stays open."""
    metadata = pickle.dumps({"storage_data": [_Where("__0_0.distcp"), _Where("__1_0.distcp")]})
    (line,) = missing(Tree({".metadata": metadata, "__0_0.distcp": b"x"}))
    assert "__1_0.distcp" in line
    assert missing(Tree({".metadata": metadata, "__0_0.distcp": b"x", "__1_0.distcp": b"y"})) == []
    (line,) = missing(Tree({"__0_0.distcp": b"x", "a.pt": b"PK"}))
    assert line.startswith(".metadata: missing")


def test_components_of_a_pipeline_are_needed() -> None:
    named = {"_class_name": "P", "unet": ["diffusers", "U"], "safety_checker": [None, None], "flag": True}
    files = {"model_index.json": json.dumps(named).encode()}
    assert missing(Tree(files)) == ["model_index.json: names missing unet"]
    assert missing(Tree({**files, "unet/model.safetensors": whole("w")})) == []


def test_what_is_being_fetched_is_missing() -> None:
    """A unit with a file called *.tmp or *.incomplete in it stays open."""
    assert missing(Tree({"a.safetensors": whole("w"), ".cache/x.incomplete": b"1"})) == [
        ".cache/x.incomplete: is being written"
    ]
    assert missing(Tree({"a.safetensors": whole("w"), ".metadata.tmp": b"1"})) == [".metadata.tmp: is being written"]


def test_what_all_siblings_have_is_needed() -> None:
    """A unit without a file that all its sealed siblings have stays open; other numbers in names make no difference."""
    siblings = [["model.safetensors", "optimizer.pt", "global_step1/a.pt", "x"], ["model.safetensors", "optimizer.pt"]]
    files = {"model.safetensors": whole("w")}
    assert missing(Tree(files), siblings) == ["optimizer.pt: missing, and its siblings have it"]
    assert missing(Tree({**files, "optimizer.pt": b"PK"}), siblings) == []
    assert missing(Tree({**files, "optimizer.pt": b"PK", "x": b"", "global_step2/a.pt": b"PK"}), siblings[:1]) == []
