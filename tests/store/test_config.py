"""Making and recognising a store."""

from __future__ import annotations

import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError, ExistsError, FormatVersionError, MoonclipError, NoSpaceError, NotFoundError
from moonclipfs.formats.cut import CutRules
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.config import Config, create_store, decode_config, enable, encode_config, load_config
from tests.faults import FaultyOps, NoLinkOps


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESERVE_BYTES", 8192)


def test_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    config = create_store(path)
    assert load_config(LocalBackend(path)) == config
    assert sorted(os.listdir(path)) == ["README.txt", "config.json", "leases", "log", "packs", "reserve", "tmp"]
    assert os.listdir(path / "tmp") == []
    readme = (path / "README.txt").read_text()
    assert "format version 1" in readme and "moonclipfs export" in readme and "rescue.py" in readme
    assert (path / "reserve").stat().st_blocks * 512 >= 8192
    for name in (".", "log", "packs", "tmp", "leases"):
        assert stat.S_IMODE((path / name).stat().st_mode) == 0o700
    assert len(config.store_id) == 32 and config.created.endswith("+00:00") and config.cut == CutRules()
    assert create_store(tmp_path / "other").store_id != config.store_id


def test_a_shared_store_is_the_groups(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        create_store(tmp_path / "store", shared=True)
    finally:
        os.umask(before)
    for name in (".", "log", "packs", "tmp", "leases"):
        assert stat.S_IMODE((tmp_path / "store" / name).stat().st_mode) == 0o2770
    assert stat.S_IMODE((tmp_path / "store" / "config.json").stat().st_mode) == 0o660
    assert load_config(LocalBackend(tmp_path / "store")).shared


def test_where_no_store_is_made(tmp_path: Path) -> None:
    create_store(tmp_path / "store")
    with pytest.raises(ExistsError, match="is a store already"):
        create_store(tmp_path / "store")
    with pytest.raises(ExistsError, match="not empty"):
        create_store(tmp_path)
    with pytest.raises(NotFoundError, match="missing"):
        create_store(tmp_path / "missing" / "store")
    (tmp_path / "file").touch()
    with pytest.raises(ExistsError):
        create_store(tmp_path / "file")


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="moonclipfs init"):
        load_config(LocalBackend(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()
    with pytest.raises(FormatVersionError, match=r"not a store.*moonclipfs init"):
        load_config(LocalBackend(tmp_path))
    (tmp_path / "config.json").write_text('{"format": "something else"}')
    with pytest.raises(FormatVersionError, match="something else"):
        load_config(LocalBackend(tmp_path))


def test_an_empty_directory_becomes_a_store_without_hard_links(tmp_path: Path) -> None:
    create_store(tmp_path, ops=NoLinkOps())
    assert load_config(LocalBackend(tmp_path)).version == 1


def test_features_of_newer_versions(tmp_path: Path) -> None:
    config = Config("0" * 32)
    with pytest.raises(FormatVersionError, match=r"holographic.*reading"):
        decode_config(encode_config(replace(config, incompatible=("holographic",))))
    known = decode_config(encode_config(replace(config, read_only_compatible=("quantum",), compatible=("pretty",))))
    with pytest.raises(FormatVersionError, match=r"quantum.*writing"):
        known.check_writable()
    config.check_writable()
    with pytest.raises(FormatVersionError, match="version 2"):
        decode_config(encode_config(replace(config, version=2)))


def test_the_cut_rules_of_a_store_are_its_own() -> None:
    config = Config("0" * 32, cut=CutRules(chunk_average=limits.CHUNK_AVERAGE // 2))
    assert decode_config(encode_config(config)) == config


def test_every_flipped_byte_is_found() -> None:
    data = encode_config(Config("0123456789abcdef" * 2, created="2026-11-30T00:00:00+00:00"))
    for at in range(len(data)):
        for mask in (0x01, 0x10, 0x80):
            try:
                changed = decode_config(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
            except MoonclipError as error:
                assert isinstance(error, CorruptError | FormatVersionError)
            else:
                # White space between the fields says nothing.
                assert changed == decode_config(data) and data[at : at + 1].isspace()


def test_odd_configs_are_damage() -> None:
    fields = json.loads(encode_config(Config("0" * 32)))
    for change in ({"cut": 3}, {"incompatible": 7}, {"sha256": None}, {"cut": {"chunk_min": "x"}}):
        with pytest.raises(CorruptError):
            decode_config(json.dumps({**fields, **change}).encode())
    for data in (b"", b"[]", b"null", b"[" * 100_000, b"\xff"):
        with pytest.raises(CorruptError):
            decode_config(data)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_full_disk_at_any_call_leaves_no_store_and_can_be_repeated(tmp_path: Path, lasting: bool) -> None:
    for at in range(60):
        path = tmp_path / str(at)
        ops = FaultyOps(at, lasting=lasting)
        try:
            create_store(path, ops=ops)
        except NoSpaceError:
            assert not (path / "config.json").exists() or ops.failed in ("open", "fsync")
            if not (path / "config.json").exists():
                create_store(path)
        assert load_config(LocalBackend(path)).version == 1
        if not ops.reached:
            return
    pytest.fail("the calls never end")


def test_features_that_two_give_at_one_time_are_both_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.store.config._WRITER_FEATURES", frozenset("abcdef"))
    config = create_store(tmp_path / "store")
    meet = threading.Barrier(6)

    def give(feature: str) -> None:
        meet.wait()
        enable(LocalBackend(tmp_path / "store"), config, feature)

    threads = [threading.Thread(target=give, args=(feature,)) for feature in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(load_config(LocalBackend(tmp_path / "store")).read_only_compatible) == list("abcdef")
