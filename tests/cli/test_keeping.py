"""du, stats, forget, verify, doctor: what it costs, what goes, and whether all is well."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moonclipfs.cli.verify import exit_code
from moonclipfs.store.problems import Problem, ProblemKind, VerifyReport
from tests.cli.conftest import Run


def test_du_tells_what_snapshots_cost(run: Run, filled: Path) -> None:
    done = run("du", filled)
    assert done.code == 0
    assert done.out.splitlines()[0].split() == ["SNAPSHOT", "SIZE", "STORED", "EXCLUSIVE", "SHARED"]
    told = {one["name"]: one for one in run("du", "--json", filled).json["snapshots"]}
    assert set(told["other"]) == {"name", "version", "logical", "stored", "exclusive", "shared"}
    assert told["other"]["logical"] == 10240
    assert told["other"]["shared"] == 0
    assert told["run1/step-2"]["exclusive"] < told["run1/step-2"]["shared"]


def test_du_tells_what_the_set_costs(run: Run, filled: Path) -> None:
    done = run("du", "--json", f"{filled}:run1").json
    stored = [one["stored"] for one in done["snapshots"]]
    assert max(stored) < done["total"]["stored"] < sum(stored)
    assert done["total"]["logical"] == sum(one["logical"] for one in done["snapshots"])
    assert done["total"]["exclusive"] > sum(one["exclusive"] for one in done["snapshots"])
    assert done["total"]["shared"] == done["total"]["stored"] - done["total"]["exclusive"]
    lines = run("du", f"{filled}:run1").out.splitlines()
    assert len(lines) == 5
    assert lines[-1].split()[0] == "total"


def test_du_of_some(run: Run, filled: Path) -> None:
    assert [one["name"] for one in run("du", "--json", f"{filled}:run1/step-1*").json["snapshots"]] == [
        "run1/step-1",
        "run1/step-10",
    ]
    assert [one["name"] for one in run("du", "--json", f"{filled}:other", "run1/step-2").json["snapshots"]] == [
        "other",
        "run1/step-2",
    ]


def test_stats_tells_what_was_saved(run: Run, filled: Path) -> None:
    told = run("stats", "--json", filled).json
    assert set(told) == {
        *("versions", "files", "logical", "shared", "holes", "literals", "ratio", "full", "delta", "trees"),
        *("only_bases", "layers", "dtypes", "dead", "overhead", "packs", "pack_bytes", "in_base"),
    }
    assert told["versions"] == 4
    assert told["delta"]["raw"] == 2 * 131072
    assert told["shared"] >= 2 * (65536 + 8192)
    assert set(told["dtypes"]) >= {"F32", "BF16"}
    done = run("stats", filled)
    assert done.code == 0
    assert done.out.startswith("10 files of 4 versions: ")


def test_forget_says_what_it_would_free_and_then_frees_it(run: Run, filled: Path) -> None:
    before = run("stats", "--json", filled).json["pack_bytes"]
    predicted = run("forget", "--dry-run", "--json", f"{filled}:other").json
    assert set(predicted) == {"dry_run", "exclusive", "keep", "drop", "gc"}
    assert predicted["drop"] == [{"name": "other", "version": 1, "reasons": ["named"]}]
    assert run("stats", "--json", filled).json["pack_bytes"] == before
    done = run("forget", "--json", f"{filled}:other").json
    assert done["exclusive"] == predicted["exclusive"] > 0
    assert done["gc"]["freed_bytes"] == predicted["gc"]["freed_bytes"] > 0
    assert run("stats", "--json", filled).json["pack_bytes"] == before - done["gc"]["freed_bytes"]
    assert run("ls", f"{filled}:other").code == 3


def test_forget_by_rules_explains_itself(run: Run, filled: Path) -> None:
    done = run("forget", "--dry-run", "--keep-last", "1", "--keep-every", "2", f"{filled}:run1")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["would", "forget", "run1/step-1@1", "no", "rule", "keeps", "it"]
    assert lines[1].startswith("keep          run1/step-2@1   step 2 is a multiple of 2")
    assert "newest of its line" in lines[2]
    assert lines[3].startswith("would forget 1 version; only they need: ")
    assert run("forget", "--keep-last", "1", f"{filled}:run1").code == 0
    assert [one["name"] for one in run("ls", "--json", filled).json] == ["other", "run1/step-10"]


def test_forget_of_several_and_of_patterns(run: Run, filled: Path) -> None:
    told = run("forget", "--json", filled, "other", "run1/step-1*", "--pin", "run1/step-2").json
    assert [one["name"] for one in told["drop"]] == ["other", "run1/step-1", "run1/step-10"]
    assert [one["name"] for one in run("ls", "--json", filled).json] == ["run1/step-2"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["forget", "store"], 2, "name what to forget"),
        (["forget", "store", "--keep-last", "0"], 2, "--keep-last 0"),
        (["forget", "store:nothing"], 3, "nothing"),
        (["forget", "store:other", "--pin", "other"], 2, "pinned"),
        (["forget", "store:other@1", "--keep-last", "1"], 2, "one version"),
        (["forget"], 2, "no store given"),
        (["stats", "store:other"], 2, "whole store"),
        (["verify", "store:other"], 2, "whole store"),
        (["du", "store:zzz"], 3, "no snapshot zzz"),
        (["log", "store:zzz"], 3, "no kept version of zzz"),
    ],
)
def test_mistakes(
    run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(filled.parent)
    done = run(*arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert len(run("ls", "--json", "store").json) == 4


@pytest.mark.parametrize("name", ["verify", "check"])
def test_verify_of_a_whole_store(run: Run, filled: Path, name: str) -> None:
    done = run(name, filled)
    assert done.code == 0, done.out
    assert done.out.endswith("decoded and hashed: no problem\n")
    told = run(name, "--quick", "--json", filled).json
    assert set(told) == {
        *("ok", "quick", "versions", "packs", "objects", "object_bytes", "problems", "base", "base_objects"),
    }
    assert (told["ok"], told["quick"], told["versions"]) == (True, True, 4)


def test_verify_names_what_a_flipped_bit_affects(run: Run, filled: Path) -> None:
    pack = max((filled / "packs").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    done = run("verify", filled)
    assert done.code == 5
    assert "run1/step-1@1/model.safetensors" in done.out
    told = run("verify", "--json", filled).json
    assert told["ok"] is False
    problem = told["problems"][0]
    assert set(problem) == {"kind", "where", "message", "affected", "repaired"}
    shown = run("export", f"{filled}:run1/step-1", filled.parent / "out")
    assert shown.code == 5
    assert not (filled.parent / "out" / "model.safetensors").exists()


def test_verify_contents_finds_a_truncated_file(run: Run, filled: Path, tmp_path: Path) -> None:
    whole = (tmp_path / "src" / "step-1" / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-50])
    assert run("add", filled, tmp_path / "cut.safetensors", "--as", "cut").code == 0
    assert run("verify", filled).code == 0
    done = run("verify", "--contents", filled)
    assert done.code == 1
    assert "cut@1/cut.safetensors" in done.out


def test_doctor_of_a_healthy_store(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = run("doctor", "--json", filled).json
    assert all(set(one) == {"where", "what", "state", "text", "advice"} for one in told)
    store = {one["what"]: one for one in told if one["where"] == "store"}
    assert [one["state"] for what, one in store.items() if what != "space"] == ["ok"] * 5
    assert "4 snapshots" in store["log"]["text"]
    machine = {one["what"] for one in told if one["where"] == "machine"}
    assert machine >= {"moonclipfs", "fuse device", "fusermount3", "pyfuse3", "kernel", "read-ahead", "allow-other"}
    assert not [one for one in run("doctor", "--json").json if one["where"] == "store"]
    monkeypatch.setenv("MOONCLIPFS_STORE", str(filled))
    assert [one for one in run("doctor", "--json").json if one["where"] == "store"]


def test_doctor_names_what_is_wrong_and_what_to_do(run: Run, filled: Path) -> None:
    filled.chmod(0o755)
    done = run("doctor", filled)
    assert done.code == 1
    assert "PROBLEM  access: everybody can read it all" in done.out
    assert f"         -> `chmod 700 {filled}`" in done.out
    filled.chmod(0o700)
    (filled / "config.json").write_text("{}")
    done = run("doctor", filled)
    assert done.code == 1
    assert "PROBLEM  store: " in done.out


def test_doctor_of_a_store_without_leases_directory(run: Run, filled: Path) -> None:
    """A copy may lack it, and writing makes it again; what stands in its place is a problem."""
    shutil.rmtree(filled / "leases")
    assert run("doctor", filled).code == 0
    (filled / "leases").write_bytes(b"")
    done = run("doctor", filled)
    assert done.code == 1
    assert "PROBLEM  " in done.out


def test_doctor_names_a_damaged_record(run: Run, filled: Path, expect_log: Callable[[str], None]) -> None:
    record = max((filled / "log").iterdir())
    record.chmod(0o600)
    record.write_bytes(b"{}")
    expect_log("left out")
    done = run("doctor", filled)
    assert done.code == 1
    assert record.name.partition(".")[0] in done.out


@pytest.mark.parametrize(
    ("problems", "code"),
    [
        ([], 0),
        ([Problem(ProblemKind.CONTENTS, "x", "cut")], 1),
        ([Problem(ProblemKind.INDEX, "x", "wrong", repaired=True)], 1),
        ([Problem(ProblemKind.INDEX, "x", "wrong", repaired=True), Problem(ProblemKind.LOG, "x", "gone")], 5),
    ],
)
def test_exit_codes_of_verify(problems: list[Problem], code: int) -> None:
    assert exit_code(VerifyReport(problems=problems)) == code


def test_long_lists_of_affected_files_are_cut(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(ProblemKind.OBJECT, "pack", "damaged", [f"x@1/{number}" for number in range(50)])
    monkeypatch.setattr("moonclipfs.cli.verify.verify", lambda *_, **options: VerifyReport(problems=[problem]))
    done = run("verify", filled)
    assert done.code == 5
    assert done.out.splitlines()[20:22] == ["    x@1/19", "    and 30 more"]
