"""What doctor says of the machine."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moonclipfs.errors import FuseUnavailableError
from moonclipfs.fuse import machine, prepare
from moonclipfs.fuse.mounts import Mount
from moonclipfs.store.health import State


def test_everything_is_looked_at() -> None:
    assert [finding.what for finding in machine.check_machine()][:7] == [
        *("fuse device", "fusermount3", "pyfuse3", "allow-other", "kernel", "fuse extension", "read-ahead"),
    ]


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FuseUnavailableError("cannot open it: do this")

    monkeypatch.setattr(prepare, "check_device", refuse)
    finding = machine.check_device()
    assert (finding.state, finding.text, finding.advice) == (State.PROBLEM, "cannot open it", "do this")


def test_no_helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.check_helper().advice == "install the package fuse3"
    helper = tmp_path / "fusermount3"
    helper.touch(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(helper))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "not setuid" in machine.check_helper().text
    helper.chmod(0o4755)
    assert machine.check_helper().state is State.OK


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", False),
        ("#user_allow_other\n", False),
        ("user_allow_other_not\n", False),
        ("user_allow_other = 1\n", False),
        ("mount_max = 5\n \tuser_allow_other \n", True),
        ("user_allow_other # for the group", True),
    ],
)
def test_allow_other_is_one_answer_for_doctor_and_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, allowed: bool
) -> None:
    config = tmp_path / "fuse.conf"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert machine.check_allow_other(str(config)).state is State.NOTE
    config.write_text(text)
    assert machine.check_allow_other(str(config)).state is (State.OK if allowed else State.NOTE)
    assert prepare.user_allow_other(str(config)) is allowed


@pytest.mark.parametrize(
    ("release", "text"),
    [
        ("6.1.0-18-amd64", "has the basics; lacks shared mmap of direct handles (from 6.6), passthrough (from 6.9)"),
        ("6.8.0-45-generic", "has shared mmap of direct handles; lacks passthrough (from 6.9)"),
        ("6.14.2", "has shared mmap of direct handles, passthrough, requests by io_uring"),
        ("strange", "has the basics"),
    ],
)
def test_kernels(release: str, text: str) -> None:
    assert text in machine.check_kernel(release).text


def test_a_mount_whose_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount(1, "0:99999", "/mnt/x", "fuse.moonclipfs", "/data/store")
    monkeypatch.setattr(machine, "server_pid", lambda mountpoint: None)
    assert machine.check_mount(mount).state is State.PROBLEM
    assert "umount --lazy /mnt/x" in machine.check_mount(mount).advice
    others = replace(mount, owner=os.geteuid() + 1)
    assert machine.check_mount(others).state is State.NOTE, "mounts of other users are no problem"
    monkeypatch.setattr(machine, "server_pid", lambda mountpoint: 5)
    assert machine.check_mount(mount).text == "/mnt/x: /data/store, pid 5"
