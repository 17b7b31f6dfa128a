"""init, add, export, diff, gc: what goes in, and how it comes out."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Run, checkpoint, safetensors, weights


def same_tree(left: Path, right: Path) -> bool:
    def listing(root: Path) -> dict[str, object]:
        return {
            str(path.relative_to(root)): os.readlink(path)
            if path.is_symlink()
            else path.is_file() and path.read_bytes()
            for path in root.rglob("*")
        }

    return listing(left) == listing(right)


def test_init_makes_a_private_store(run: Run, tmp_path: Path) -> None:
    done = run("init", tmp_path / "s")
    assert (done.code, done.out) == (0, f"made a store in {tmp_path}/s\n")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    again = run("init", tmp_path / "s")
    assert again.code == 4
    assert "is a store already" in again.err


def test_init_json_and_shared_and_the_environment(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCLIPFS_STORE", str(tmp_path / "s"))
    made = run("init", "--shared=group", "--json").json
    assert made["store"] == str(tmp_path / "s")
    assert len(made["id"]) == 32
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) & 0o770 == 0o770
    monkeypatch.delenv("MOONCLIPFS_STORE")
    assert run("init").code == 2
    assert run("init", "--shared=all", tmp_path / "t").code == 2


def test_add_tells_what_became_of_the_bytes(run: Run, tmp_path: Path) -> None:
    run("init", tmp_path / "s")
    sources = [checkpoint(tmp_path / "src" / f"step-{step}", step) for step in (10, 9)]
    done = run("add", tmp_path / "s", *sources, "--as", "run1/")
    assert done.code == 0
    assert done.err == ""
    lines = done.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["run1/step-9@1", "run1/step-10@1", "in all"]
    assert "3 files, 200.3 KiB stored in " in lines[0]
    assert " shared; " in lines[1]
    assert " as deltas of " in lines[1]
    again = run("add", tmp_path / "s", *sources, "--as", "run1/")
    assert again.out.splitlines()[:2] == ["run1/step-9@1: unchanged", "run1/step-10@1: unchanged"]


def test_add_json(run: Run, tmp_path: Path) -> None:
    run("init", tmp_path / "s")
    report = run("add", "--json", tmp_path / "s", checkpoint(tmp_path / "one", 1)).json
    counts = {"raw", "stored", "shared", "delta", "delta_stored", "full", "full_stored", "literal", "holes"}
    assert set(report) == {"dry_run", "snapshots", *counts}
    (snapshot,) = report["snapshots"]
    assert set(snapshot) == {"name", "version", "unchanged", "files", "bytes", *counts}
    assert (snapshot["name"], snapshot["version"], snapshot["unchanged"], snapshot["files"]) == ("one", 1, False, 3)
    assert snapshot["raw"] == snapshot["bytes"] == snapshot["full"] + snapshot["literal"]


def test_add_dry_run_stores_nothing(run: Run, tmp_path: Path) -> None:
    run("init", tmp_path / "s")
    source = checkpoint(tmp_path / "one", 1)
    predicted = run("add", "--dry-run", "--json", tmp_path / "s", source).json
    assert predicted["dry_run"] is True
    assert predicted["snapshots"][0]["version"] is None
    assert run("ls", "--json", tmp_path / "s").json == []
    assert not list((tmp_path / "s" / "packs").iterdir())
    assert "would take about" in run("add", "--dry-run", tmp_path / "s", source).out
    real = run("add", "--json", tmp_path / "s", source).json
    assert abs(predicted["stored"] - real["stored"]) <= 0.1 * real["stored"]


def test_add_move_deletes_what_was_stored(run: Run, tmp_path: Path) -> None:
    run("init", tmp_path / "s")
    source, twin = (checkpoint(tmp_path / name / "ckpt", 4) for name in ("a", "b"))
    assert run("add", "--move", f"{tmp_path}/s:run/", source).code == 0
    assert not source.exists()
    assert run("export", f"{tmp_path}/s:run/ckpt", tmp_path / "out").code == 0
    assert same_tree(tmp_path / "out", twin)


def test_the_name_of_add_in_all_its_forms(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("init", tmp_path / "s")
    checkpoint(tmp_path / "ckpt", 1)
    monkeypatch.chdir(tmp_path)
    forms = [
        ("s", "ckpt"),
        ("s", "ckpt", "--as", "b"),
        ("s:c", "ckpt"),
        ("s:d/", "ckpt"),
    ]
    for form in forms:
        assert run("add", *form).code == 0
    monkeypatch.setenv("MOONCLIPFS_STORE", "s")
    for form in [("ckpt", "--as", "e"), (":f", "ckpt"), ("s", "ckpt", "--as", "g"), ("./ckpt", "--as", "h")]:
        done = run("add", *form)
        assert done.code == 0, done.err
    names = [one["name"] for one in run("ls", "--json", "s").json]
    assert names == ["b", "c", "ckpt", "d/ckpt", "e", "f", "g", "h"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["add", "s"], 2, "nothing to add"),
        (["add", "s:x@2", "src"], 2, "is one version"),
        (["add", "s:x", "src", "--as", "y"], 2, "given twice"),
        (["add", "s", "absent"], 3, "absent"),
        (["add", "s", "src", "--as", "@x"], 2, "names that begin with @"),
        (["add", "s", "src", "--as", "a/../b"], 2, "cannot be a snapshot's name"),
        (["add", "s", "src", "src/config.json"], 2, "several paths need a name"),
        (["add", "s", "s"], 2, "the store itself"),
        (["add", "s", "/dev/null"], 2, "device"),
        (["add", "--move", "--dry-run", "s", "src"], 2, "exclude"),
        (["add", "src", "src"], 9, "not a store"),
        (["add", "nowhere", "src"], 3, "no such store"),
        (["export", "s:a"], 2, "a directory to write"),
        (["export", "s", "out"], 2, "--all"),
        (["export", "s:zzz", "out"], 3, "no snapshot zzz"),
        (["export", "--all", "s", "s", "out"], 2, "one STORE"),
        (["export", "s:a/absent", "out"], 3, "no absent in a@1"),
        (["diff", "s", "src"], 2, "name one"),
        (["diff", "absent", "src"], 3, "no such store"),
        (["gc", "s:a"], 2, "whole store"),
    ],
)
def test_mistakes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run("init", "s")
    checkpoint(tmp_path / "src", 1)
    assert run("add", "s", "src", "--as", "a").code == 0
    done = run(*arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert done.err.startswith("moonclipfs: ")
    assert done.err.count("\n") == 1


def test_export_gives_everything_back(run: Run, filled: Path, tmp_path: Path) -> None:
    done = run("export", f"{filled}:run1/step-2", tmp_path / "out")
    assert done.code == 0
    assert done.out == f"run1/step-2@1: 3 files, 200.3 KiB, in {tmp_path}/out\n"
    assert same_tree(tmp_path / "out", tmp_path / "src" / "step-2")
    again = run("export", f"{filled}:run1/step-2", tmp_path / "out")
    assert "0 files, 0 B, 3 already there" in again.out


def test_export_of_several_keeps_their_names(run: Run, filled: Path, tmp_path: Path) -> None:
    assert run("export", f"{filled}:run1/step-1", "run1/step-10", tmp_path / "two").code == 0
    assert sorted(path.name for path in (tmp_path / "two" / "run1").iterdir()) == ["step-1", "step-10"]
    assert run("export", f"{filled}:run1", tmp_path / "prefix").code == 0
    assert same_tree(tmp_path / "prefix" / "run1", tmp_path / "src")
    assert run("export", "--all", filled, tmp_path / "all").code == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["other", "run1"]


def test_export_of_a_part(run: Run, filled: Path, tmp_path: Path) -> None:
    done = run("export", f"{filled}:run1/step-2/notes/a b.txt", tmp_path / "file")
    assert done.out == f"run1/step-2@1/notes/a b.txt: 1 file, 10 B, in {tmp_path}/file\n"
    assert (tmp_path / "file" / "a b.txt").read_text() == "note\n" * 2
    assert run("export", f"{filled}:run1/step-10@1/notes", tmp_path / "directory").code == 0
    assert (tmp_path / "directory" / "a b.txt").read_text() == "note\n" * 10
    assert run("export", f"{filled}:run1/step-10/notes", "other", tmp_path / "both").code == 0
    assert sorted(str(path.relative_to(tmp_path / "both")) for path in (tmp_path / "both").rglob("*.*")) == [
        "other/other.bin",
        "run1/step-10/a b.txt",
    ]


def test_export_does_not_replace_unless_told(run: Run, filled: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    done = run("export", f"{filled}:run1/step-2", tmp_path / "out")
    assert done.code == 4
    assert (tmp_path / "out" / "config.json").read_text() == "mine"
    assert run("export", "--overwrite", f"{filled}:run1/step-2", tmp_path / "out").code == 0
    assert same_tree(tmp_path / "out", tmp_path / "src" / "step-2")


def test_diff_of_snapshots_and_plain_files(run: Run, filled: Path, tmp_path: Path) -> None:
    same = run("diff", f"{filled}:run1/step-2", tmp_path / "src" / "step-2")
    assert (same.code, same.out) == (0, "3 tensors: 3 unchanged\n")
    differs = run("diff", f"{filled}:run1/step-1", f"{filled}:run1/step-2")
    assert differs.code == 1
    assert differs.out.splitlines()[0].startswith("changed  head  F32 128x256  100% of elements, max ")
    assert "changed  file config.json" in differs.out
    assert "frozen" not in differs.out
    assert "unchanged  frozen" in run("diff", "--all", f"{filled}:run1/step-1", f"{filled}:run1/step-2").out


def test_diff_json(run: Run, filled: Path) -> None:
    told = run("diff", "--json", f"{filled}:run1/step-1", f"{filled}:run1/step-2").json
    assert set(told) == {"different", "violations", "tensors", "files"}
    assert told["different"] is True
    (head,) = told["tensors"]
    assert set(head) == {"name", "change", "left", "right", "values", "note"}
    assert head["left"] == {"path": "model.safetensors", "dtype": "F32", "shape": [128, 256]}
    assert set(head["values"]) == {"elements", "changed", "share", "max_abs", "mean_abs", "norm", "not_finite"}
    assert {one["path"] for one in told["files"]} == {"config.json", "notes/a b.txt"}


def test_diff_expecting_a_frozen_backbone(run: Run, filled: Path, tmp_path: Path) -> None:
    sides = (f"{filled}:run1/step-1", f"{filled}:run1/step-2")
    assert run("diff", *sides, "--expect-unchanged", "fro*").code == 0
    broken = run("diff", *sides, "--expect-unchanged", "fro*", "--expect-unchanged", "h*")
    assert broken.code == 1
    assert "expected unchanged: h*: head is changed" in broken.out
    assert run("diff", *sides, "--expect-unchanged", "none*").code == 1


def test_diff_of_added_and_removed_tensors(run: Run, tmp_path: Path) -> None:
    old = weights(1)
    new = {"extra" if name == "scale" else name: values for name, values in old.items()}
    (tmp_path / "a.safetensors").write_bytes(safetensors(old))
    (tmp_path / "b.safetensors").write_bytes(safetensors(new))
    done = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert done.code == 1
    assert "added    extra" in done.out
    assert "removed  scale" in done.out


def test_gc_of_a_store_where_all_is_needed(run: Run, filled: Path) -> None:
    done = run("gc", filled)
    assert done.code == 0
    assert done.out.startswith("freed 0 B in 0 packs; ")
    told = run("gc", "--dry-run", "--json", filled).json
    assert {"dry_run", "live_bytes", "dead_bytes", "freed_bytes", "waiting_for", "problems"} <= set(told)
    assert told["dry_run"] is True
    assert told["dead_bytes"] == 0


def test_a_file_that_is_not_understood_is_shown_with_the_reason(run: Run, tmp_path: Path) -> None:
    run("init", tmp_path / "s")
    whole = safetensors(weights(1))
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    assert run("add", tmp_path / "s", tmp_path / "cut.safetensors", "--as", "x").code == 0
    (shown,) = run("show", "--json", f"{tmp_path}/s:x").json
    assert "100 bytes" in shown["reason"]
    assert json.loads((tmp_path / "s" / "config.json").read_text())["format"] == "moonclipfs-store"
