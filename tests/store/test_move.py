"""Moving: originals go once the store has them, and whatever comes into their place meanwhile stays."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonclipfs.errors import BusyError, CorruptError, MoonclipError, NotFoundError, PermissionDeniedError, UsageError
from moonclipfs.store import move as moving
from moonclipfs.store.add import add
from moonclipfs.store.scan import scan
from moonclipfs.store.store import Store
from tests.store.kit import contents, noise, publish, series
from tests.store.test_add import lay, snapshots

CALLS = ("mkdir", "rename", "link", "unlink", "rmdir")
"""The system calls that a move changes the host's files with."""
STEPS = (*CALLS, "_compare", "scan")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@contextmanager
def before_steps(action: Callable[[str], None]) -> Iterator[None]:
    """`action` runs before each step of `verify_and_delete`, with its name, but not before steps of its own."""
    busy = True

    def watched(name: str, plain: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **more: object) -> object:
            nonlocal busy
            if not busy:
                busy = True
                action(name)
                busy = False
            return plain(*arguments, **more)

        return call

    plain = moving.verify_and_delete

    def verify_and_delete(*arguments: object) -> None:
        nonlocal busy
        busy = False
        plain(*arguments)  # type: ignore[arg-type]
        busy = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "verify_and_delete", verify_and_delete)
        for owner, names in ((os, CALLS), (moving, ("_compare", "scan"))):
            for name in names:
                patch.setattr(owner, name, watched(name, getattr(owner, name)))
        yield


def below(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if "moonclipfs" in path.name)


def test_moving_deletes_what_the_store_holds(store: Store, work: Path) -> None:
    files = {f"c-{number}/model": data for number, data in enumerate(series(3))}
    lay(work, {**files, "notes": b"n"})
    (work / "c-1" / "link").symlink_to("model")
    os.link(work / "c-1" / "model", work / "c-1" / "same")
    os.link(work / "c-1" / "model", work / "c-2" / "same")
    os.link(work / "notes", work / "same notes")
    add(store, sorted(work.iterdir()), name="run/", move=True)
    assert list(work.iterdir()) == []
    assert contents(store, "run/c-2") == {"model": series(3)[2], "same": series(3)[1]}
    assert contents(store, "run") == {"notes": b"n", "same notes": b"n"}


