"""Provenance: what is kept about where a snapshot came from, and what never is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moonclipfs.store import provenance

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(cwd: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    result = subprocess.run(["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True)
    return result.stdout.strip()


def test_process_and_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    found = provenance.collect(["train.py", "--lr", "1e-4", "a b"], tmp_path)
    assert found["command"] == "train.py --lr 1e-4 'a b'"
    assert found["cwd"] == str(tmp_path)
    assert found["job"] == {"SLURM_JOB_ID": "4711"}
    assert {"host", "user", "python", "version"} <= found.keys()
    assert "git" not in found
    assert "verysecret" not in json.dumps(found)


def test_surrogates_in_the_command_line_survive_json(tmp_path: Path) -> None:
    found = provenance.collect([os.fsdecode(b"caf\xe9.pt")], tmp_path)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["x", "--hf-token", "abc"], "x --hf-token '***'"),
        (["x", "--api_key=abc"], "x '--api_key=***'"),
        (["x", "WANDB_API_KEY=abc"], "x 'WANDB_API_KEY=***'"),
        (["x", "--password", "--verbose"], "x --password --verbose"),
        (["x", "https://me:abc@example.org/data"], "x 'https://me:***@example.org/data'"),
        (["x", "--tokenizer", "bert"], "x --tokenizer bert"),
    ],
)
def test_secrets_are_hidden(given: list[str], kept: str, tmp_path: Path) -> None:
    assert provenance.collect(given, tmp_path)["command"] == kept


def test_a_long_command_line_is_cut(tmp_path: Path) -> None:
    for word in ("x" * 1_000_000, "token" * 200_000, "--" + "token=" * 100_000, "a://" * 250_000, "-" * 1_000_000):
        command = provenance.collect([word], tmp_path)["command"]
        assert isinstance(command, str)
        assert len(command) <= 8192


def test_a_user_without_a_name_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_user() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", no_user)
    assert provenance.collect(["x"], tmp_path)["user"] == str(os.getuid())


@needs_git
def test_commit_and_dirty(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert "git" not in provenance.collect(["x"], tmp_path), "a repository without a commit"
    (tmp_path / "train.py").write_text("1\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("")
    assert provenance.collect(["x"], tmp_path)["git"] == {"commit": commit, "dirty": False}
    (tmp_path / "train.py").write_text("2\n")
    assert provenance.collect(["x"], tmp_path)["git"] == {"commit": commit, "dirty": True}


@needs_git
def test_the_repository_names_no_program_to_run(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1\n")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "config", "core.fsmonitor", f"touch {tmp_path}/ran; false")
    provenance.collect(["x"], tmp_path)
    assert not (tmp_path / "ran").exists()


def test_git_absent_or_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git" not in provenance.collect(["x"], tmp_path)
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    begun = time.monotonic()
    assert "git" not in provenance.collect(["x"], tmp_path)
    assert time.monotonic() - begun < 10


def test_another_process_is_told_as_far_as_it_can_be() -> None:
    found = provenance.of_process(os.getpid())
    assert found["cwd"] == os.getcwd() and sys.executable in str(found["command"])
    assert {"command", "cwd", "user", "host", "version"} <= provenance.with_surroundings(found).keys()
    with subprocess.Popen(["true"]) as process:
        pass
    assert provenance.of_process(process.pid) == {}


def test_secrets_of_another_process_are_not_told(tmp_path: Path) -> None:
    environment = {**os.environ, "SLURM_JOB_ID": "12", "HF_TOKEN": "hf_verysecret"}
    program = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, "--token", "hf_other"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        found = provenance.of_process(process.pid)
        process.stdin.close()
    assert found["job"] == {"SLURM_JOB_ID": "12"} and found["cwd"] == str(tmp_path)
    text = json.dumps(found)
    assert "--token '***'" in text and "verysecret" not in text and "hf_other" not in text
