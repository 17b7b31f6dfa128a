"""The second half of `add --move`: originals are deleted once the store was seen to hold every byte of them.

An original is first renamed into a directory made for it alone, so that nobody who knows it by name writes into it or
puts something else in its place. There it is compared with what was found before it was stored, down to the time of
the last change of each inode, and deleted, or given its name back. Nothing is ever renamed over something else.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import BusyError, CorruptError, MoonclipError, NotFoundError, UsageError
from moonclipfs.store.backend import os_errors
from moonclipfs.store.scan import FileSource, Found, scan
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType, Version

log = logging.getLogger(__name__)

_CHECKED = b".moving-into-moonclipfs"
"""Ends the name of the directory around an original while its last check runs. An interruption is undone later."""
_DOOMED = b".moved-into-moonclipfs"
"""Ends the name of that directory from the moment on when a directory in it is deleted: its own name never stands for
half of it. An interruption is carried on later."""


def check_paths(store: Store, paths: Sequence[Path]) -> None:
    """Raise UsageError for paths whose deletion would take more than their own names.

    These are symbolic links, for what they point to has other names, paths of which one lies in another, and parts of
    the store.
    """
    for path in paths:
        if os.path.islink(path):
            raise UsageError(
                f"{path} is a symbolic link to {os.path.realpath(path)}: moving would delete that and leave the link; "
                "name that instead"
            )
    places = sorted((os.path.join(os.path.realpath(os.fsencode(path)), b""), path) for path in paths)
    own = os.path.join(os.path.realpath(os.fsencode(store.path)), b"")
    for place, path in places:
        if place.startswith(own):
            raise UsageError(f"{path} lies in the store {store.path}: it cannot be moved into itself")
    for (outer, holder), (inner, path) in pairwise(places):
        # In this order, what lies in a directory comes right after it.
        if inner.startswith(outer):
            same = "is" if inner == outer else "lies in"
            raise UsageError(f"{path} {same} {holder}: moving one would delete the other; name one of them")


def resume(store: Store, paths: Sequence[Path], name: str | None) -> list[Path]:
    """End what interrupted moves left beside `paths`, and return those of them that are still to be moved.

    A path that is gone is left out, and the log says so, when the snapshot that `name` (as in `add`) gives it is
    bound: then an earlier call moved it.
    """
    finish(paths)
    return [path for path in paths if not _was_moved(store, path, name)]


def verify_and_delete(store: Store, version: Version, root: Found) -> None:
    """Compare what the store gives back with the originals below `root`, byte by byte, then delete these.

    Raises CorruptError when a byte differs: all originals are left then. Raises BusyError for one that changed since
    it was stored: it is left, and those after it.
    """
    delete(root, verify(store, version, root))


def verify(store: Store, version: Version, root: Found) -> int:
    """Compare what the store gives back with the originals below `root`, byte by byte.

    Returns when the last of them changed, in ns: `delete` wants to know. Raises CorruptError, BusyError.
    """
    settled_ns = _last_change(root)
    for path, found in _files(root):
        _compare(store, version, path, found)
    return settled_ns


def delete(root: Found, settled_ns: int) -> None:
    """Delete originals that were verified. Raises BusyError for one that changed since: it stays, and all after it."""
    for one in [root] if root.path else root.children:
        _delete(one, settled_ns)


def is_aside(name: bytes) -> bool:
    """Whether a name is one that an original, or what is left of it, has during a move."""
    return name.startswith(b".") and name.endswith((_CHECKED, _DOOMED))


def finish(paths: Sequence[Path]) -> None:
    """End what earlier, interrupted moves of things beside `paths` left behind under other names.

    What cannot be ended is named in the log and stays.
    """
    given = {os.path.realpath(os.fsencode(path)) for path in paths}
    for parent in sorted({os.path.dirname(place) for place in given}):
        if not os.path.isdir(parent):
            continue
        with os_errors(f"tidy {os.fsdecode(parent)}"):
            names = sorted(os.listdir(parent))
        for name in names:
            if is_aside(name):
                _finish_one(parent, name, given)


def _finish_one(parent: bytes, name: bytes, given: set[bytes]) -> None:
    place = os.path.join(parent, name)
    original = os.path.join(parent, name[1:].removesuffix(_CHECKED).removesuffix(_DOOMED))
    shown = os.fsdecode(place)
    try:
        status = os.lstat(place)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            log.warning("%s is called like something that a move left, but is none: it stays", shown)
        elif name.endswith(_DOOMED):
            # Its time is that of the renaming into it, and all checks came after that.
            _clear(place, shown, status.st_mtime_ns - 1, set())
        elif _put_back(place, original) and original not in given:
            log.warning("%s has its name back: a move of it was interrupted; move it again", os.fsdecode(original))
    except (OSError, MoonclipError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        log.warning("%s is left of an interrupted move, and stays: %s", shown, why)


def _was_moved(store: Store, path: Path, name: str | None) -> bool:
    """Whether `path` is gone and its snapshot is bound."""
    if not _is_gone(path):
        return False
    basename = os.path.basename(os.path.abspath(os.fsencode(path)))
    own = os.fsdecode(basename)
    snapshot = own if name is None else name
    bound = store.names().bound()
    if snapshot.endswith("/"):
        prefix = snapshot.rstrip("/")
        snapshot = f"{prefix}/{own}" if prefix else own
        if snapshot not in bound and prefix in bound and _has_file(store, bound[prefix], basename):
            snapshot = prefix
    if snapshot not in bound:
        return False
    number = bound[snapshot].number
    log.warning("%s is gone, and there is %s@%d: taken as moved before", path, snapshot, number)
    return True


def _is_gone(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _has_file(store: Store, version: Version, name: bytes) -> bool:
    try:
        return store.lookup(version, name).type is not EntryType.DIRECTORY
    except NotFoundError:
        return False


def _files(root: Found) -> Iterator[tuple[bytes, Found]]:
    start = len(root.path) + 1 if root.path else 0
    for one in root.walk():
        if one.type is EntryType.FILE:
            yield (one.path[start:] if root.path else one.name), one


def _compare(store: Store, version: Version, path: bytes, found: Found) -> None:
    reader = store.open_file(store.lookup(version, path))
    source = FileSource(found)
    if reader.size != found.size:
        raise CorruptError(f"{source.name}: the store gives back {reader.size} bytes, not {found.size}; it was kept")
    source.open()
    try:
        for offset in range(0, found.size, limits.PREFETCH_BYTES):
            stored = bytearray(min(limits.PREFETCH_BYTES, found.size - offset))
            reader.stream_into(offset, memoryview(stored))
            if stored != source.read(offset, len(stored)):
                raise CorruptError(
                    f"{source.name}: the store gives back other bytes near {offset}; nothing was deleted"
                )
        source.check()
    finally:
        source.close()


def _delete(found: Found, settled_ns: int) -> None:
    """Delete one original, if it is as it was found and no inode of it changed after `settled_ns`."""
    shown, is_directory = os.fsdecode(found.path), found.type is EntryType.DIRECTORY
    parent, name = os.path.split(found.path)
    checked, doomed = (os.path.join(parent, b"." + name + suffix) for suffix in (_CHECKED, _DOOMED))
    aside = os.path.join(checked, name)
    for place in (checked, doomed):
        if os.path.lexists(place):
            raise BusyError(
                f"{shown} was kept: {os.fsdecode(place)} is left of an interrupted move of that name; "
                "see what it holds, and move it away"
            )
    with os_errors(f"delete {shown}"):
        os.mkdir(checked, 0o700)
        try:
            _require_as_found(found, found.path, settled_ns)
            os.rename(found.path, aside)
            # Renaming a file is a change of its inode: from here on, its other attributes have to tell.
            _require_as_found(found, aside, settled_ns if is_directory else None)
            if is_directory:
                os.rename(checked, doomed)
        except BaseException:
            _put_back(checked, found.path)
            raise
        if not is_directory:
            os.unlink(aside)
            os.rmdir(checked)
    if is_directory:
        with os_errors(f"delete {os.fsdecode(doomed)}, what is left of {shown}"):
            _clear(doomed, os.fsdecode(doomed), settled_ns, set())


def _put_back(checked: bytes, path: bytes) -> bool:
    """Give what lies in `checked` its name again; False when nothing lay there. Raises BusyError when it is taken."""
    aside = os.path.join(checked, os.path.basename(path))
    there = os.path.lexists(aside)
    if there:
        try:
            # Unlike rename(2), it never replaces anything.
            os.link(aside, path, follow_symlinks=False)
            os.unlink(aside)
        except FileExistsError:
            if not os.path.samestat(os.lstat(aside), os.lstat(path)):
                raise BusyError(
                    f"{os.fsdecode(path)} was made anew meanwhile: what had that name is kept as {os.fsdecode(aside)}"
                ) from None
            os.unlink(aside)
        except OSError:
            os.rename(aside, path)  # a directory, or a file system without links
    with suppress(FileNotFoundError):
        os.rmdir(checked)
    return there


def _clear(
    name: bytes | str, shown: str, settled_ns: int, linked: set[tuple[int, int]], within: int | None = None
) -> None:
    """Delete a directory, but nothing in it whose inode changed after `settled_ns`: somebody still writes there.

    Raises BusyError then. No symbolic link is followed, whoever puts one there. `linked` collects the files that had
    other names: each deletion of one is a change of their inode.
    """
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        for child in os.listdir(fd):
            place = os.path.join(shown, child)
            status = os.stat(child, dir_fd=fd, follow_symlinks=False)
            identity = status.st_dev, status.st_ino
            if stat.S_ISDIR(status.st_mode):
                _clear(child, place, settled_ns, linked, fd)
                continue
            if status.st_ctime_ns > settled_ns and identity not in linked:
                raise BusyError(f"{place} came or changed while the rest was deleted, and was kept")
            if status.st_nlink > 1:
                linked.add(identity)
            os.unlink(child, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=within)


def _require_as_found(found: Found, place: bytes, settled_ns: int | None) -> None:
    """Raise BusyError unless what is at `place` is what was found, not changed after `settled_ns`."""
    there = None if os.path.islink(place) else scan(os.fsdecode(place))
    # A file's other names change its inode too when they come and go; and its bytes are not lost with one of them.
    settled = there is not None and (settled_ns is None or found.links > 1 or _last_change(there) <= settled_ns)
    if there is None or not settled or _listing(there) != _listing(found):
        raise BusyError(f"{os.fsdecode(found.path)} changed since it was stored and was kept: run the move again")


def _last_change(root: Found) -> int:
    """When an inode at or below `root` last changed, in ns, but for directories: writes cannot hide from that time."""
    with os_errors(f"read {os.fsdecode(root.path)}"):
        changes = (os.lstat(one.path).st_ctime_ns for one in root.walk() if one.type is not EntryType.DIRECTORY)
        return max(changes, default=0)


def _listing(root: Found) -> list[tuple[object, ...]]:
    """All that must stay the same; of a directory not its time, since what changes that shows by itself."""
    start = len(root.path)
    return [
        (
            one.path[start:],
            one.type,
            one.identity,
            one.size,
            one.target,
            replace(one.attributes, mtime_ns=0, ctime_ns=0) if one.type is EntryType.DIRECTORY else one.attributes,
        )
        for one in root.walk()
    ]