def test_moving_goes_one_at_a_time_oldest_first(store: Store, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(work, {f"c-{number}/m": noise(number) for number in (1, 2, 10)})
    left: list[list[str]] = []
    plain = moving.verify_and_delete

    def watched(*arguments: object) -> None:
        left.append(sorted(path.name for path in work.iterdir()))
        plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(moving, "verify_and_delete", watched)
    add(store, list(work.iterdir()), name="run/", move=True)
    assert left == [["c-1", "c-10", "c-2"], ["c-10", "c-2"], ["c-10"]]


@pytest.mark.parametrize("stored", [noise(3), noise(2) + b"longer", b""])
def test_nothing_is_deleted_when_the_store_gives_back_other_bytes(store: Store, work: Path, stored: bytes) -> None:
    lay(work / "c", {"m": noise(1), "n": noise(2), "zeros": bytes(5)})
    version = publish(store, "c", {"m": noise(1), "n": stored, "zeros": bytes(5)})
    with pytest.raises(CorruptError, match=r"c/n: the store gives back"):
        moving.verify_and_delete(store, version, scan(work / "c"))
    assert len(list((work / "c").iterdir())) == 3
    version = publish(store, "c", {"m": noise(1), "n": noise(2), "zeros": b""})
    with pytest.raises(CorruptError, match=r"c/zeros: the store gives back 0 bytes, not 5"):
        moving.verify_and_delete(store, version, scan(work / "c"))


@pytest.mark.parametrize("change", ["new", "written", "gone", "mode", "emptied", "symlink"])
def test_a_directory_that_changes_before_it_is_deleted_is_kept(store: Store, work: Path, change: str) -> None:
    lay(work / "c", {"m": noise(1), "n": b"n", "sub/o": b"o"})
    found = scan(work / "c")
    add(store, [work / "c"])
    version = store.resolve("c")
    if change == "new":
        lay(work / "c", {"late": b"!"})
    elif change == "written":
        os.utime(work / "c" / "m", ns=(1, 1))
    elif change == "gone":
        os.unlink(work / "c" / "n")
    elif change == "mode":
        os.chmod(work / "c" / "sub", 0o700)
    elif change == "emptied":
        os.mkdir(work / "c" / "late")
    else:
        os.rename(work / "c", work / "elsewhere")
        (work / "c").symlink_to("elsewhere")
    before = sorted(path.name for path in (work / "c").iterdir())
    with pytest.raises((BusyError, NotFoundError)):
        moving.verify_and_delete(store, version, found)
    assert sorted(path.name for path in (work / "c").iterdir()) == before
    assert not leftovers(work)


NEW = b"NEW" * 1000


def replace_file(work: Path) -> Callable[[], None]:
    """As a trainer saves: a new file is renamed over the old one, of the same length and time."""

    def act() -> None:
        (work / "tmp").write_bytes(NEW)
        os.utime(work / "tmp", ns=(10**18, 10**18))
        os.replace(work / "tmp", work / "a.bin")

    return act


def replace_directory(work: Path) -> Callable[[], None]:
    """As a trainer saves: a directory that is in the way is renamed, and a new one comes."""

    def act() -> None:
        if (work / "c").exists():
            (work / "c").rename(work / "old c")
        lay(work / "c", {"m": NEW})

    return act


def replace_inside(work: Path) -> Callable[[], None]:
    """A file in the directory is replaced; if that has not its name any more, one is made anew."""

    def act() -> None:
        lay(work / "c", {"tmp": NEW})
        os.utime(work / "c" / "tmp", ns=(10**18, 10**18))
        os.replace(work / "c" / "tmp", work / "c" / "m")

    return act


def put_inside(work: Path) -> Callable[[], None]:
    """A process that works in the directory puts a file there, whatever that is called by then."""
    directory = os.open(work / "c" / "sub", os.O_RDONLY)

    def act() -> None:
        try:
            fd = os.open("late", os.O_WRONLY | os.O_CREAT, dir_fd=directory)
        except FileNotFoundError:
            (work / "too late").write_bytes(NEW)
            return
        os.write(fd, NEW)
        os.close(fd)

    return act


def write_in_place(name: str) -> Callable[[Path], Callable[[], None]]:
    """A writer has a file open, writes, and sets its time back."""

    def prepare(work: Path) -> Callable[[], None]:
        fd = os.open(work / name, os.O_WRONLY)

        def act() -> None:
            os.pwrite(fd, NEW, 0)
            os.utime(fd, ns=(10**18, 10**18))
            if not os.fstat(fd).st_nlink:
                (work / "too late").write_bytes(NEW)

        return act

    return prepare


@pytest.mark.parametrize(
    ("prepare", "steps", "left_over"),
    [
        (replace_file, STEPS, False),
        (replace_directory, STEPS, False),
        (replace_inside, STEPS, False),
        (put_inside, STEPS, True),
        # Between the last look at a file and its unlink, no system call can keep a writer out who has it open.
        (write_in_place("a.bin"), ("_compare", "mkdir"), False),
        (write_in_place("c/m"), ("_compare", "scan", "mkdir", "rename", "rmdir"), True),
    ],
    ids=["replace file", "replace directory", "replace inside", "put inside", "write file", "write inside"],
)
def test_what_comes_in_place_of_an_original_is_kept_at_every_step(
    store: Store,
    tmp_path: Path,
    prepare: Callable[[Path], Callable[[], None]],
    steps: tuple[str, ...],
    left_over: bool,
    expect_log: Callable[[str], None],
) -> None:
    """Below some name; or it came before its place was stored, and is stored."""

    def new_bytes_are_kept() -> bool:
        mine = [path for path in snapshots(store) if path.startswith(f"run-{step}")]
        return NEW in below(work) or any(NEW in contents(store, path).values() for path in mine)

    if left_over:
        expect_log(r"/\.c\.moved-into-moonclipfs is left of an interrupted move, and stays: .* came or changed while")
    step = refused = left = 0
    while True:
        work = tmp_path / f"work-{step}"
        lay(work, {"a.bin": noise(1, 3000), "b.bin": noise(2, 3000)})
        lay(work, {"c/m": noise(3, 3000), "c/n": b"n", "c/sub/o": b"o"})
        for name in ("a.bin", "c/m"):
            os.utime(work / name, ns=(10**18, 10**18))
        act, left = prepare(work), step

        def at_step(name: str, act: Callable[[], None] = act) -> None:
            nonlocal left
            if name in steps:
                left -= 1
                if left == -1:
                    act()

        paths = [work / name for name in ("a.bin", "b.bin", "c")]
        with before_steps(at_step):
            try:
                add(store, paths, name=f"run-{step}/", move=True)
            except MoonclipError as error:
                assert str(work) in str(error)
                refused += 1
        if left >= 0:
            break
        assert new_bytes_are_kept()
        moving.finish(paths)
        assert new_bytes_are_kept()
        step += 1
    assert step >= 5
    assert refused >= 2


def test_moving_several_paths_into_one_snapshot_is_refused(store: Store, work: Path) -> None:
    lay(work, {"a": b"1", "b": b"2"})
    for name in ("x", None):
        with pytest.raises(UsageError, match="could not be resumed"):
            add(store, [work / "a", work / "b"], name=name, move=True)
    add(store, [work / "a"], name="x", move=True)
    with pytest.raises(UsageError, match="could not be resumed"):
        add(store, [work / "a", work / "b"], name="x", move=True)
    assert [path.name for path in work.iterdir()] == ["b"]


@pytest.mark.parametrize("target", ["run/checkpoint-9", "run/checkpoint-9/m", "nothing", "link"])
def test_moving_a_symbolic_link_is_refused(store: Store, work: Path, target: str) -> None:
    """It would delete what the link points to, which has other names than the one given."""
    lay(work, {"run/checkpoint-9/m": b"9", "c/m": b"1"})
    (work / "link").symlink_to(target)
    with pytest.raises(UsageError, match=rf"work/link is a symbolic link to .*work/{target}: .*name that instead"):
        add(store, [work / "c", Path(f"{work}/link/")], name="run/", move=True)
    assert below(work) == [b"1", b"9"]
    assert (work / "link").is_symlink()
    assert not snapshots(store)


def test_a_path_through_a_symbolic_link_is_moved(store: Store, work: Path) -> None:
    lay(work, {"run/c/m": b"1"})
    (work / "latest").symlink_to("run")
    add(store, [work / "latest" / "c"], move=True)
    assert contents(store, "c") == {"m": b"1"}
    assert list((work / "run").iterdir()) == []


def test_moving_a_directory_whose_symbolic_links_lead_out_is_refused(store: Store, work: Path) -> None:
    lay(work, {"c/m": b"1", "hub/blobs/x": b"x", "hub/snapshots/a/config": b"c"})
    for name in ("model", "tokenizer"):
        (work / "hub" / "snapshots" / "a" / name).symlink_to("../../blobs/x")
    words = "2 symbolic links lead out of .*hub/snapshots/a, the first is .*a/model: .*without --move"
    with pytest.raises(UsageError, match=words):
        add(store, [work / "c", work / "hub" / "snapshots" / "a"], name="run/", move=True)
    assert below(work) == [b"1", b"x", b"c"]
    assert not snapshots(store)
    add(store, [work / "hub"], move=True)
    assert contents(store, "hub") == {"blobs/x": b"x", "snapshots/a/config": b"c"}
    assert below(work) == [b"1"]


@pytest.mark.parametrize("through_a_link", [False, True])
def test_moving_paths_that_overlap_is_refused(store: Store, work: Path, through_a_link: bool) -> None:
    lay(work, {"nest/in/m": b"1", "nest/n": b"2", "nest-2/m": b"3"})
    (work / "alias").symlink_to("nest")
    inner = work / ("alias" if through_a_link else "nest") / "in"
    for paths in ([work / "nest-2", work / "nest", inner], [inner, work / "nest-2", work / "nest"]):
        with pytest.raises(UsageError, match=rf"{inner} lies in .*work/nest: "):
            add(store, paths, name="q/", move=True)
        assert below(work) == [b"1", b"2", b"3"]
        assert not snapshots(store)
    add(store, [work / "nest", work / "nest-2"], name="q/", move=True)
    assert snapshots(store) == {"q/nest": 1, "q/nest-2": 1}


def test_moving_a_part_of_the_store_is_refused(store: Store, tmp_path: Path) -> None:
    for part in ("config.json", "log", "packs", "."):
        with pytest.raises(UsageError, match=r"lies in the store .*: it cannot be moved into itself"):
            add(store, [tmp_path / "store" / part], name="x", move=True)
        assert (tmp_path / "store" / part).exists()
    assert not snapshots(store)


def test_a_refusal_at_any_step_gives_the_name_back(store: Store, work: Path) -> None:
    lay(work, {"a": noise(1), "c/m": noise(2)})

    left = 0

    def refuse(name: str) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for step in range(6):
        left = step
        with before_steps(refuse), pytest.raises((PermissionDeniedError, PermissionError)):
            add(store, [work / "c"], name="run/", move=True)
        moving.finish([work / "c"])
        assert below(work) == [noise(1), noise(2)]
        assert sorted(path.name for path in work.iterdir()) == ["a", "c"]


def test_paths_that_are_gone_count_as_moved_when_their_snapshot_is_there(
    store: Store, work: Path, expect_log: Callable[[str], None]
) -> None:
    lay(work, {"c-1/m": b"1", "c-2/m": b"2", "notes": b"n", "args": b"a"})
    paths = [work / name for name in ("c-1", "c-2", "notes", "args")]
    add(store, [work / "c-1", work / "notes"], name="run/", move=True)
    assert [one.path for one in add(store, paths, name="run/", move=True).snapshots] == ["run/c-2", "run"]
    assert add(store, paths, name="run/", move=True).snapshots == []
    assert contents(store, "run") == {"args": b"a", "notes": b"n"}
    assert snapshots(store) == {"run": 2, "run/c-1": 1, "run/c-2": 1}
    for name, snapshot in {"c-1": "run/c-1@1", "c-2": "run/c-2@1", "notes": "run@[12]", "args": "run@2"}.items():
        expect_log(rf"work/{name} is gone, and there is {snapshot}: taken as moved before")
    with pytest.raises(NotFoundError, match="work/c-3"):
        add(store, [work / "c-3"], name="run/", move=True)
    with pytest.raises(NotFoundError, match="work/c-1"):
        add(store, [work / "c-1"], name="run/")


def test_a_single_path_that_is_gone(store: Store, work: Path, expect_log: Callable[[str], None]) -> None:
    lay(work, {"c/m": b"1", "real/m": b"2"})
    for path, name in ((work / "c", None), (work / "real", "best")):
        for expected in (1, 0):
            assert len(add(store, [path], name=name, move=True).snapshots) == expected
    expect_log(r"work/c is gone, and there is c@1")
    expect_log(r"work/real is gone, and there is best@1")
    assert snapshots(store) == {"best": 1, "c": 1}


@pytest.mark.parametrize("kind", [".moving-into-moonclipfs", ".moved-into-moonclipfs"])
def test_what_an_interrupted_move_left_stays_where_its_name_is_taken(
    store: Store, work: Path, kind: str, expect_log: Callable[[str], None]
) -> None:
    """It stands in nobody's way but its own name's."""
    place = work / f".c-2{kind}"
    lay(work, {"c-2/new": b"new", "c-3/m": b"3", f".notes{kind}/notes": b"old", "notes": b"new"})
    lay(place, {"c-2/m": b"old"})
    for one in (place, work / f".notes{kind}"):
        os.utime(one, ns=(1, 1))  # before what it holds: that changed since
    add(store, [work / "c-3"], name="run/", move=True)
    for name in ("c-2", "notes"):
        with pytest.raises(
            BusyError, match=rf"work/{name} was kept: .*/\.{name}\{kind} is left of an interrupted move"
        ):
            add(store, [work / name], name="run/", move=True)
        expect_log(rf"work/\.{name}\{kind} is left of an interrupted move, and stays: .*")
    assert below(work) == [b"old", b"old", b"new", b"new"]


def test_nothing_that_only_looks_like_a_leftover_is_touched(
    store: Store, work: Path, tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    outside = lay(tmp_path / "outside", {"a": b"1", "sub/b": b"2"})
    for kind in ("moving", "moved"):
        (work / f".link.{kind}-into-moonclipfs").symlink_to(outside)
        (work / f".file.{kind}-into-moonclipfs").write_bytes(b"mine")
        lay(work, {f".other.{kind}-into-moonclipfs/b": b"in it, but not under that name"})
        if os.geteuid() == 0:
            lay(work, {f".theirs.{kind}-into-moonclipfs/theirs": b"t"})
            os.chown(work / f".theirs.{kind}-into-moonclipfs", 1234, 1234)
    os.utime(work / ".other.moved-into-moonclipfs", ns=(1, 1))
    before = below(work)
    moving.finish([work / "any"])
    assert below(work) == before
    assert below(outside) == [b"1", b"2"]
    assert not list(work.glob("[a-z]*"))
    expect_log(r"\.(link|file|theirs)\.mov.* is called like something that a move left, but is none")
    expect_log(r"\.other\.mov.* is left of an interrupted move, and stays: ")


def test_a_deletion_follows_no_symbolic_link(work: Path, tmp_path: Path) -> None:
    outside = lay(tmp_path / "outside", {"a": b"1"})
    place = lay(work / ".c.moved-into-moonclipfs", {"c/m": b"1"})
    (place / "c" / "link").symlink_to(outside)
    os.utime(place, (2**31, 2**31))
    moving.finish([work / "c"])
    assert not list(work.iterdir())
    assert below(outside) == [b"1"]


def test_an_interrupted_move_of_something_else_is_undone_and_told(
    work: Path, expect_log: Callable[[str], None]
) -> None:
    lay(work / ".c-2.moving-into-moonclipfs", {"c-2/m": b"2"})
    (work / ".c-3.moving-into-moonclipfs").mkdir()
    (work / "link").symlink_to("c-2")
    moving.finish([work / "c-1"])
    assert below(work) == [b"2"]
    assert sorted(path.name for path in work.iterdir()) == ["c-2", "link"]
    expect_log("work/c-2 has its name back: a move of it was interrupted; move it again")


def moved_until(left: int, place: Path, paths: list[Path]) -> bool:
    """Whether a process that moves `paths` ended before it was killed at its step number `left`."""
    child = os.fork()
    if child == 0:
        try:

            def killed(_: str) -> None:
                nonlocal left
                left -= 1
                if left == -1:
                    os._exit(9)

            with Store.open(place, write=True) as store, before_steps(killed):
                add(store, paths, name="run/", move=True)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_killed_move_is_continued_by_the_same_call(
    tmp_path: Path, again: bool, expect_log: Callable[[str], None]
) -> None:
    """Killed at any step, and then (`again`) once more while it continues."""
    files = {f"c-{number}": {"a": noise(number, 3000), "s/b": b"x" * number} for number in (2, 10)}
    step, ended = 0, False
    while not ended:
        work, place = tmp_path / "work", tmp_path / "store"
        for path in (work, place):
            shutil.rmtree(path, ignore_errors=True)
        for name, inside in files.items():
            lay(work / name, inside)
        lay(work, {"notes": b"n"})
        Store.create(place).close()
        paths = sorted(work.iterdir())
        ended = moved_until(step, place, paths)
        if again:
            moved_until(step % 5, place, paths)
        with Store.open(place, write=True) as store:
            add(store, paths, name="run/", move=True)
            assert list(work.iterdir()) == []
            assert contents(store, "run") == {"notes": b"n"}
            assert {name: contents(store, f"run/{name}") for name in files} == files
            assert set(snapshots(store).values()) == {1}
        step += 1 if not again else 4
    assert step > 20
    expect_log(r"work/(c-\d+|notes) is gone, and there is run(/c-\d+)?@1: taken as moved before")
