"""huggingface_hub's cache on a mount: blobs, symbolic links to them, locks, files in the making."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download
from transformers import AutoModelForCausalLM

from tests.ecosystem.conftest import Workspace
from tests.ecosystem.hub import REPOSITORY, hub
from tests.ecosystem.models import llama, same

DOWNLOAD = "import sys, huggingface_hub as h; print(h.snapshot_download(sys.argv[1], cache_dir=sys.argv[2]))"


def download(address: str, cache: Path, home: Path) -> subprocess.Popen[str]:
    """Begin to fetch the repository, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment.update(HF_ENDPOINT=address, HF_HUB_DISABLE_XET="1", HF_HOME=str(home), NO_PROXY="*", no_proxy="*")
    return subprocess.Popen(
        [sys.executable, "-c", DOWNLOAD, REPOSITORY, cache],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_cache_of_the_hub(workspace: Workspace, tmp_path: Path) -> None:
    """Two processes fetch the same files at once; a second commit shares what has not changed."""
    cache, files = workspace.path / "hub", tmp_path / "files"
    model = llama(128, 3)
    model.save_pretrained(files, max_shard_size="500KB")
    for commit in ("a" * 40, "b" * 40):
        (files / "README.md").write_text(commit)
        with hub(files, commit) as address:
            both = [download(address, cache, tmp_path / "home") for _ in range(2)]
            for process in both:
                out, err = process.communicate(timeout=120)
                assert process.returncode == 0, err
                assert out.strip().endswith(f"snapshots/{commit}")

    def check() -> None:
        place = Path(snapshot_download(REPOSITORY, cache_dir=cache))
        assert place.name == "b" * 40
        for path in files.iterdir():
            assert (place / path.name).is_symlink() and (place / path.name).read_bytes() == path.read_bytes()
        old = hf_hub_download(REPOSITORY, "README.md", cache_dir=cache, revision="a" * 40)
        assert Path(old).read_text() == "a" * 40
        loaded = AutoModelForCausalLM.from_pretrained(REPOSITORY, cache_dir=cache)
        assert same(loaded.state_dict(), model.state_dict())
        (repository,) = scan_cache_dir(cache).repos
        assert len(repository.revisions) == 2
        assert repository.nb_files == len(list(files.iterdir())) + 1
        assert not list(cache.rglob("*.incomplete"))

    check()
    workspace.stays_without_snapshot()
    workspace.everywhere(check)
    scan_cache_dir(cache).delete_revisions("a" * 40).execute()
    assert not (cache / "models--someone--tiny/snapshots" / ("a" * 40)).exists()
    workspace.everywhere(lambda: is_fetched(cache, files))


def is_fetched(cache: Path, files: Path) -> None:
    place = Path(snapshot_download(REPOSITORY, cache_dir=cache))
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {
        path.name: path.read_bytes() for path in files.iterdir()
    }


def test_download_to_a_directory_of_its_own(workspace: Workspace, tmp_path: Path) -> None:
    """With `local_dir` the files are plain ones, and a model there is sealed like any other."""
    files, place = tmp_path / "files", workspace.path / "models/tiny"
    model = llama(128, 3)
    model.save_pretrained(files)
    with hub(files, "c" * 40) as address:
        process = subprocess.run(
            [sys.executable, "-c", DOWNLOAD.replace("cache_dir", "local_dir"), REPOSITORY, place],
            env={
                **{k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"},
                "HF_ENDPOINT": address,
                "NO_PROXY": "*",
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert process.returncode == 0, process.stderr
    workspace.await_snapshots("models/tiny")
    workspace.everywhere(lambda: is_model(place, model.state_dict()))


def is_model(place: Path, expected: object) -> None:
    assert same(AutoModelForCausalLM.from_pretrained(place).state_dict(), expected)
