"""Paths in a layer behave as those of pathlib in a directory of the disk: programs are written once for both."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonclipfs import limits
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.live import Live, LiveOptions
from moonclipfs.store.store import Store

Place = Path | LayerPath
"""What a program is given."""


@pytest.fixture
def live(store: Store) -> Iterator[Live]:
    with Live(store, LiveOptions(seal_after=None)) as opened:
        yield opened


@pytest.fixture
def layer(live: Live) -> LayerPath:
    return LayerPath(live, label="store:")


@pytest.fixture(params=["disk", "layer"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty directory: of the disk, which tells what is right, and of a layer."""
    if request.param == "layer":
        return request.getfixturevalue("layer") / "work" if _made(request.getfixturevalue("layer")) else tmp_path
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def _made(root: LayerPath) -> bool:
    (root / "work").mkdir()
    return True


def raised(call: Callable[[], Any]) -> type[BaseException]:
    with pytest.raises(OSError) as caught:
        call()
    return caught.type


def test_names(place: Place) -> None:
    path = place / "a" / "model.tar.gz"
    assert (path.name, path.stem, path.suffix, path.parent.name) == ("model.tar.gz", "model.tar", ".gz", "a")
    assert path.parent == place / "a" == place.joinpath("a") != path
    assert path.with_name("b").name == "b" and path.with_suffix(".x").name == "model.tar.x"
    assert str(path).endswith("work/a/model.tar.gz")
    assert sorted([place / "b", place / "a"]) == [place / "a", place / "b"]
    assert len({place / "a", place / "a"}) == 1
    assert str(path.relative_to(place)) == "a/model.tar.gz"


def test_a_file_is_written_and_read_back(place: Place) -> None:
    """A path in a layer does what one of pathlib does in a directory, and raises the same errors."""
    path, data = place / "model.bin", os.urandom(300_000)
    assert not path.exists() and not path.is_file() and not path.is_dir()
    assert path.write_bytes(data) == len(data)
    assert path.read_bytes() == data
    assert path.exists() and path.is_file() and not path.is_dir()
    assert path.stat().st_size == len(data) and stat.S_ISREG(path.stat().st_mode)
    path.write_bytes(b"short")
    assert path.read_bytes() == b"short"
    (place / "empty").write_bytes(b"")
    assert (place / "empty").read_bytes() == b""


def test_modes_of_open(place: Place) -> None:
    path = place / "f"
    with path.open("xb") as file:
        file.write(b"0123456789")
    assert raised(lambda: path.open("xb")) is FileExistsError
    with path.open("r+b") as file:
        assert file.read(2) == b"01"
        file.write(b"ab")
        file.seek(-1, os.SEEK_END)
        file.write(b"zz")
        assert file.tell() == 11
        file.seek(0)
        assert file.read() == b"01ab45678zz"
    with path.open("ab") as file:
        file.seek(0)
        file.write(b"!")
    with path.open("rb", buffering=0) as file:
        assert file.seek(10) == 10 and file.read() == b"z!" and file.read() == b""
    with path.open("w+b") as file:
        file.write(b"new")
        file.seek(5)
        file.write(b"x")
        file.truncate(7)
        file.seek(0)
        assert file.read() == b"new\0\0x\0"
    with path.open("w") as text:
        text.write("äöü\n")
    assert path.read_text() == "äöü\n"
    path.write_text("plain")
    with path.open() as text:
        assert text.read() == "plain"
    with path.open("rb") as file, pytest.raises(OSError):
        file.write(b"x")
    with path.open("ab") as file, pytest.raises(OSError):
        file.read()
    for mode in ("rw", "", "q", "rbt", "rr"):
        with pytest.raises(ValueError):
            path.open(mode)
    with pytest.raises(ValueError):
        file.read()


def test_long_files_come_back_whole(place: Place) -> None:
    """Reads and writes past what goes at one time."""
    data = os.urandom(9_000_001)
    (place / "long").write_bytes(data)
    assert (place / "long").read_bytes() == data
    with (place / "long").open("rb") as file:
        file.seek(4_000_000)
        into = bytearray(5_500_000)
        count = file.readinto(into)
        assert into[:count] == data[4_000_000 : 4_000_000 + count] and count == 5_000_001


def test_directories(place: Place) -> None:
    deep = place / "a" / "b" / "c"
    assert raised(deep.mkdir) is FileNotFoundError
    deep.mkdir(parents=True)
    deep.mkdir(exist_ok=True, parents=True)
    assert raised(deep.mkdir) is FileExistsError
    (place / "f").write_bytes(b"")
    assert raised(lambda: (place / "f").mkdir(exist_ok=True)) is FileExistsError
    assert sorted(path.name for path in place.iterdir()) == ["a", "f"]
    assert raised((place / "a").rmdir) is OSError  # not empty
    deep.rmdir()
    assert list((place / "a" / "b").iterdir()) == []
    assert raised(lambda: list(deep.iterdir())) is FileNotFoundError
    assert raised(lambda: list((place / "f").iterdir())) is NotADirectoryError
    assert raised((place / "f").rmdir) is NotADirectoryError
    assert raised((place / "a").read_bytes) is IsADirectoryError
    assert raised((place / "a").unlink) in (IsADirectoryError, PermissionError)
    assert not (place / "f" / "below").exists()


