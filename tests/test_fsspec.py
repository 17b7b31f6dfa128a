"""The fsspec file system: URLs, listing, reading, and that nothing can be written."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests  # noqa: E402

from moonclipfs.compat.fsspec import MoonclipFileSystem  # noqa: E402
from moonclipfs.layers.tree import Tree  # noqa: E402
from moonclipfs.store.add import add  # noqa: E402
from moonclipfs.store.gc import collect  # noqa: E402
from moonclipfs.store.store import Store  # noqa: E402
from tests.cli.conftest import checkpoint  # noqa: E402


@pytest.fixture(autouse=True)
def registered() -> None:
    """The entry point does this where the package is installed."""
    fsspec.register_implementation("moonclip", MoonclipFileSystem, clobber=True)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with run1/step-2 (two versions), run1/step-2/best below it, and run1/step-10; and their sources."""
    root = tmp_path_factory.mktemp("template")
    with Store.create(root / "store") as store:
        for number, (name, step) in enumerate([("step-2", 1), ("step-2", 2), ("step-2/best", 3), ("step-10", 10)]):
            add(store, [checkpoint(root / str(number), step)], name=f"run1/{name}")
    return root


@pytest.fixture
def where(tmp_path: Path, template: Path) -> Path:
    """A copy of the store of `template`; the sources are beside it."""
    shutil.copytree(template, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path / "store"


@pytest.fixture
def fs() -> Iterator[Any]:
    MoonclipFileSystem.clear_instance_cache()
    found = fsspec.filesystem("moonclip")
    yield found
    found.close()


def test_a_url_opens_a_file(where: Path, fs: Any) -> None:
    plain = (where.parent / "1" / "model.safetensors").read_bytes()
    with fsspec.open(f"moonclip://{where}/run1/step-2/model.safetensors") as file:
        assert file.read() == plain
    with fsspec.open(f"moonclip://{where}/@versions/run1/step-2/1/notes/a b.txt", "rt") as file:
        assert file.read() == "note\n"
    found, path = fsspec.url_to_fs(f"moonclip://{where}/run1")
    assert found is fs
    assert path == f"{where}/run1"
    assert found.unstrip_protocol(path) == f"moonclip://{where}/run1"


def test_paths_are_made_absolute(where: Path, fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(where.parent)
    assert fs._strip_protocol("moonclip://store/run1/") == f"{where}/run1"
    assert fs._strip_protocol(["store", Path("store")]) == [str(where)] * 2
    assert fs.exists("store/run1")


def test_ls_merges_names_and_entries(where: Path, fs: Any) -> None:
    assert fs.ls(f"{where}", detail=False) == [f"{where}/run1"]
    assert fs.ls(f"{where}/run1", detail=False) == [f"{where}/run1/step-10", f"{where}/run1/step-2"]
    names = [os.path.basename(name) for name in fs.ls(f"{where}/run1/step-2", detail=False)]
    assert names == ["best", "config.json", "latest", "model.safetensors", "notes"]
    assert fs.ls(f"{where}/run1/step-2/config.json", detail=False) == [f"{where}/run1/step-2/config.json"]


def test_info(where: Path, fs: Any) -> None:
    plain = (where.parent / "1" / "config.json").stat()
    info = fs.info(f"{where}/run1/step-2/config.json")
    assert (info["type"], info["size"], info["mode"]) == ("file", plain.st_size, plain.st_mode)
    assert info["mtime"] == pytest.approx(plain.st_mtime)
    assert (info["snapshot"], info["version"]) == ("run1/step-2", 2)
    link = fs.info(f"{where}/run1/step-2/latest")
    assert (link["type"], link["islink"], link["destination"]) == ("file", True, "model.safetensors")
    assert link["size"] == (where.parent / "1" / "model.safetensors").stat().st_size
    assert fs.isdir(f"{where}/run1")
    assert fs.isfile(f"{where}/@latest/run1/step-2/config.json")
    assert not fs.exists(f"{where}/run2")
    assert fs.modified(f"{where}/run1/step-2/config.json").tzinfo is UTC


def test_ranges(where: Path, fs: Any) -> None:
    path = f"{where}/run1/step-2/model.safetensors"
    plain = (where.parent / "1" / "model.safetensors").read_bytes()
    for start, end in [
        (None, None),
        (10, 20),
        (-30, None),
        (-30, -10),
        (5, None),
        (100, 50),
        (0, 1 << 40),
        (1 << 40, None),
    ]:
        assert fs.cat_file(path, start, end) == plain[start:end]
    assert fs.cat_ranges([path] * 2, [0, 8], [8, 16]) == [plain[:8], plain[8:16]]
    assert fs.head(path, 8) == plain[:8]
    assert fs.tail(path, 8) == plain[-8:]
    assert fs.size(path) == len(plain)
    assert set(fs.cat([path, f"{where}/run1/step-2/config.json"])) == {path, f"{where}/run1/step-2/config.json"}


def test_find_glob_walk_and_get(where: Path, fs: Any, tmp_path: Path) -> None:
    assert fs.glob(f"{where}/run1/*/config.json") == [f"{where}/run1/step-{n}/config.json" for n in ("10", "2")]
    assert fs.glob(f"{where}/**/config.json")[-1] == f"{where}/run1/step-2/config.json"
    found = fs.find(f"{where}/run1/step-10")
    assert f"{where}/run1/step-10/notes/a b.txt" in found
    assert {name for _, _, names in fs.walk(f"{where}/run1/step-10") for name in names} == {
        *("a b.txt", "config.json", "latest", "model.safetensors"),
    }
    assert fs.du(f"{where}/run1/step-10") > 200_000
    fs.get(f"{where}/run1/step-10", str(tmp_path / "got"), recursive=True)
    assert (tmp_path / "got" / "notes" / "a b.txt").read_text() == "note\n" * 10


def test_equal_bytes_have_equal_keys(where: Path, fs: Any) -> None:
    config = "run1/step-2/config.json"
    assert fs.ukey(f"{where}/{config}") == fs.ukey(f"{where}/@versions/run1/step-2/2/config.json")
    assert fs.checksum(f"{where}/{config}") != fs.checksum(f"{where}/run1/step-10/config.json")


def test_new_snapshots_appear(where: Path, fs: Any, tmp_path: Path) -> None:
    assert not fs.exists(f"{where}/late")
    with Store.open(where, write=True) as store:
        add(store, [checkpoint(tmp_path / "late", 4)], name="late")
    assert fs.isfile(f"{where}/late/config.json")
    with Store.open(where, write=True) as store:
        store.log.unbind(["late"])
    assert not fs.exists(f"{where}/late")


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/run1/step-2/absent", errno.ENOENT),
        ("/run1/step-2/config.json/x", errno.ENOENT),
        ("/../nowhere", errno.ENOENT),
        ("/run1", errno.EISDIR),
        ("/run1/step-2/notes", errno.EISDIR),
    ],
)
def test_errors_are_those_of_the_system(where: Path, fs: Any, path: str, number: int) -> None:
    for call in (fs.cat_file, fs.open):
        with pytest.raises(OSError, match=r".") as caught:
            call(f"{where}{path}")
        assert caught.value.errno == number


