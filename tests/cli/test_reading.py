"""ls, log, show: what a store tells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Run, checkpoint


def test_ls_lists_snapshots_in_natural_order(run: Run, filled: Path) -> None:
    done = run("ls", filled)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["SNAPSHOT", "VERSION", "FILES", "SIZE", "ADDED"]
    assert [line.split()[0] for line in lines[1:]] == ["other", "run1/step-1", "run1/step-2", "run1/step-10"]
    assert lines[1].split()[1:5] == ["1", "1", "10.0", "KiB"]


def test_ls_of_a_prefix_and_of_a_pattern(run: Run, filled: Path) -> None:
    assert [one["name"] for one in run("ls", "--json", f"{filled}:run1").json] == [
        "run1/step-1",
        "run1/step-2",
        "run1/step-10",
    ]
    assert [one["name"] for one in run("ls", "--json", f"{filled}:*step-1*").json] == ["run1/step-1", "run1/step-10"]
    assert run("ls", "--json", f"{filled}:other").json[0]["path"] == "other.bin"


def test_ls_json_of_snapshots(run: Run, filled: Path) -> None:
    listed = run("ls", "--json", f"{filled}").json[0]
    assert set(listed) == {"name", "version", "files", "bytes", "time_ns"}
    assert (listed["name"], listed["version"], listed["files"], listed["bytes"]) == ("other", 1, 1, 10240)


def test_ls_of_an_empty_store(run: Run, tmp_path: Path) -> None:
    run("init", tmp_path / "s")
    assert run("ls", tmp_path / "s").out == "SNAPSHOT  VERSION  FILES  SIZE  ADDED\n"
    assert run("ls", "--json", tmp_path / "s").json == []


def test_ls_lists_files(run: Run, filled: Path) -> None:
    done = run("ls", f"{filled}:run1/step-2")
    assert done.code == 0
    lines = done.out.splitlines()
    assert [line.split()[-1] for line in lines] == ["config.json", "model.safetensors", "model.safetensors", "notes"]
    assert lines[1].endswith("latest -> model.safetensors")
    assert lines[3].startswith("drwx")


def test_ls_recursive_and_of_a_directory_and_of_a_file(run: Run, filled: Path) -> None:
    everything = run("ls", "-R", "--json", f"{filled}:run1/step-2").json
    assert [one["path"] for one in everything][-2:] == ["notes", "notes/a b.txt"]
    assert [one["path"] for one in run("ls", "--json", f"{filled}:run1/step-2/notes").json] == ["a b.txt"]
    (file,) = run("ls", "--json", f"{filled}:run1/step-2@1/notes/a b.txt").json
    assert set(file) == {"path", "type", "size", "mode", "uid", "gid", "mtime_ns"}
    assert (file["path"], file["type"], file["size"]) == ("a b.txt", "file", 10)
    (link,) = [one for one in everything if one["type"] == "symlink"]
    assert link["target"] == "model.safetensors"


def test_ls_lists_snapshots_nested_in_one(run: Run, filled: Path) -> None:
    for name in ("run1/step-2/best", "run1/step-2/extra/deep", "run1/step-2/notes/more", "run1/step-20"):
        assert run("add", filled, filled.parent / "other.bin", "--as", name).code == 0

    def listed(spec: str) -> list[str]:
        return [one.get("path", one.get("name")) for one in run("ls", "--json", f"{filled}:{spec}").json]

    own = ["config.json", "latest", "model.safetensors", "notes"]
    nested = ["run1/step-2/best", "run1/step-2/extra/deep", "run1/step-2/notes/more"]
    assert listed("run1/step-2") == own + nested
    assert listed("run1/step-2/notes") == ["a b.txt", "run1/step-2/notes/more"]
    assert listed("run1/step-2/extra") == ["run1/step-2/extra/deep"]
    assert listed("run1/step-1") == own
    lines = run("ls", f"{filled}:run1/step-2").out.splitlines()
    assert lines[4] == ""
    assert [line.split()[0] for line in lines[5:]] == ["SNAPSHOT", *nested]
    assert run("ls", f"{filled}:run1/step-2/absent").code == 3
    run("add", filled, filled.parent / "src" / "step-1", "--as", "run1/step-2")
    assert listed("run1/step-2@1") == own
    assert listed("run1/step-2@2") == own + nested


def test_the_store_of_the_environment(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONCLIPFS_STORE", str(filled))
    monkeypatch.chdir(tmp_path)
    assert run("ls").out == run("ls", filled).out
    assert [one["path"] for one in run("ls", "--json", "other").json] == ["other.bin"]
    (tmp_path / "other").mkdir()
    assert [one["path"] for one in run("ls", "--json", ":other").json] == ["other.bin"]
    monkeypatch.setenv("MOONCLIPFS_STORE", str(tmp_path / "absent"))
    done = run("ls", "other")
    assert (done.code, done.err) == (3, f"moonclipfs: no such store: {tmp_path}/absent (from $MOONCLIPFS_STORE)\n")


def test_names_that_would_move_the_cursor_are_escaped_everywhere(run: Run, filled: Path, tmp_path: Path) -> None:
    evil = os.fsdecode(b"e\x1b[2J\n\xff")
    (tmp_path / evil).mkdir()
    (tmp_path / evil / evil).write_text("text")
    assert run("add", filled, tmp_path / evil, "--as", evil).code == 0
    for command in (["ls", filled], ["ls", f"{filled}:{evil}"], ["log", filled], ["show", f"{filled}:{evil}"]):
        done = run(*command)
        assert done.code == 0, done.err
        assert "e\\x1b[2J\\x0a\\xff" in done.out
        assert "\x1b" not in done.out
    found = run("ls", "--json", f"{filled}:{evil}").json[0]["path"]
    assert found == evil


def test_log_tells_versions_newest_first_with_their_provenance(run: Run, filled: Path) -> None:
    done = run("log", filled)
    assert done.code == 0
    heads = [line.split()[0] for line in done.out.splitlines() if not line.startswith(" ")]
    assert heads == ["run1/step-10@1", "run1/step-2@1", "run1/step-1@1", "other@1"]
    assert "    command  moonclipfs add " in done.out
    assert f"    in       {os.getcwd()}\n" in done.out


def test_log_json(run: Run, filled: Path) -> None:
    (told,) = run("log", "--json", "-n", "1", f"{filled}:run1").json
    assert set(told) == {"name", "version", "files", "bytes", "time_ns", "current", "removed", "provenance"}
    assert (told["name"], told["current"], told["removed"]) == ("run1/step-10", True, False)
    assert told["provenance"]["command"].startswith("moonclipfs add ")


def test_log_tells_what_was_replaced(run: Run, filled: Path, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "again", 3)
    assert run("add", filled, source, "--as", "run1/step-2", "--no-provenance").code == 0
    lines = run("log", f"{filled}:run1/step-2").out.splitlines()
    assert lines[0].startswith("run1/step-2@2")
    assert "    command" not in lines[1]
    assert lines[1].endswith("(replaced)")
    assert [one["current"] for one in run("log", "--json", f"{filled}:run1/step-2").json] == [True, False]
    assert [one["version"] for one in run("log", "--json", f"{filled}:run1/step-2@1").json] == [1]


def test_show_tells_how_each_tensor_is_stored(run: Run, filled: Path) -> None:
    first = {one["path"]: one for one in run("show", "--json", f"{filled}:run1/step-1").json}
    model = first["model.safetensors"]
    assert set(model) == {
        *("path", "size", "format", "reason", "stored", "new", "raw", "depth", "bases", "sharers", "tensors"),
    }
    assert model["format"] == "safetensors"
    assert {one["name"]: (one["dtype"], one["shape"], one["size"]) for one in model["tensors"]} == {
        "frozen": ("F32", [64, 256], 65536),
        "head": ("F32", [128, 256], 131072),
        "scale": ("BF16", [4096], 8192),
    }
    assert all(set(one["raw"]) == {"full"} for one in model["tensors"])
    second = run("show", "--json", f"{filled}:run1/step-2/model.safetensors").json[0]
    tensors = {one["name"]: one for one in second["tensors"]}
    assert tensors["frozen"]["raw"] == {"shared": 65536}
    assert tensors["frozen"]["sharers"] == ["run1/step-1@1"]
    assert tensors["frozen"]["new"] == 0
    assert tensors["head"]["raw"] == {"delta": 131072}
    assert tensors["head"]["bases"] == ["run1/step-1@1"]
    assert tensors["head"]["depth"] == 1
    assert 0 < tensors["head"]["stored"] == tensors["head"]["new"] < 131072
    assert first["config.json"]["reason"] != ""


def test_show_prints_tables(run: Run, filled: Path) -> None:
    done = run("show", f"{filled}:run1/step-2")
    assert done.code == 0
    assert "delta against run1/step-1@1" in done.out
    assert "shared with run1/step-1@1" in done.out
    assert "config.json  opaque (" in done.out
    assert "    frozen" not in run("show", "--files", f"{filled}:run1/step-2").out


def test_show_says_which_snapshot_it_wants(run: Run, filled: Path) -> None:
    done = run("show", filled)
    assert done.code == 2
    assert "name one snapshot" in done.err
