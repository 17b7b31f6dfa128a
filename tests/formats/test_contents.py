"""What is said of a directory whose files are not all there."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping

import pytest

from moonclipfs import limits
from moonclipfs.formats.contents import Finding, findings
from moonclipfs.formats.layout import Layout
from moonclipfs.formats.sniff import parse
from moonclipfs.types import BytesSource
from tests.formats.samples import CORPUS, CORPUS_FILES, entry, safetensors


class Tree:
    """A tree in memory: whatever is given as None is a small file of no format."""

    def __init__(self, files: Mapping[str, bytes | None]) -> None:
        self.files = files

    def paths(self) -> Iterable[str]:
        return self.files

    def layout(self, path: str) -> Layout:
        return parse(self.source(path))

    def source(self, path: str) -> BytesSource:
        data = self.files[path]
        return BytesSource(b"PK: some text" if data is None else data)


def found(files: Mapping[str, bytes | None], ranks: int | None = None) -> list[str]:
    return [f"{path}: {message}" for path, message in findings(Tree(files), ranks)]


def shard(*names: str) -> bytes:
    header = {name: entry("U8", [1], at, at + 1) for at, name in enumerate(names)}
    return safetensors(header, bytes(len(names)))


def index(**weights: str) -> bytes:
    return json.dumps({"metadata": {"total_size": 3}, "weight_map": weights}).encode()


def optimizer(ranks: Iterable[int], word: str = "zero_pp_rank") -> dict[str, bytes | None]:
    return {f"global_step5/{word}_{rank}_mp_rank_00_optim_states.pt": None for rank in ranks}


def test_a_whole_tree_has_no_findings() -> None:
    files: dict[str, bytes | None] = {path.name: path.read_bytes() for path in CORPUS_FILES}
    files |= {"a/model-00001-of-00002.safetensors": shard("x"), "a/model-00002-of-00002.safetensors": shard("y")}
    files["a/model.safetensors.index.json"] = index(
        x="model-00001-of-00002.safetensors", y="model-00002-of-00002.safetensors"
    )
    files |= {"config.json": b"{}", "README.md": None, "b/pytorch_model-00001-of-00001.bin": None, "empty": b""}
    assert findings(Tree(files)) == []


def test_R051_truncated_files_are_named_with_what_is_missing() -> None:
    files: dict[str, bytes | None] = {f"run/{path.name}": path.read_bytes()[:-40] for path in CORPUS_FILES}
    assert {finding.path for finding in findings(Tree(files))} == files.keys()
    two = shard("a", "b")[:-1]
    assert findings(Tree({"m.safetensors": two})) == [Finding("m.safetensors", "truncated: data short by 1 byte")]


def test_a_file_that_is_not_what_its_name_says() -> None:
    assert found({"a.safetensors": b"<html>", "b.gguf": b"", "c.bin": b"anything", "d.json": b"{"}) == [
        "a.safetensors: not readable: no known format",
        "b.gguf: not readable: the file is empty",
    ]


def test_files_that_do_not_begin_as_their_name_says() -> None:
    """Empty, zero-filled and random files, which loaders refuse; what is merely not understood is not among them."""
    bad = {"empty": b"", "zeros": bytes(5000), "random": b"\x17\x03" * 99}
    files: dict[str, bytes | None] = {
        f"{kind}{suffix}": data for kind, data in bad.items() for suffix in (".pt", ".npz")
    }
    assert found(files) == sorted(
        f"{name}: not readable: it does not begin as a file of this name does" for name in files
    )
    files |= {"empty.npy": b"", "zeros.pth": bytes(9)}
    assert len(found(files)) == len(files)
    deflated = {"pk.npz": b"PK of another kind", "x.pt": b"\x80\x02K\x01.", "notes.txt": b"", "w.bin": bytes(9)}
    assert found(dict(deflated)) == []


def test_R049_a_stale_index_names_missing_shards() -> None:
    stale = index(x="model-00001-of-00002.safetensors", y="model-00002-of-00002.safetensors")
    files: dict[str, bytes | None] = {"model.safetensors": shard("x"), "model.safetensors.index.json": stale}
    assert found(files) == [
        'model.safetensors.index.json: index names missing "model-00001-of-00002.safetensors", '
        '"model-00002-of-00002.safetensors"'
    ]


def test_R049_a_shard_that_no_index_names_is_unreferenced() -> None:
    files = {f"model-0000{number}-of-00003.safetensors": shard(f"w{number}") for number in (1, 2, 3)}
    files["model.safetensors.index.json"] = index(
        w1="model-00001-of-00003.safetensors", w2="model-00002-of-00003.safetensors"
    )
    assert found(files) == ["model-00003-of-00003.safetensors: unreferenced: no index in this directory names it"]


def test_R049_an_index_older_than_its_shards() -> None:
    files = {"model-00001-of-00001.safetensors": shard("new"), "model.safetensors.index.json": index(
        old="model-00001-of-00001.safetensors", new="model-00001-of-00001.safetensors")}  # fmt: skip
    assert found(files) == ['model.safetensors.index.json: model-00001-of-00001.safetensors does not hold "old"']


def test_R049_numbered_shards_without_an_index() -> None:
    files: dict[str, bytes | None] = {
        f"m-{number:05}-of-00009.gguf": CORPUS.joinpath("model.gguf").read_bytes() for number in (1, 2, 5)
    }
    assert found(files) == ["m-*-of-00009.gguf: shards 3, 4, 6-9 of 9 are missing"]
    from_zero: dict[str, bytes | None] = {f"m-{number:05}-of-00002.bin": None for number in (0, 1)}
    assert found(from_zero) == []


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b'{"weight_map": 1}', b'{"weight_map": {"a": 1}}', b'{"weight_map":{},"weight_map":{}}']
)
def test_an_index_that_is_not_one(text: bytes) -> None:
    assert "not a readable index" in found({"model.safetensors.index.json": text})[0]


def test_an_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INDEX_BYTES", 10)
    assert "at most 10 are read" in found({"model.safetensors.index.json": index(a="b")})[0]


def test_R047_missing_ranks_are_listed() -> None:
    path = "global_step5/zero_pp_rank_*_mp_rank_00_optim_states.pt"
    assert found(optimizer(range(4))) == []
    assert found(optimizer(range(4)), ranks=4) == []
    assert found(optimizer(range(2)), ranks=4) == [f"{path}: ranks 2, 3 of 4 are missing"]
    assert found(optimizer((0, 1, 3))) == [f"{path}: ranks 2 of 4 are missing"]
    assert found(optimizer(range(2)), ranks=1024) == [f"{path}: ranks 2-1023 of 1024 are missing"]


def test_R047_ranks_that_an_index_names() -> None:
    names = {f"w{rank}": f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)}
    files = optimizer(range(2)) | {"global_step5/model.index.json": index(**names)}
    assert found(files) == [
        'global_step5/model.index.json: index names missing "zero_pp_rank_2_mp_rank_00_optim_states.pt", '
        '"zero_pp_rank_3_mp_rank_00_optim_states.pt"'
    ]


def test_R047_another_set_beside_it_tells_how_many_there_are() -> None:
    files = optimizer(range(4)) | optimizer(range(2), "bf16_zero_pp_rank")
    assert found(files) == ["global_step5/bf16_zero_pp_rank_*_mp_rank_00_optim_states.pt: ranks 2, 3 of 4 are missing"]


def test_R047_ranks_in_names_of_directories_and_of_random_states() -> None:
    files: dict[str, bytes | None] = {f"iter_10/mp_rank_{rank:02}/model.pt": None for rank in (0, 2)}
    files |= {f"rng_state_{rank}.pth": None for rank in (0, 1, 3)} | {"log_rank_7.txt": None, "rank_5/log.txt": None}
    assert found(files) == [
        "iter_10/mp_rank_*: ranks 1 of 3 are missing",
        "rank_*: ranks 0-4 of 6 are missing",
        "rng_state_*.pth: ranks 2 of 4 are missing",
    ]
    assert found({f"mp_rank_0{rank}_model_states.pt": None for rank in (0, 1)}, ranks=8) == []


class _Stored:
    def __init__(self, relative_path: str) -> None:
        self.relative_path = relative_path


def test_R047_a_distributed_checkpoint_without_some_files() -> None:
    metadata = pickle.dumps({"storage_data": {rank: _Stored(f"__{rank}_0.distcp") for rank in range(3)}})
    files: dict[str, bytes | None] = {"dcp/.metadata": metadata, "dcp/__0_0.distcp": None, "dcp/__2_0.distcp": None}
    assert found(files) == ['dcp/.metadata: names missing "__1_0.distcp"']
    del files["dcp/.metadata"]
    assert "did not finish" in found(files)[0]
    assert found({".metadata": b"not a pickle"}) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_R047_a_distributed_checkpoint_of_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    torch = pytest.importorskip("torch", reason="torch writes the checkpoint here")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint", reason="torch writes the checkpoint here")
    directory = tmp_path_factory.mktemp("dcp")
    checkpoint.save({"w": torch.zeros(4)}, checkpoint_id=directory, no_dist=True)
    files: dict[str, bytes | None] = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert found(files) == []
    del files["__0_0.distcp"]
    assert found(files) == ['.metadata: names missing "__0_0.distcp"']