def test_unlink_and_rename(place: Place) -> None:
    one, two = place / "one", place / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    assert one.replace(two) == two
    assert two.read_bytes() == b"1" and not one.exists()
    assert raised(lambda: one.rename(two)) is FileNotFoundError
    two.unlink()
    assert raised(two.unlink) is FileNotFoundError
    two.unlink(missing_ok=True)
    (place / "directory").mkdir()
    (place / "directory" / "inside").write_bytes(b"i")
    (place / "directory").rename(place / "moved")
    assert (place / "moved" / "inside").read_bytes() == b"i"


def test_links(place: Place) -> None:
    (place / "d").mkdir()
    (place / "d" / "f").write_bytes(b"f")
    (place / "to-f").symlink_to("d/f")
    (place / "to-d").symlink_to("d")
    (place / "nowhere").symlink_to("absent")
    (place / "circle").symlink_to("circle")
    assert (place / "to-f").read_bytes() == b"f" and (place / "to-d" / "f").is_file()
    assert (place / "to-f").is_symlink() and (place / "to-f").is_file() and not (place / "d").is_symlink()
    assert str((place / "to-f").readlink()) == "d/f"
    assert stat.S_ISLNK((place / "to-f").lstat().st_mode)
    assert not (place / "nowhere").exists() and (place / "nowhere").is_symlink()
    (place / "to-d" / "g").write_bytes(b"g")
    assert (place / "d" / "g").read_bytes() == b"g"
    (place / "hard").hardlink_to(place / "d" / "f")
    assert (place / "hard").stat().st_nlink == 2
    assert (place / "hard").samefile(place / "d" / "f")
    (place / "to-f").unlink()
    assert (place / "d" / "f").exists()


def test_attributes(place: Place) -> None:
    path = place / "f"
    path.touch()
    path.chmod(0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.stat()
    path.touch()
    assert path.stat().st_mtime_ns > before.st_mtime_ns
    assert path.stat().st_mtime == pytest.approx(path.stat().st_mtime_ns / 1e9)
    assert raised(lambda: path.touch(exist_ok=False)) is FileExistsError
    assert (path.stat().st_uid, path.stat().st_gid) == (os.geteuid(), os.getegid())


def test_an_unlinked_file_stays_readable_for_who_has_it_open(place: Place) -> None:
    (place / "f").write_bytes(b"bytes")
    with (place / "f").open("rb") as file:
        (place / "f").unlink()
        assert file.read() == b"bytes"


def test_what_only_a_layer_has(layer: LayerPath, tmp_path: Path) -> None:
    """No other program can open such a path, and no path of another tree is mixed up with it."""
    with pytest.raises(TypeError):
        os.fspath(layer)
    with pytest.raises(ValueError):
        layer / "/etc"
    with pytest.raises(ValueError):
        (layer / "a").rename(tmp_path)
    assert raised(layer.mkdir) is FileExistsError
    assert raised(layer.rmdir) is OSError
    assert layer.is_dir() and layer.parent == layer and str(layer) == "store:" and layer.name == ""
    (layer / "d").mkdir()
    assert layer.attribute(b"user.moonclip.store") is not None and layer.attribute(b"user.absent") is None
    assert not (layer / ".." / "..").exists()


def test_writers_wait_while_staging_is_full(store: Store) -> None:
    """Who writes without a mount waits while too much is staged, and gets no error."""
    data = os.urandom(1 << 20)
    with Live(store, LiveOptions(seal_after=None, staging_limit=1 << 20)) as live:
        root = LayerPath(live)
        threads = [threading.Thread(target=(root / f"f{n}").write_bytes, args=(data,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all((root / f"f{n}").read_bytes() == data for n in range(8))


def test_what_was_written_is_there_in_the_next_life(store: Store) -> None:
    with Live(store, LiveOptions(seal_after=None)) as live:
        (LayerPath(live) / "d").mkdir()
        with (LayerPath(live) / "d" / "f").open("wb", buffering=0) as file:
            file.write(b"bytes")
            file.sync()
    with Live(store, LiveOptions(seal_after=None)) as live:
        assert (LayerPath(live) / "d" / "f").read_bytes() == b"bytes"


def test_what_has_to_be_decoded_is_read_by_several_threads(layer: LayerPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where decoding is as fast as 2 GB/s."""
    data = os.urandom(3 * limits.PREFETCH_STEP_BYTES) + b"end"
    (layer / "f").write_bytes(data)
    read, threads = OpenFile.read_into, set()

    def decoding(file: OpenFile, offset: int, out: memoryview) -> int:
        threads.add(threading.get_ident())
        time.sleep(len(out) / 2e9)
        return read(file, offset, out)

    monkeypatch.setattr(OpenFile, "read_into", decoding)
    assert (layer / "f").read_bytes() == data
    assert len(threads) > 1
