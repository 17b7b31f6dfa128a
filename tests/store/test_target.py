"""What a person names: text, or a path in a mount, to a store and what is meant in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moonclipfs.errors import FormatVersionError, NotFoundError, PermissionDeniedError, UsageError
from moonclipfs.store.store import Store
from moonclipfs.store.target import Place, Target, is_store, locate, parse_target, select
from moonclipfs.types import Attributes, Entry, EntryType
from tests.nobody import Nobody


@pytest.fixture
def named(store: Store) -> Store:
    """A store with run1/step-2 (two versions), run1/step-10, run1, a@1 and a removed one."""
    with store.ingest() as ingest:
        for mode in (0o700, 0o750):
            root = ingest.put_directory([Entry(b"sub", EntryType.SYMLINK, Attributes(mode), target=b"x")])
            ingest.publish("run1/step-2", root, {})
        for name in ("run1/step-10", "run1", "a@1", "gone"):
            ingest.publish(name, root, {})
    store.log.unbind(["gone"])
    return store


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_store_is_a_directory_with_a_config_and_packs(store: Store, tmp_path: Path) -> None:
    assert is_store(store.path)
    assert not is_store(tmp_path)
    assert not is_store(tmp_path / "absent")
    assert not is_store(store.path / "config.json")


def test_paths_and_names(store: Store) -> None:
    assert parse_target("store") == Target(Path("store"))
    assert parse_target("store:") == Target(Path("store"))
    assert parse_target("./store:run1/ckpt@2/") == Target(Path("store"), "run1/ckpt@2")
    assert parse_target(f"{store.path}:a:b") == Target(store.path, "a:b")
    assert parse_target("run1", "store") == Target(Path("store"), "run1")
    assert parse_target(":run1", "store") == Target(Path("store"), "run1")
    assert parse_target(":", "store") == Target(Path("store"))


def test_a_path_with_colons_is_a_path(store: Store) -> None:
    os.rename(store.path, "a:b")
    assert parse_target("a:b") == Target(Path("a:b"))
    assert parse_target("a:b:run:1") == Target(Path("a:b"), "run:1")


def test_an_existing_store_wins_over_a_name_and_a_name_over_another_path(store: Store) -> None:
    os.mkdir("run1")
    assert parse_target("store", store.path) == Target(Path("store"))
    assert parse_target("run1", store.path) == Target(store.path, "run1")


@pytest.mark.parametrize("text", ["absent", "absent:run1", "x/y/z"])
def test_what_exists_nowhere(text: str) -> None:
    with pytest.raises(NotFoundError, match=r"no such store: .*; make one with `moonclipfs init`"):
        parse_target(text)


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in (".", "file", "file:run1", "/dev/null"):
        with pytest.raises(
            FormatVersionError, match=r"not a store, and not in a mount: .*; make a store with `moonclipfs init`"
        ):
            parse_target(text)
    with pytest.raises(FormatVersionError, match="MOONCLIPFS_STORE"):
        parse_target(":x", tmp_path)
    with pytest.raises(NotFoundError, match="MOONCLIPFS_STORE"):
        parse_target("x", tmp_path / "absent")


@pytest.mark.parametrize("text", ["", "a\0b", ":run1"])
def test_what_makes_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        parse_target(text)


def test_a_store_of_somebody_else(store: Store, nobody: Nobody) -> None:
    with nobody.copy(store.path) as copy:
        copy.chmod(0)

        def refused() -> None:
            for text in (str(copy), f"{copy}:run1"):
                with pytest.raises(PermissionDeniedError, match="cannot look into"):
                    parse_target(text)

        nobody.run(refused)


def test_the_longest_name_wins(named: Store) -> None:
    names = named.names()
    bound = names.bound()
    assert locate(names, "") == Place(None)
    assert locate(names, "run1/step-2") == Place(bound["run1/step-2"])
    assert locate(names, "run1/step-2/sub/x") == Place(bound["run1/step-2"], b"sub/x")
    assert locate(names, "run1/step-3/x") == Place(bound["run1"], b"step-3/x")
    assert locate(names, "run1/step-2@1/sub") == Place(names.versions("run1/step-2")[0], b"sub")
    assert locate(names, "a@1") == Place(bound["a@1"])
    assert locate(names, "gone@1") == Place(names.versions("gone")[0])


def test_what_is_not_there_is_told_with_what_is(named: Store) -> None:
    names = named.names()
    with pytest.raises(NotFoundError, match=r"did you mean run1\?"):
        locate(names, "run2")
    with pytest.raises(NotFoundError, match=r"no version 7; kept: 1, 2"):
        locate(names, "run1/step-2@7")
    with pytest.raises(NotFoundError, match=r"was removed; its last kept version is gone@1"):
        locate(names, "gone")


def test_sets_of_names(named: Store) -> None:
    names = named.names()

    def paths(spec: str) -> list[str]:
        return [version.path for version in select(names, spec)]

    assert paths("") == ["a@1", "run1", "run1/step-2", "run1/step-10"]
    assert paths("run1/step-*") == ["run1/step-2", "run1/step-10"]
    assert paths("run1") == ["run1"]
    assert select(names, "run1/step-2@1")[0].number == 1
    with pytest.raises(NotFoundError, match="no snapshot matches b"):
        select(names, "b*")
    with pytest.raises(UsageError, match="path inside a snapshot"):
        select(names, "run1/step-2/sub")


def test_an_empty_store_has_no_names_and_that_is_no_error(store: Store) -> None:
    assert select(store.names(), "") == []