def test_damage_is_an_io_error(where: Path, fs: Any) -> None:
    for pack in (where / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        for place in range(200, len(data) // 2, 997):
            data[place] ^= 4
        pack.chmod(0o600)
        pack.write_bytes(data)
    with pytest.raises(OSError, match="object") as caught:
        fs.cat_file(f"{where}/@versions/run1/step-2/1/model.safetensors")
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(
    "write",
    [
        lambda fs, path: fs.open(path, "wb"),
        lambda fs, path: fs.open(path, "ab"),
        lambda fs, path: fs.pipe(path, b"x"),
        lambda fs, path: fs.mkdir(path),
        lambda fs, path: fs.makedirs(path),
        lambda fs, path: fs.rm(path),
        lambda fs, path: fs.rm_file(path),
        lambda fs, path: fs.rmdir(path),
        lambda fs, path: fs.mv(path, path + "2"),
        lambda fs, path: fs.cp_file(path, path + "2"),
        lambda fs, path: fs.touch(path),
        lambda fs, path: fs.put_file("/etc/hostname", path),
    ],
)
def test_nothing_can_be_written(where: Path, fs: Any, write: Any) -> None:
    with pytest.raises(OSError, match="read-only") as caught:
        write(fs, f"{where}/run1/step-2/config.json")
    assert caught.value.errno == errno.EROFS


def test_an_open_file_outlives_its_snapshot_until_it_is_closed(where: Path, fs: Any) -> None:
    plain = (where.parent / "3" / "model.safetensors").read_bytes()
    file = fs.open(f"{where}/run1/step-10/model.safetensors", block_size=512)
    assert file.read(10) == plain[:10]
    with Store.open(where, write=True) as store:
        store.log.forget([("run1/step-10", 1)])
        assert not fs.exists(f"{where}/run1/step-10")
        fs.ls(f"{where}/run1")
        assert collect(store, wait_seconds=1.5).waiting_packs
        file.seek(0)
        assert file.read() == plain
        file.close()
        assert not collect(store, wait_seconds=5).waiting_packs


def test_an_open_file_raises_os_errors(where: Path, fs: Any) -> None:
    with fs.open(f"{where}/run1/step-10/model.safetensors", block_size=512) as file:
        for pack in (where / "packs").iterdir():
            pack.unlink()
        for read in (file.read, lambda: file.read(100), lambda: file.readinto(bytearray(1000))):
            with pytest.raises(OSError, match="object") as caught:
                read()
            assert caught.value.errno == errno.EIO
            assert caught.value.filename == f"{where}/run1/step-10/model.safetensors"


def test_a_call_looks_at_the_log_once(where: Path, fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "many").mkdir()
    for number in range(30):
        (tmp_path / "many" / f"{number}").touch()
        (tmp_path / "many" / f"link{number}").symlink_to(f"{number}")
    with Store.open(where, write=True) as store:
        add(store, [tmp_path / "many"], name="many")
    fs.exists(f"{where}/many")
    looks: list[object] = []
    names = Store.names
    monkeypatch.setattr(Store, "names", lambda self: looks.append(threading.current_thread()) or names(self))
    for call in (fs.ls, fs.info, lambda path: fs.cat_file(path + "/link1"), lambda path: fs.open(path + "/1")):
        looks.clear()
        call(f"{where}/many")
        assert looks.count(threading.current_thread()) == 1
    assert len(fs.ls(f"{where}/many")) == 60


def test_a_name_that_vanishes_is_left_out_of_a_listing(where: Path, fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names_in = Tree.names_in
    monkeypatch.setattr(Tree, "names_in", lambda self, node: [*names_in(self, node), b"gone"])
    assert fs.ls(f"{where}/run1", detail=False) == [f"{where}/run1/step-10", f"{where}/run1/step-2"]


def test_a_file_system_travels_to_another_process(where: Path, fs: Any) -> None:
    again = pickle.loads(pickle.dumps(fs))
    assert again.cat_file(f"{where}/run1/step-2/config.json") == b'{"step": 2}'


def test_a_forked_process_opens_the_store_anew(where: Path, fs: Any) -> None:
    path = f"{where}/run1/step-2/config.json"
    assert fs.cat_file(path) == b'{"step": 2}'
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, fs.cat_file(path) + b" %d" % len(fs._stores))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading, "rb") as answer:
        assert answer.read() == b'{"step": 2} 2'


class TestGet(AbstractFixtures, AbstractGetTests):  # type: ignore[misc]
    """The tests that fsspec has for reading from a file system."""

    @pytest.fixture
    def fs(self) -> Any:
        MoonclipFileSystem.clear_instance_cache()
        return fsspec.filesystem("moonclip")

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return str(tmp_path / "store" / "scenario")

    @pytest.fixture
    def local_fs(self) -> LocalFileSystem:
        return LocalFileSystem(auto_mkdir=True)

    @pytest.fixture
    def stored(self, tmp_path: Path, fs: Any, fs_path: str) -> Iterator[Callable[..., str]]:
        """Lets a scenario be built on the disk, and stores it."""

        def build(scenario: Callable[..., str]) -> str:
            scenario(LocalFileSystem(auto_mkdir=True), os.path.join, str(tmp_path / "built"))
            with Store.create(tmp_path / "store") as store:
                add(store, [tmp_path / "built"], name="scenario")
            return f"{fs_path}/source"

        yield build
        fs.close()

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, stored: Callable[..., str]) -> str:
        return stored(self._bulk_operations_scenario_0)

    @pytest.fixture
    def fs_glob_edge_cases_files(self, stored: Callable[..., str]) -> str:
        return stored(self._glob_edge_cases_files)

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, stored: Callable[..., str]) -> str:
        return stored(self._dir_and_file_with_same_name_prefix)

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, stored: Callable[..., str]) -> str:
        return stored(self._10_files_with_hashed_names)

    def test_get_directory_recursive(self, stored: Callable[..., str], fs: Any, tmp_path: Path) -> None:
        """As theirs, which makes its source through the file system."""
        source = stored(self._dir_and_file_with_same_name_prefix) + "/subdir"
        target = tmp_path / "target"
        for _ in range(2):
            fs.get(source, str(target), recursive=True)
        assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == [
            "subdir",
            "subdir/subfile.txt",
            "subfile.txt",
        ]
