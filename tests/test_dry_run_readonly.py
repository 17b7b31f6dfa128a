"""A dry run over a store that can only be read: what is written lies elsewhere, and is gone at the end."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import moonclipfs
from moonclipfs.errors import FuseUnavailableError, UsageError
from moonclipfs.fuse.prepare import check_device
from moonclipfs.store.store import Store
from tests.store.kit import noise, publish
from tests.store.test_alternates import digests


@pytest.fixture
def readonly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store on a read-only file system."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    store = tmp_path / "store"
    with Store.create(store) as opened:
        publish(opened, "run/1", {"a": noise(1), "b": noise(2)})
    if subprocess.run(["mount", "--bind", store, store], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount")
    subprocess.run(["mount", "-o", "remount,bind,ro", store], check=True)
    yield store
    subprocess.run(["umount", store], check=True)
    assert not list(temporary.iterdir()), "nothing is left"


@pytest.fixture
def fuse() -> None:
    """Skip where the FUSE device cannot be opened."""
    try:
        check_device()
    except FuseUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("mount", [False, True])
def test_a_dry_run_over_a_store_that_can_only_be_read(
    readonly: Path, mount: bool, request: pytest.FixtureRequest
) -> None:
    if mount:
        request.getfixturevalue("fuse")
    before = digests(readonly)
    with moonclipfs.dry_run(readonly, "run/1", mount=mount) as path:
        assert (path / "a").read_bytes() == noise(1)
        (path / "a").write_bytes(noise(3))
        (path / "b").unlink()
        assert (path / "a").read_bytes() == noise(3)
        assert sorted(one.name for one in path.iterdir()) == ["a"]
    assert digests(readonly) == before


def test_what_could_not_be_kept_is_refused_before_it_begins(readonly: Path) -> None:
    with pytest.raises(UsageError, match=r"only be read.*--state"), moonclipfs.dry_run(readonly, "run/1", commit=True):
        pass


def test_run_dry_run_over_a_store_that_can_only_be_read(readonly: Path, fuse: None) -> None:
    before = digests(readonly)
    code = "from moonclipfs.cli.main import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "run", "--dry-run", str(readonly)]
    words = ["--", "sh", "-c", "cat {dir}/a | wc -c; echo changed > {dir}/a; rm {dir}/b"]
    done = subprocess.run([*command, "--base", "run/1", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "20000"
    assert "~ a" in done.stderr and "- b" in done.stderr
    for options in (["--base", "run/1", "--commit"], []):
        refused = subprocess.run([*command, *options, *words], capture_output=True, text=True, check=False)
        assert refused.returncode == 2 and "--state" in refused.stderr and refused.stderr.count("\n") == 1
    assert digests(readonly) == before
