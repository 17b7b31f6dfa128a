"""Restore and clone: old versions bound again, in one log record."""

from __future__ import annotations

import pytest

from moonclipfs.errors import ExistsError, NotFoundError, UsageError
from moonclipfs.store.forget import forget
from moonclipfs.store.gc import collect
from moonclipfs.store.rebind import clone, restore
from moonclipfs.store.store import Store
from tests.store.kit import contents, noise, packs, publish


@pytest.fixture
def three(store: Store) -> Store:
    """A store with three versions of run/a."""
    for number in (1, 2, 3):
        publish(store, "run/a", {"f": noise(number)}, automatic=True, note=number)
    return store


def test_an_old_version_becomes_the_newest(three: Store) -> None:
    sequence, before = three.names().sequence, packs(three)
    version = restore(three, "run/a", 1)
    assert (version.path, version.number, version.root) == ("run/a", 4, three.resolve("run/a@1").root)
    assert contents(three, "run/a") == {"f": noise(1)}
    assert contents(three, "run/a@3") == {"f": noise(3)}
    assert (three.names().sequence, packs(three)) == (sequence + 1, before)
    assert version.metadata["restored"] == "run/a@1"
    assert version.metadata["note"] == 1
    assert "automatic" not in version.metadata


def test_what_is_bound_already_is_left(three: Store) -> None:
    assert restore(three, "run/a", 3).number == 3
    assert three.names().highest("run/a") == 3


def test_a_removed_name_comes_back(three: Store) -> None:
    three.log.unbind(["run/a"])
    assert restore(three, "run/a").number == 4
    assert contents(three, "run/a") == {"f": noise(3)}
    with pytest.raises(UsageError, match=r"run/a is there: .*kept: 1, 2, 3, 4"):
        restore(three, "run/a")


def test_to_another_name(three: Store) -> None:
    version = restore(three, "run/a", 2, to="old/")
    assert (version.path, version.number, version.metadata["restored"]) == ("old", 1, "run/a@2")
    with pytest.raises(ExistsError, match="old is there already"):
        restore(three, "run/a", 1, to="old")
    for name in ("@x", "a//b", "../x"):
        with pytest.raises(UsageError, match="cannot be a snapshot's name"):
            restore(three, "run/a", 1, to=name)


def test_clones_share_everything_and_part_ways(three: Store) -> None:
    before = packs(three)
    assert clone(three, "run/a", "run/b").number == 1
    assert clone(three, "run/a@1", "c").metadata["cloned"] == "run/a@1"
    assert packs(three) == before
    publish(three, "run/b", {"f": noise(9)})
    assert contents(three, "run/a") == {"f": noise(3)}
    with pytest.raises(ExistsError):
        clone(three, "run/a", "run/b")


@pytest.mark.parametrize("name", ["rum/a", "run/a@7", "run", "run/a/f"])
def test_what_is_not_there(three: Store, name: str) -> None:
    with pytest.raises((NotFoundError, UsageError)):
        clone(three, name, "new")
    spec, _, number = name.partition("@")
    with pytest.raises((NotFoundError, UsageError)):
        restore(three, spec, int(number or 0) or None, to="new")
    assert "new" not in three.names().bound()


def test_a_version_that_is_forgotten_meanwhile_is_not_bound(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_ = Store.ingest

    def late(self: Store) -> object:
        with Store.open(three.path, write=True) as other:
            other.log.forget([("run/a", 1)])
        return publish_(self)

    monkeypatch.setattr(Store, "ingest", late)
    with pytest.raises(NotFoundError, match="forgotten or moved meanwhile"):
        restore(three, "run/a", 1)
    assert three.names().highest("run/a") == 3


def test_what_was_restored_survives_gc(three: Store) -> None:
    three.log.unbind(["run/a"])
    clone_of = restore(three, "run/a", 1, to="kept")
    forget(three, [version for version in three.names().all_versions() if version.path == "run/a"])
    collect(three)
    assert contents(three, "kept") == {"f": noise(1)}
    assert three.names().bound() == {"kept": clone_of}
