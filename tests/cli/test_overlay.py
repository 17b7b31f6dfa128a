"""Overlays by commands, on a store that nobody has mounted: made, told of, compared, committed, rebased, discarded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.store import Store
from tests.cli.conftest import Run, safetensors, weights


def edit(store: Path, name: str) -> None:
    """Change some of an overlay on run1/step-2: a tensor, a name, and attributes."""
    changed = weights(2)
    changed["head"][3, :16] += np.float32(1)
    with Store.open(store, write=True) as opened, Overlays(opened) as overlays:
        root = LayerPath(overlays.get(name))
        (root / "model.safetensors").write_bytes(safetensors(changed))
        (root / "notes" / "a b.txt").unlink()
        (root / "new").write_bytes(b"new")
        (root / "config.json").chmod(0o600)


def test_the_life_of_an_overlay(run: Run, filled: Path) -> None:
    made = run("overlay", "create", filled, "arm1", "--base", "run1/step-2")
    assert (made.code, made.err) == (0, "")
    assert made.out.startswith("arm1 on run1/step-2@1: ") and "@overlays/arm1" in made.out
    assert run("overlay", "diff", filled, "arm1") == (0, "nothing was changed\n", "")

    edit(filled, "arm1")
    told = run("overlay", "diff", filled, "arm1")
    assert told.code == 1
    lines = told.out.splitlines()
    assert lines[:4] == ["= config.json (mode)", "~ model.safetensors", "+ new", "- notes/a b.txt"]
    assert lines[4] == "tensors:" and "head" in lines[5] and "changed" in lines[5] and "max 1," in lines[5]
    assert lines[6] == "4 paths: 1 attributes, 1 changed, 1 added, 1 removed; 1 tensor: 1 changed"

    assert run("overlay", "commit", filled, "arm1", "--as", "run1/arm1").out == "run1/arm1@1: 3 files, 200.3 KiB\n"
    assert run("overlay", "commit", filled, "arm1", "--as", "run1/arm1").out == "run1/arm1@1: nothing new\n"
    assert run("diff", f"{filled}:run1/arm1", f"{filled}:run1/step-2").code == 1
    assert run("overlay", "commit", filled, "arm1").out.startswith("arm1@1: ")

    assert run("overlay", "rename", filled, "arm1", "winner").code == 0
    assert run("overlay", "diff", filled, "winner").code == 1
    assert run("overlay", "discard", filled, "winner") == (0, "", "")
    assert run("overlay", "list", filled) == (0, "", "")
    assert sorted(run("ls", "--json", filled).json[0]) and "run1/arm1" in run("ls", filled).out


def test_json(run: Run, filled: Path) -> None:
    made = run("overlay", "create", filled, "arm1", "--base", f"{filled}:run1/step-2@1", "--quota", "1G", "--json").json
    assert made["name"] == "arm1" and made["base"] == "run1/step-2@1" and made["path"] is None
    assert made["quota"] == 1 << 30 and not made["ephemeral"] and not made["dry_run"]
    edit(filled, "arm1")
    (listed,) = run("overlay", "list", "--json", filled).json
    assert listed["name"] == "arm1" and listed["holder"] is None
    status = run("overlay", "status", "--json", filled, "arm1").json
    assert status["base"] == "run1/step-2@1" and status["staged_files"] >= 1 and status["failed_files"] == {}
    found = run("overlay", "diff", "--json", filled, "arm1").json
    assert found["different"] and [one["path"] for one in found["files"]] == [
        "config.json", "model.safetensors", "new", "notes/a b.txt"
    ]  # fmt: skip
    (tensor,) = found["tensors"]
    assert tensor["name"] == "head" and tensor["values"]["changed"] == 16
    assert tensor["values"]["share"] == pytest.approx(16 / (128 * 256))
    committed = run("overlay", "commit", "--json", filled, "arm1").json
    assert committed == {"path": "arm1", "number": 1, "files": 3, "bytes": committed["bytes"], "new": True}
    rebased = run("overlay", "rebase", "--json", filled, "arm1", "--onto", "run1/step-10").json
    assert rebased["base"] == "run1/step-10@1"
    places = {one["path"]: (one["what"], one["base"]) for one in rebased["conflicts"]}
    assert places["model.safetensors"] == ("both changed it", "@versions/run1/step-10/1/model.safetensors")


def test_status_and_list_for_people(run: Run, filled: Path) -> None:
    run("overlay", "create", filled, "arm1", "--base", "run1/step-2", "--quota", "2M")
    run("overlay", "create", filled, "empty")
    edit(filled, "arm1")
    told = run("overlay", "status", filled, "arm1").out
    assert "run1/step-2@1" in told and "of 2.0 MiB" in told and "staged" in told
    lines = run("overlay", "list", filled).out.splitlines()
    assert lines[0].split() == ["NAME", "BASE", "CREATED"]
    assert lines[1].startswith("arm1   run1/step-2@1") and lines[1].endswith("quota 2.0 MiB")
    assert lines[2].split()[:2] == ["empty", "-"]


def test_an_overlay_of_an_overlay(run: Run, filled: Path) -> None:
    """It sees its parent as that was: what comes later in either is not seen in the other."""
    run("overlay", "create", filled, "parent", "--base", "run1/step-2")
    edit(filled, "parent")
    assert run("overlay", "create", filled, "child", "--base", "parent").out.startswith("child on overlay parent: ")
    with Store.open(filled, write=True) as opened, Overlays(opened) as overlays:
        parent, child = LayerPath(overlays.get("parent")), LayerPath(overlays.get("child"))
        assert (child / "new").read_bytes() == b"new" and not (child / "notes" / "a b.txt").exists()
        (parent / "new").write_bytes(b"newer")
        (child / "own").write_bytes(b"own")
        assert (child / "new").read_bytes() == b"new" and not (parent / "own").exists()
    assert run("overlay", "diff", filled, "child").out.splitlines()[0] == "+ own"


def test_a_rebase_without_conflicts_takes_over_what_is_new(run: Run, filled: Path, tmp_path: Path) -> None:
    run("overlay", "create", filled, "arm1", "--base", "run1/step-2")
    with Store.open(filled, write=True) as opened, Overlays(opened) as overlays:
        (LayerPath(overlays.get("arm1")) / "mine").write_bytes(b"mine")
    run("add", filled, tmp_path / "src" / "step-10", "--as", "run1/step-2")
    assert run("overlay", "rebase", filled, "arm1") == (0, "arm1 stands on run1/step-2@2\n", "")
    told = run("overlay", "diff", filled, "arm1").out.splitlines()
    assert told == ["+ mine", "1 path: 1 added"]
    with Store.open(filled, write=True) as opened, Overlays(opened) as overlays:
        assert (LayerPath(overlays.get("arm1")) / "config.json").read_text() == '{"step": 10}'


def test_a_private_store_over_one_that_is_only_read(run: Run, filled: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in filled.rglob("*")}
    state = tmp_path / "state"
    made = run("overlay", "create", filled, "arm1", "--base", "run1/step-2", "--state", state)
    assert made.code == 0 and str(state) in made.out
    edit(state, "arm1")
    assert run("overlay", "diff", state, "arm1").code == 1
    assert {path: path.stat().st_mtime_ns for path in filled.rglob("*")} == before
    assert run("overlay", "commit", state, "arm1", "--into", filled, "--as", "kept").out.startswith("kept@1: 3 files")
    assert run("overlay", "commit", state, "arm1", "--into", filled, "--as", "kept").out == "kept@1: nothing new\n"
    shutil.rmtree(state)
    assert run("verify", filled).code == 0
    assert run("diff", f"{filled}:kept", f"{filled}:run1/step-2").code == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("create", "STORE", "a/b"), 2, "cannot name an overlay"),
        (("create", "STORE", "arm", "--base", "run1/step-3"), 3, "did you mean run1/step-2"),
        (("create", "STORE", "arm", "--base", "/etc"), 2, "is in no mount"),
        (("create", "STORE", "arm", "--base", "STORE"), 2, "whole store"),
        (("create", "STORE", "arm", "--ephemeral"), 2, "only a mount"),
        (("create", "STORE", "arm", "--owner", "1"), 2, "only a mount"),
        (("create", "STORE", "arm", "--dry-run"), 2, "only a mount"),
        (("create", "STORE", "arm", "--state", "STORE"), 2, "lies in the other"),
        (("create", "STORE", "arm", "brm"), 2, "one name"),
        (("create", "STORE:other", "arm"), 2, "is a snapshot"),
        (("create", "STORE", "arm", "--quota", "much"), 2, "no size"),
        (("diff", "STORE", "arm"), 3, "no overlay arm"),
        (("diff", "STORE"), 2, "lies in no overlay"),
        (("diff", "arm"), 2, "in no mount or store"),
        (("commit", "/nowhere/store", "arm"), 3, "no such store"),
        (("commit", "STORE", "there", "--as", "../up"), 2, "up"),
        (("commit", "STORE", "there", "--into", "/nowhere"), 3, "no such store"),
        (("rename", "STORE", "there"), 2, "lies in no overlay"),
        (("rename", "STORE", "there", "there"), 4, "already"),
        (("discard", "STORE", "thre"), 3, "did you mean there"),
        (("rebase", "STORE", "there"), 2, "no snapshot"),
        (("create", "STORE", "arm", "--base", "@overlays/there/sub"), 2, "part of an overlay"),
        (("commit", "STORE", "there", "--as", ""), 2, "''"),
        (("list", "/nowhere"), 3, "no such store"),
        (("list",), 2, "no mount or store given"),
    ],
)
def test_what_goes_wrong_is_one_line(run: Run, filled: Path, words: tuple[str, ...], code: int, says: str) -> None:
    run("overlay", "create", filled, "there")
    found = run("overlay", *(word.replace("STORE", str(filled)) for word in words))
    assert found.code == code and says in found.err and found.err.count("\n") == 1, found
    assert [one["name"] for one in run("overlay", "list", "--json", filled).json] == ["there"]


def test_who_holds_it_is_told(run: Run, filled: Path) -> None:
    """An overlay that another process works with is busy, and the line says who that is."""
    run("overlay", "create", filled, "arm1")
    with Store.open(filled, write=True) as opened, Overlays(opened) as overlays:
        overlays.get("arm1")
        for words in (("diff",), ("commit",), ("discard",), ("rename",)):
            more = ("new",) if words == ("rename",) else ()
            found = run("overlay", *words, filled, "arm1", *more)
            assert found.code == 8 and f"process {os.getpid()}" in found.err
        listed = run("overlay", "list", filled).out
        assert f"in use by process {os.getpid()}" in listed


def test_a_damaged_overlay_is_told_beside_the_others_and_can_be_discarded(
    run: Run, filled: Path, expect_log: Callable[[str], None]
) -> None:
    for name in ("good", "spoilt"):
        run("overlay", "create", filled, name)
    (filled / "overlays" / "spoilt").write_bytes(b"garbage")
    found = run("overlay", "list", filled)
    assert found.code == 5 and "good" in found.out and "overlays/spoilt is damaged" in found.err
    assert run("overlay", "commit", filled, "spoilt").code == 5
    assert run("overlay", "discard", filled, "spoilt").code == 0
    expect_log("nothing of overlays is cleared away: overlays/spoilt is damaged")
    expect_log("overlay spoilt is discarded as it is")
    found = run("overlay", "list", "--json", filled)
    assert found.code == 0 and [one["name"] for one in found.json] == ["good"]


def test_two_overlays_are_compared(run: Run, filled: Path) -> None:
    for name in ("arm1", "arm2"):
        run("overlay", "create", filled, name, "--base", "run1/step-2")
    edit(filled, "arm1")
    one, two = f"{filled}:@overlays/arm1", f"{filled}:@overlays/arm2"
    told = run("diff", one, two)
    assert told.code == 1 and told.out.splitlines()[1:3] == ["removed  file new", "added  file notes/a b.txt"]
    assert told.out.startswith("changed  head")
    assert run("diff", two, f"{filled}:run1/step-2").code == 0
    assert run("diff", f"{one}/model.safetensors", f"{two}/model.safetensors").out.startswith("changed  head")
    assert run("diff", f"{one}/absent", two).code == 3 and run("diff", f"{filled}:@overlays/arm", two).code == 3


def test_the_default_store(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCLIPFS_STORE", str(filled))
    assert run("overlay", "create", "arm1", "--base", "run1/step-2").code == 0
    assert "arm1" in run("overlay", "list").out
    assert run("overlay", "diff", "arm1").code == 0
    assert run("overlay", "rename", "arm1", "arm2").code == 0
    assert run("overlay", "discard", "arm2").code == 0


def test_names_are_completed(filled: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.shell_completion import ShellComplete

    from moonclipfs.cli.main import cli

    run("overlay", "create", filled, "arm1")
    run("overlay", "create", filled, "brm")
    complete = ShellComplete(cli, {}, "moonclipfs", "_X")
    assert [one.value for one in complete.get_completions(["overlay", "diff", str(filled)], "a")] == ["arm1"]
    assert "rebase" in [one.value for one in complete.get_completions(["overlay"], "")]
    monkeypatch.setenv("MOONCLIPFS_STORE", str(filled))
    assert "brm" in [one.value for one in complete.get_completions(["overlay", "discard"], "b")]


@pytest.mark.parametrize("name", ["create", "list", "status", "diff", "commit", "discard", "rename", "rebase"])
def test_each_has_help_with_examples(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = run("overlay", name, "-h")
    assert found.code == 0 and "Examples:" in found.out and f"moonclipfs overlay {name}" in found.out
    assert max(map(len, found.out.splitlines())) <= 100
