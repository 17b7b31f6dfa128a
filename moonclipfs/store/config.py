"""What a store is: its directory, its id, its version and flags, the rules of its cuts (layout in FORMAT.md)."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import CorruptError, ExistsError, FormatVersionError, MoonclipError, NotFoundError
from moonclipfs.formats.cut import CutRules
from moonclipfs.store import reserve
from moonclipfs.store.backend import Backend, FileOps, LocalBackend, os_errors

FORMAT = "moonclipfs-store"
VERSION = 1
KEY = "config.json"
DIRECTORIES = ("log", "packs", "tmp", "leases")
LAYERS = "layers"
"""Feature of a store that has layers: their journals need objects too, so only who knows them may delete."""
PINS = "pins"
"""Feature of a store that has pins in its log: who does not know them would forget what they keep."""
_WRITER_FEATURES = frozenset({LAYERS, PINS})
ALTERNATE = "alternate"
"""Feature of a private store: what it lacks is read from the base store that its config names."""
_READER_FEATURES = frozenset({ALTERNATE})
_OFTEN_EMPTY = ("tmp", "leases")
"""What a copy made by a tool that leaves out empty directories lacks."""
_OURS = frozenset({*DIRECTORIES, "README.txt", "reserve"})
_STORE_ID = re.compile(r"[0-9a-f]{32}")

README = f"""\
This directory is a moonclipfs store, format version {VERSION}.

It holds snapshots of files as deduplicated, compressed objects. Do not change anything in it by hand.

To get the files out:
  moonclipfs ls STORE                     lists the snapshots
  moonclipfs export STORE:NAME TARGET     writes one back as plain files (--all: every one)
Without moonclipfs: the single file moonclipfs/rescue.py of its source exports any store with only Python, NumPy and
zstandard:
  python rescue.py STORE TARGET
