"""Journal records of a layer: every change of it is one of these, applied alike when it is made and when replayed.

A record is a NamedTuple of integers, bytes, None, and lists and tuples of these. Inodes are meant by number. As bytes
it is a msgpack array: the code of its type, the objects that it needs (a kind byte and an id each, so that gc can
read them without knowing the type), then its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import msgpack

from moonclipfs.errors import CorruptError
from moonclipfs.types import NO_ID, Buffer, Kind, ObjectId

PART_HOLE = 0
PART_RECIPE = 1
PART_STAGED = 2


class Make(NamedTuple):
    """A new inode, and its first name in the directory `parent`. `type` is an `EntryType`."""

    number: int
    parent: int
    name: bytes
    type: int
    mode: int
    uid: int
    gid: int
    target: bytes
    time_ns: int


class Adopt(NamedTuple):
    """The layer takes over what its base shows at `name` in `parent`, because something about it changes next.

    For a directory, `anchor`, `path` and `child` say what goes on showing through it (see `inodes.Lower`); for a file
    `child` is its recipe. `group`, unless zero, is the group of hard links that it has in its base.
    """

    number: int
    parent: int
    name: bytes
    type: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    size: int
    child: ObjectId
    target: bytes
    anchor: bytes
    path: bytes
    root: ObjectId
    group: int
    sealed: int


class Link(NamedTuple):
    """One more name of an inode."""

    number: int
    parent: int
    name: bytes
    time_ns: int


class Remove(NamedTuple):
    """The name `name` leaves `parent`; what the base has there does not show through any more.

    `unbind` is the log record that bound the snapshot whose name goes with it, or 0: the log is told later.
    `whiteout` says that the base has something there.
    """

    parent: int
    name: bytes
    unbind: int
    time_ns: int
    whiteout: bool = False


class Rename(NamedTuple):
    """A name moves to another place; what was there leaves, or with `exchange` takes the first place.

    `whiteout` says that the base has something at the first place. `unbind` is as in `Remove`, for what leaves.
    """

    parent: int
    name: bytes
    new_parent: int
    new_name: bytes
    exchange: bool
    time_ns: int
    whiteout: bool = False
    unbind: int = 0


class SetAttributes(NamedTuple):
    """Attributes of an inode; None leaves one as it is."""

    number: int
    mode: int | None
    uid: int | None
    gid: int | None
    atime_ns: int | None
    mtime_ns: int | None
    ctime_ns: int


class SetXattr(NamedTuple):
    """An extended attribute; the value None removes it."""

    number: int
    name: bytes
    value: bytes | None
    ctime_ns: int


class Contents(NamedTuple):
    """What a file consists of from here on: all of it with `whole`, else the named parts change.

    `parts` are (offset, length, kind, generation): kind is one of the PART_ constants, `generation` the staging
    generation for PART_STAGED. `data` holds the bytes of generations that are staged in the journal, as (generation,
    offset, bytes). `recipe` is the one that PART_RECIPE means. `synced` says that all staged bytes are on the disk:
    after a power failure, other records of contents do not count. `change` is the change number of these contents.
    """

    number: int
    size: int
    mtime_ns: int
    ctime_ns: int
    whole: bool
    recipe: ObjectId
    parts: tuple[tuple[int, int, int, int], ...]
    data: tuple[tuple[int, int, bytes], ...]
    synced: bool
    change: int = 0


class Stored(NamedTuple):
    """The generations up to `generation` of a file are encoded: with its recipe before, they are `recipe` now."""

    number: int
    generation: int
    recipe: ObjectId
    size: int


class Captured(NamedTuple):
    """A directory was captured for a seal: `tree` is the frozen tree as `capture.py` writes it. `refs` are the
    objects that it needs. `base`, if there is one, is what was sealed since of an earlier capture of the directory.
    """

    capture: int
    directory: int
    path: bytes
    counter: int
    metadata: bytes
    tree: bytes
    refs: tuple[tuple[int, ObjectId], ...]
    base: ObjectId = NO_ID


class Sealed(NamedTuple):
    """A capture was published as a version, bound by log record `sequence`; sequence 0: it was given up.

    `directories` are the captured directories by inode number, as they are in the version. `ours` is what was captured,
    without what others had published meanwhile. `attributes` are those that others gave to directories: by inode
    number mode, uid, gid, mtime_ns, ctime_ns and xattrs.
    """

    capture: int
    path: bytes
    version: int
    sequence: int
    root: ObjectId
    directories: tuple[tuple[int, ObjectId], ...] = ()
    ours: ObjectId = NO_ID
    attributes: tuple[tuple[int, int, int, int, int, int, tuple[tuple[bytes, bytes], ...]], ...] = ()


class Dropped(NamedTuple):
    """What the layer has at `name` in `parent` goes, with all below: names of the log say what is there now."""

    parent: int
    name: bytes


class Unbound(NamedTuple):
    """The log was told that the snapshot bound by record `sequence` is removed."""

    path: bytes
    sequence: int


class Moving(NamedTuple):
    """The log is about to be told to move names from `old` to `new`; a `Rename` follows, or `Moving` with no names.

    With neither, the directory at `new` was renamed while it was sealed, as version `sequence`: its name goes along.
    `sequence` is the log record that bound one of them. `exchange` says that what is at `new` takes the place of
    `old`; no names are bound there.
    """

    old: bytes
    new: bytes
    sequence: int = 0
    exchange: bool = False


class Whole(NamedTuple):
    """One own inode as it is, in a journal that is written anew: directories first, each after the one that it is in.

    `links` are (number of the directory, name). `lower` is empty or the fields of an `inodes.Lower`; `names_changed`
    are (name, change counter).
    """

    number: int
    type: int
    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    target: bytes
    links: tuple[tuple[int, bytes], ...]
    size: int
    child: ObjectId
    group: int
    lower: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    names_changed: tuple[tuple[bytes, int], ...]
    changed: int
    below: int
    sealed: int


class Counters(NamedTuple):
    """Numbers given out so far: the first record of a journal that is written anew."""

    inode: int
    generation: int
    capture: int
    change: int


class Kept(NamedTuple):
    """Others removed or moved the snapshot that a directory was, which stays since it has unsealed changes: from here
    on it is an ordinary directory, and a change.
    """

    number: int


class Unbinding(NamedTuple):
    """The log must still be told that the snapshot bound by `sequence` is gone: in a journal that is written anew, and
    when its directory was removed while it was sealed.
    """

    path: bytes
    sequence: int


class Based(NamedTuple):
    """The layer is an overlay: it stands on the directory object `base`, and where it has no own entries, `shown` shows
    through: at first the same. NO_ID is an empty directory. The first record of its journal, also of one that is
    written anew; it keeps both from gc.

    Then come the attributes of the root, and `anchor`, which numbers what shows through (see `inodes.Lower`). A later
    one says that the overlay was put onto another base: all that it had of its own is in `shown`, and goes.
    `settings` is JSON, see `overlaydirs.OverlayInfo`.
    """

    base: ObjectId
    shown: ObjectId
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    anchor: bytes
    settings: bytes


class Charged(NamedTuple):
    """Of what is encoded of a file, `ranges` (from one offset to another) were written in this overlay, and count
    against its quota; so do those that were told before, up to the offset `kept`.
    """

    number: int
    kept: int
    ranges: tuple[tuple[int, int], ...]


Record: TypeAlias = (
    Make
    | Adopt
    | Link
    | Remove
    | Rename
    | SetAttributes
    | SetXattr
    | Contents
    | Stored
    | Captured
    | Sealed
    | Dropped
    | Unbound
    | Moving
    | Whole
    | Counters
    | Unbinding
    | Kept
    | Based
    | Charged
)

_TYPES: tuple[Callable[..., Any], ...] = (
    Make,
    Adopt,
    Link,
    Remove,
    Rename,
    SetAttributes,
    SetXattr,
    Contents,
    Stored,
    Captured,
    Sealed,
    Dropped,
    Unbound,
    Moving,
    Whole,
    Counters,
    Unbinding,
    Kept,
    Based,
    Charged,
)
_CODES = {type_: code for code, type_ in enumerate(_TYPES, 1)}


def encode_record(record: Record, refs: Iterable[tuple[Kind, ObjectId]] = ()) -> bytes:
    """Serialise a record; `refs` are the objects that must not be reclaimed because of it."""
    needed = [bytes([kind]) + object_id for kind, object_id in refs if object_id != NO_ID]
    return bytes(msgpack.packb([_CODES[type(record)], needed, *record], use_bin_type=True))


def decode_record(data: Buffer) -> Record:
    """Parse a record. Raises CorruptError for what is none; the types of fields are for whoever applies it."""
    try:
        code, _, *fields = msgpack.unpackb(data, raw=False, use_list=False, strict_map_key=False)
        if code < 1:
            raise ValueError(f"type {code}")
        record: Record = _TYPES[code - 1](*fields)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise CorruptError(f"journal: not a record ({error!r})") from error
    return record
