"""restore, clone and wait on stores; and how arguments name what is not there yet."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import click
import pytest

from moonclipfs.cli.values import duration, duration_or_off, size, size_text, time_text
from moonclipfs.store.store import Store
from tests.cli.conftest import Run, checkpoint


def names(run: Run, store: Path) -> list[str]:
    return [one["name"] for one in run("ls", "--json", store).json]


@pytest.fixture
def twice(run: Run, filled: Path, tmp_path: Path) -> Path:
    """The store, with a second version of run1/step-1."""
    source = checkpoint(tmp_path / "again", 3)
    assert run("add", filled, source, "--as", "run1/step-1").code == 0
    return filled


def test_restore(run: Run, twice: Path) -> None:
    done = run("restore", f"{twice}:run1/step-1@1")
    assert (done.code, done.out) == (0, "run1/step-1@3\n")
    assert run("diff", f"{twice}:run1/step-1", f"{twice}:run1/step-1@1").code == 0
    assert run("diff", f"{twice}:run1/step-1", f"{twice}:run1/step-1@2").code == 1
    done = run("restore", f"{twice}:run1/step-1")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "say which version" in done.err
    assert run("restore", twice).code == 2
    assert run("restore", f"{twice}:run1/step-1@9").code == 3
    assert run("restore", f"{twice}:run1").code == 3


def test_restore_what_was_removed(run: Run, twice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(twice, write=True) as store:
        store.log.unbind(["run1/step-1"])
    assert "run1/step-1" not in names(run, twice)
    monkeypatch.setenv("MOONCLIPFS_STORE", str(twice))
    assert run("restore", "run1/step-1").out == "run1/step-1@3\n"
    assert run("diff", "run1/step-1", "run1/step-1@2").code == 0


def test_restore_to_another_name(run: Run, twice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("restore", f"{twice}:run1/step-1@1", "--to", "old/one").out == "old/one@1\n"
    assert run("restore", f"{twice}:run1/step-1@1", "--to", f"{twice}:old/two").out == "old/two@1\n"
    assert run("restore", f"{twice}:run1/step-1@1", "--to", "run1/step-2").code == 4
    assert run("restore", f"{twice}:run1/step-1@1", "--to", "@versions/x").code == 2
    assert run("init", tmp_path / "another").code == 0
    other = run("restore", f"{twice}:run1/step-1@1", "--to", f"{tmp_path}/another:x")
    assert (other.code, "is in another store" in other.err) == (2, True)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "out", "./out", "../out", "src", tmp_path, twice, ".", f"{twice}:", "/no/store:x"):
        refused = run("restore", f"{twice}:run1/step-1@1", "--to", path)
        assert (refused.code, "`moonclipfs export STORE:NAME DIRECTORY`" in refused.err) == (2, True), path
    assert not {"out", "src", "x"} & set(names(run, twice))


def test_clone(run: Run, twice: Path) -> None:
    before = sorted(path.name for path in (twice / "packs").iterdir())
    assert run("clone", f"{twice}:run1/step-1", "tune/start").out == "tune/start@1\n"
    assert run("clone", f"{twice}:run1/step-1@1", f"{twice}:tune/first").out == "tune/first@1\n"
    assert run("diff", f"{twice}:tune/first", f"{twice}:run1/step-1@1").code == 0
    assert sorted(path.name for path in (twice / "packs").iterdir()) == before
    assert run("clone", f"{twice}:run1/step-1", "other").code == 4
    assert run("clone", twice, "new").code == 2
    assert run("clone", f"{twice}:run1/step-1/notes", "new").code == 2
    assert "`moonclipfs export" in run("clone", f"{twice}:other", "/new/place").err


class TestWait:
    """Snapshots as they come."""

    @staticmethod
    def later(path: Path, *snapshots: str, **metadata: object) -> threading.Thread:
        """Bind the content of `other` under each name, a moment from now."""

        def work() -> None:
            time.sleep(0.3)
            with Store.open(path, write=True) as store, store.ingest() as ingest:
                root = store.resolve("other").root
                for name in snapshots:
                    ingest.publish(name, root, metadata)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def test_the_next_one(self, run: Run, filled: Path) -> None:
        thread = self.later(filled, "run2/a", "run1/step-20")
        done = run("wait", "--timeout", "20", f"{filled}:run1")
        thread.join()
        assert (done.code, done.out) == (0, "run1/step-20@1\n")

    def test_follow_a_whole_store(self, run: Run, filled: Path) -> None:
        thread = self.later(filled, "run2/a", "other", "run2/b")
        done = run("wait", "--follow", "--json", "--timeout", "2", filled)
        thread.join()
        assert done.code == 3
        assert [line.split('"')[3] for line in done.out.splitlines()] == ["run2/a", "other", "run2/b"]
        assert "no new snapshot" in done.err

    def test_incomplete_ones_are_passed_over(self, run: Run, filled: Path) -> None:
        thread = self.later(filled, "run1/x", incomplete=True)
        done = run("wait", "--timeout", "1.5", f"{filled}:run1")
        thread.join()
        assert (done.code, done.out) == (3, "")

    def test_a_version(self, run: Run, filled: Path) -> None:
        assert run("wait", f"{filled}:run1/step-2@1").out == "run1/step-2@1\n"
        thread = self.later(filled, "other", "other/below")
        assert run("wait", "--timeout", "20", f"{filled}:other@2").out == "other@2\n"
        thread.join()

    def test_a_loop_misses_none(self, run: Run, filled: Path) -> None:
        seen = ["run1/step-1@1"]
        while (done := run("wait", "--timeout", "0", "--after", seen[-1], f"{filled}:run1")).code == 0:
            seen.append(done.out.strip())
        assert seen == ["run1/step-1@1", "run1/step-2@1", "run1/step-10@1"]
        assert done.code == 3
        assert run("wait", "--after", "run1/step-1", f"{filled}:run1").code == 2
        assert run("wait", "--after", "run1/step-1@7", f"{filled}:run1").code == 3


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", 0), ("512", 512), ("500M", 500 << 20), ("1.5g", 3 << 29), ("16GiB", 16 << 30), ("2 TB", 2 << 40)],
)
def test_sizes(text: str, found: int) -> None:
    assert size(text) == found
    assert size(size_text(found)) == found


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("45", 45), ("1.5", 1.5), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("2w", 1209600)],
)
def test_times(text: str, seconds: float) -> None:
    assert duration(text) == seconds
    assert duration(time_text(seconds)) == seconds
    assert duration_or_off(text) == seconds
    assert duration_or_off("off") is None


@pytest.mark.parametrize("text", ["", "x", "-1", "1x", "nan", "inf", "1e9", "off", "5mm"])
def test_what_is_no_size_or_time(run: Run, filled: Path, text: str) -> None:
    done = run("wait", f"--timeout={text}", f"{filled}:run1")
    assert (done.code, done.err.count("\n")) == (2, 1)
    with pytest.raises(click.BadParameter, match="is no size"):
        size(text)
    with pytest.raises(click.BadParameter, match="is no size"):
        size("9" * 30 + "T")