The format is described in moonclipfs/store/FORMAT.md of the source.
"""


@dataclass(frozen=True, slots=True)
class Alternate:
    """The base store of a private one: its absolute path, and its id."""

    path: str
    store_id: str


@dataclass(frozen=True, slots=True)
class Config:
    """The contents of `config.json`. Flags name features that a reader must know (`incompatible`), that a writer must
    know (`read_only_compatible`), or that nobody needs to know (`compatible`). `created` is ISO 8601 in UTC.
    `alternate` makes it a private store.
    """

    store_id: str
    version: int = VERSION
    compatible: tuple[str, ...] = ()
    read_only_compatible: tuple[str, ...] = ()
    incompatible: tuple[str, ...] = ()
    cut: CutRules = field(default_factory=CutRules)
    shared: bool = False
    created: str = ""
    alternate: Alternate | None = None

    def check_writable(self) -> None:
        """Raise FormatVersionError, by name, for a feature that writers must know and this version does not."""
        unknown = tuple(name for name in self.read_only_compatible if name not in _WRITER_FEATURES)
        _refuse(unknown, "writing to it")


def _refuse(flags: tuple[str, ...], doing: str) -> None:
    if flags:
        raise FormatVersionError(f"this store uses {', '.join(flags)}: {doing} needs a newer moonclipfs")


def encode_config(config: Config) -> bytes:
    """Serialise a config as JSON that ends with the SHA-256 of the rest."""
    fields: dict[str, Any] = {"format": FORMAT, **asdict(config)}
    if config.alternate is None:
        del fields[ALTERNATE]
    fields["sha256"] = _digest(fields)
    return (json.dumps(fields, indent=1) + "\n").encode()


def _digest(fields: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in fields.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def decode_config(data: bytes) -> Config:
    """Parse `config.json`. Raises CorruptError for damage, FormatVersionError for what this version does not know."""
    try:
        fields = json.loads(data)
        if fields["format"] != FORMAT:
            raise FormatVersionError(f"config.json is of the format {fields['format']!r}, not {FORMAT!r}")
        if fields["version"] != VERSION:
            raise FormatVersionError(f"store of format version {fields['version']}: this moonclipfs reads {VERSION}")
        if fields["sha256"] != _digest(fields):
            raise CorruptError("config.json: SHA-256 does not match: restore the file from a copy")
        incompatible = tuple(fields["incompatible"])
        _refuse(tuple(name for name in incompatible if name not in _READER_FEATURES), "reading it")
        return Config(
            store_id=str(fields["store_id"]),
            compatible=tuple(fields["compatible"]),
            read_only_compatible=tuple(fields["read_only_compatible"]),
            incompatible=incompatible,
            cut=CutRules(**fields["cut"]),
            shared=bool(fields["shared"]),
            created=str(fields["created"]),
            alternate=_alternate(fields) if ALTERNATE in incompatible or ALTERNATE in fields else None,
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"config.json is damaged ({error!r}): restore the file from a copy") from error


def _alternate(fields: Mapping[str, Any]) -> Alternate:
    """The base store that a config names. Raises CorruptError for what nobody would have written."""
    path, store_id = str(fields[ALTERNATE]["path"]), str(fields[ALTERNATE]["store_id"])
    known = ALTERNATE in fields["incompatible"] and _STORE_ID.fullmatch(store_id)
    if not known or not os.path.isabs(path) or "\0" in path or len(path) > limits.PATH_BYTES:
        raise CorruptError(f"config.json names a base store that cannot be: {store_id[:64]!r} at {path[:256]!r}")
    return Alternate(path, store_id)


def load_config(backend: Backend) -> Config:
    """Read a store's config.

    Raises NotFoundError when the directory is missing, FormatVersionError when it is no store or needs a newer
    version, CorruptError for a damaged config.
    """
    where = backend.path("")
    try:
        data = backend.read(KEY, 0, limits.MIB)
    except NotFoundError as error:
        if not os.path.isdir(where):
            raise NotFoundError(f"no store at {where}: make one with `moonclipfs init`") from error
        raise FormatVersionError(f"not a store: {where} has no {KEY}; make one with `moonclipfs init`") from error
    try:
        return decode_config(data)
    except MoonclipError as error:
        raise type(error)(f"{where}: {error}") from error


def create_store(
    path: str | os.PathLike[str],
    *,
    shared: bool = False,
    ops: FileOps | None = None,
    cut: CutRules | None = None,
    alternate: Alternate | None = None,
) -> Config:
    """Make a store in a new or empty directory, whose parent exists; `shared` lets the directory's group in.

    `cut` are its rules of cutting, else those of this version; `alternate` makes it a private store, which gets no
    reserve: it is to cost what changed. The config comes last and makes it a store, so an interrupted call can be
    repeated. Raises ExistsError for anything else that is there, NotFoundError without a parent, NoSpaceError,
    PermissionDeniedError.
    """
    backend = LocalBackend(path, ops, shared=shared)
    mode = _mode(shared)
    _make_directory(backend, backend.path("").rstrip("/") or "/", mode)
    with os_errors(f"list {path}"):
        present = set(os.listdir(path))
    if KEY in present:
        raise ExistsError(f"{path} is a store already")
    if strange := sorted(present - _OURS):
        raise ExistsError(f"{path} is not empty (it holds {strange[0]!r}): a new store needs a directory of its own")
    for name in DIRECTORIES:
        _make_directory(backend, backend.path(name), mode)
    if "README.txt" not in present:
        backend.create("README.txt", README.encode())
    if alternate is None:
        reserve.take(Path(path))
    config = Config(
        store_id=secrets.token_hex(16),
        incompatible=() if alternate is None else (ALTERNATE,),
        cut=cut or CutRules(),
        alternate=alternate,
        shared=shared,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    backend.create(KEY, encode_config(config))
    with os_errors(f"sync the directory of {path}"):
        backend.sync_directory(os.path.dirname(os.path.abspath(path)))
    return config


def enable(backend: LocalBackend, config: Config, feature: str) -> Config:
    """Give a store a feature that its writers must know, durably, unless it has it; returns its config.

    Raises FormatVersionError when others gave it one meanwhile that this version does not know, NoSpaceError,
    PermissionDeniedError, BackendError.
    """
    if feature in config.read_only_compatible:
        return config
    with _alone(backend):
        config = load_config(backend)
        config.check_writable()
        if feature not in config.read_only_compatible:
            config = replace(config, read_only_compatible=(*config.read_only_compatible, feature))
            backend.replace(KEY, encode_config(config))
    return config


@contextmanager
def _alone(backend: LocalBackend) -> Iterator[None]:
    """Of those who change the config of a store at one time, on this host, each sees what the one before it wrote.

    Across hosts the last one wins; a feature that is lost so is given again where it is used next.
    """
    with os_errors(f"open {backend.path('')}"):
        directory = os.open(backend.path(""), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def move_alternate(backend: LocalBackend, path: str) -> Config:
    """Note, durably, that the base store of a private store lies at `path` by now; returns the config.

    Raises NoSpaceError, PermissionDeniedError, BackendError.
    """
    with _alone(backend):
        config = load_config(backend)
        if config.alternate is not None and config.alternate.path != path:
            config = replace(config, alternate=replace(config.alternate, path=path))
            backend.replace(KEY, encode_config(config))
    return config


def make_missing_directories(backend: LocalBackend, config: Config) -> None:
    """Make those directories of a store again that a copy of it may lack. Raises PermissionDeniedError, NoSpaceError,
    BackendError.
    """
    for name in _OFTEN_EMPTY:
        path = backend.path(name)
        if not os.path.isdir(path):
            _make_directory(backend, path, _mode(config.shared))


def _mode(shared: bool) -> int:
    return 0o2770 if shared else 0o700


def _make_directory(backend: LocalBackend, path: str, mode: int) -> None:
    with os_errors(f"make the directory {path}"):
        try:
            backend.ops.mkdir(path, mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        os.chmod(path, mode)
