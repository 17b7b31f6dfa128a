"""What doctor says of a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonclipfs.store import health
from moonclipfs.store.health import Finding, State, check_store
from moonclipfs.store.store import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Store.create(tmp_path / "store") as store, store.ingest() as ingest:
        ingest.publish("a", ingest.put_directory([]), {})
    return tmp_path / "store"


def found(root: Path) -> dict[str, Finding]:
    return {finding.what: finding for finding in check_store(root)}


def test_a_healthy_store(root: Path) -> None:
    findings = found(root)
    assert list(findings) == ["access", "config", "log", "index", "leases", "space"]
    assert {finding.state for what, finding in findings.items() if what != "space"} == {State.OK}
    assert findings["log"].text.startswith("1 snapshots, 1 kept versions")


def test_a_store_that_is_used(root: Path) -> None:
    with Store.open(root, purpose="to be seen"):
        assert "to be seen" in found(root)["leases"].text


@pytest.mark.parametrize(("mode", "state"), [(0o755, State.PROBLEM), (0o770, State.OK), (0o700, State.OK)])
def test_who_may_read(root: Path, mode: int, state: State) -> None:
    root.chmod(mode)
    assert found(root)["access"].state is state


def test_a_damaged_record_is_named(root: Path, expect_log) -> None:  # type: ignore[no-untyped-def]
    (record,) = (path for path in (root / "log").iterdir())
    record.chmod(0o600)
    record.write_bytes(b"{}")
    expect_log("left out")
    assert found(root)["log"].state is State.PROBLEM
    assert record.name.partition(".")[0] in found(root)["log"].text


def test_what_is_missing_is_told_and_the_rest_is_still_looked_at(root: Path) -> None:
    (root / "config.json").unlink()
    findings = found(root)
    assert findings["store"].state is State.PROBLEM
    assert findings["space"].state is not State.PROBLEM
    assert found(root / "absent")["access"].state is State.PROBLEM


def test_little_space_is_worth_a_word(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_LOW_BYTES", 1 << 62)
    space = found(root)["space"]
    assert space.state is State.NOTE
    assert "forget" in space.advice
    (root / "reserve").unlink()
    assert "no reserve" in found(root)["space"].text
