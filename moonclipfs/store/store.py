"""One open store: names, trees, files and objects of it, and the way to put more in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from moonclipfs import limits
from moonclipfs.errors import (
    CorruptError,
    FormatVersionError,
    LeaseLostError,
    LimitError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UsageError,
)
from moonclipfs.formats.layout import Layout
from moonclipfs.formats.sniff import parse
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.cache import BoundedCache
from moonclipfs.store.config import Config, create_store, load_config, make_missing_directories
from moonclipfs.store.directories import decode_directory, directory_weight
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.hostfs import base_index_path
from moonclipfs.store.hostfs import index_path as default_index_path
from moonclipfs.store.index import Index
from moonclipfs.store.leases import Lease
from moonclipfs.store.log import Log, Names, parse_spec
from moonclipfs.store.packs import PackReader
from moonclipfs.store.paired import PairedIndex, PairedPacks
from moonclipfs.store.publish import Ingest
from moonclipfs.store.reader import ObjectReader
from moonclipfs.store.recipes import Recipe, decode_recipe
from moonclipfs.store.target import close_names
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, Kind, ObjectId, Version

_EMPTY = Recipe(())


class Store:
    """A store in a local directory. A context manager; thread-safe, but for `close`."""

    def __init__(
        self,
        path: Path,
        *,
        write: bool,
        purpose: str,
        index_path: Path | None,
        cache_bytes: int,
        above: tuple[str, ...] | None = None,
    ) -> None:
        """Use `Store.open`. `above` are the ids of the private stores that this one is the base store of, the nearest
        last: then nothing at all is written into its directory, not even a lease or an index.
        """
        self.path = path
        self.backend = LocalBackend(path)
        self.config = load_config(self.backend)
        if write:
            self.config.check_writable()
        self.backend = LocalBackend(path, shared=self.config.shared)
        if write:
            make_missing_directories(self.backend, self.config)
        self.write = write
        self._purpose = purpose
        self._leaves_no_trace = above is not None
        self.base: Store | None = None
        """The base store of a private one, open for reading only."""
        if self.config.alternate is not None:
            self.base = _open_base(path, self.config, above or ())
        self.layers = 0
        """How many open layers tell the lease what was seen: they may rely on earlier names for longer than others."""
        self.log = Log(self.backend)
        names = self.log.refresh()
        self.lease = self._lease(names.sequence)
        if self.lease is not None:
            self.backend.owner = self.lease.name
        if index_path is None and not self._leaves_no_trace:
            index_path = default_index_path(path, self.config.store_id, shared=self.config.shared)
        if self.base is None:
            self.packs = PackReader(self.backend)
            self.index = Index(index_path, self.backend, self.packs, self.config.store_id)
        else:
            self.packs = PairedPacks(self.backend, self.base.packs)
            self.index = PairedIndex(
                index_path, self.backend, self.packs, self.config.store_id, self.base.index,
                f"its base store {self.base.path}", self.base.follow,
            )  # fmt: skip
        self.index.set_condemned(names.condemned())
        self.objects = ObjectReader(self.index, self.packs, cache_bytes)
        self._directories: BoundedCache[ObjectId, Mapping[bytes, Entry]]
        self._directories = BoundedCache(limits.DIRECTORY_CACHE_ENTRIES)
        self._recipes: BoundedCache[ObjectId, Recipe] = BoundedCache(limits.RECIPE_CACHE_EXTENTS)
        self._layouts: BoundedCache[ObjectId, Layout] = BoundedCache(limits.LAYOUT_CACHE_BYTES)

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, shared: bool = False) -> Store:
        """Make a store in a new or empty directory and open it for writing. Raises ExistsError, NotFoundError."""
        create_store(path, shared=shared)
        return cls.open(path, write=True)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        write: bool = False,
        purpose: str = "",
        index_path: Path | None = None,
        cache_bytes: int = limits.BLOCK_CACHE_BYTES,
    ) -> Store:
        """Open a store; it must exist.

        Reading works in a directory that cannot be written to, or is a copy without its empty directories: writing
        makes these again. `purpose` tells others in the lease what this process
        does, `index_path` moves the index, `cache_bytes` bounds the decoded blocks that are kept. Raises
        NotFoundError, FormatVersionError, CorruptError, and PermissionDeniedError to write where that is forbidden.
        """
        return cls(Path(path), write=write, purpose=purpose, index_path=index_path, cache_bytes=cache_bytes)

    def renew_lease(self) -> None:
        """For a long-lived reader: take a lease when there is none, or others took the one there is for dead.

        A new one has seen nothing: nothing more is reclaimed until `names` is called, and holds are taken before that.
        Raises BackendError.
        """
        if self.lease is not None:
            try:
                self.lease.check()
                return
            except LeaseLostError:
                self.lease.release()
        self.lease = self._lease(0)

    def _lease(self, sequence: int) -> Lease | None:
        if self._leaves_no_trace:
            return None
        try:
            return Lease.acquire(self.path, self._purpose, sequence)
        except (PermissionDeniedError, NoSpaceError, NotFoundError):
            # A reader is only less protected without one: what it reads may be reclaimed, and is missing then.
            if self.write:
                raise
            return None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lease, the index and every open pack. Harmless when done before."""
        self.index.close()
        self.packs.close()
        if self.base is not None:
            self.base.close()
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def names(self) -> Names:
        """The names as they are now; tells the lease that this process has seen them, unless a layer does. Raises
        CorruptError.

        Packs that were deleted are let go of: without that, their space would not be freed.
        """
        names = self.log.refresh()
        self.index.set_condemned(names.condemned())
        self.packs.forget_deleted()
        if not self.layers:
            self.saw(names)
        return names

    def follow(self) -> None:
        """Look for what others did to the store: names, condemned packs, new packs and deleted ones.

        Raises NotFoundError when another store is here by now, or none, and BackendError, PermissionDeniedError,
        CorruptError.
        """
        if (found := load_config(self.backend).store_id) != self.config.store_id:
            raise NotFoundError(f"{self.path} is the store {found} by now, and not {self.config.store_id}")
        self.names()
        self.index.sync()

    def saw(self, names: Names) -> None:
        """Tell the lease that this process relies on nothing before `names` but for its holds and its journals."""
        if self.lease is not None:
            self.lease.seen(names.sequence)

    def resolve(self, spec: str) -> Version:
        """Return the version that NAME or NAME@NUMBER means. Raises NotFoundError, which suggests close names."""
        path, number = parse_spec(spec)
        names = self.names()
        bound = names.bound()
        versions = names.versions(path)
        if number is None:
            if path in bound:
                return bound[path]
            removed = (
                f"; its version {versions[-1].number} is still kept: {path}@{versions[-1].number}" if versions else ""
            )
            similar = " or ".join(close_names(path, bound))
            raise NotFoundError(
                f"no snapshot {path} in {self.path}" + (removed or (f"; did you mean {similar}?" if similar else ""))
            )
        for version in versions:
            if version.number == number:
                return version
        kept = ", ".join(str(version.number) for version in versions) or "none"
        raise NotFoundError(f"no version {number} of {path} in {self.path}; kept: {kept}")

    def root_entry(self, version: Version) -> Entry:
        """The root directory of a version as an entry without a name."""
        return Entry(b"", EntryType.DIRECTORY, _attributes(version), child=version.root)

    def directory(self, object_id: ObjectId) -> Mapping[bytes, Entry]:
        """The entries of a directory object by name, in order. Raises CorruptError."""
        entries = self._directories.get(object_id)
        if entries is None:
            entries = decode_directory(self.objects.load(object_id, Kind.DIRECTORY))
            self._directories.put(object_id, entries, directory_weight(entries))
        return entries

    def lookup(self, version: Version, path: bytes) -> Entry:
        """The entry at `path` inside a version; `b""` is its root. Raises NotFoundError, CorruptError."""
        entry = self.root_entry(version)
        for part in path.split(b"/") if path else ():
            found = self.directory(entry.child).get(part) if entry.type is EntryType.DIRECTORY else None
            if found is None:
                raise NotFoundError(f"no {os.fsdecode(path)} in {version.path}@{version.number}")
            entry = found
        return entry

    def walk(self, version: Version) -> Iterator[tuple[bytes, Entry]]:
        """Yield (path, entry) of everything below the root of a version: sorted, parents first. Raises CorruptError."""
        return self.walk_directory(version.root)

    def walk_directory(self, root: ObjectId, prefix: bytes = b"", depth: int = 0) -> Iterator[tuple[bytes, Entry]]:
        """Yield (path, entry) of everything below a directory object, paths starting with `prefix`."""
        if depth > limits.PATH_DEPTH:
            raise CorruptError(f"directory {os.fsdecode(prefix)}: deeper than {limits.PATH_DEPTH}")
        for name, entry in self.directory(root).items():
            yield prefix + name, entry
            if entry.type is EntryType.DIRECTORY:
                yield from self.walk_directory(entry.child, prefix + name + b"/", depth + 1)

    def recipe(self, entry: Entry) -> Recipe:
        """The extents of a file entry. Raises CorruptError, also when they are not as long as the entry says."""
        if entry.type is not EntryType.FILE:
            raise UsageError(f"{os.fsdecode(entry.name)} is no file")
        recipe = _EMPTY if entry.child == NO_ID else self.recipe_object(entry.child)
        if recipe.size != entry.size:
            raise CorruptError(f"{os.fsdecode(entry.name)}: {entry.size} bytes, but a recipe of {recipe.size}")
        return recipe

    def recipe_object(self, object_id: ObjectId) -> Recipe:
        """The extents that a recipe object holds. Raises CorruptError."""
        recipe = self._recipes.get(object_id)
        if recipe is None:
            data = self.objects.load(object_id, Kind.RECIPE)
            recipe = decode_recipe(data)
            # An extent takes about 256 bytes, beside the literal bytes that it may have.
            self._recipes.put(object_id, recipe, len(recipe.extents) + len(data) // 256 + 1)
        return recipe

    def open_file(self, entry: Entry) -> FileReader:
        """A reader of a file entry. Raises CorruptError."""
        return FileReader(self.objects, self.recipe(entry))

    def layout(self, entry: Entry) -> Layout:
        """What the parsers say of a file entry. Raises CorruptError only for damage to the store."""
        layout = self._layouts.get(entry.child)
        if layout is None:
            layout = parse(self.open_file(entry))
            self._layouts.put(entry.child, layout, layout.weight)
        return layout

    def ingest(self) -> Ingest:
        """Begin to put files in. Raises UsageError when the store is open for reading only, LeaseLostError."""
        if not self.write or self.lease is None:
            raise UsageError(f"{self.path} is open for reading only")
        return Ingest(self.backend, self.index, self.packs, self.log, self.lease, self.config.cut)


def _open_base(path: Path, config: Config, above: tuple[str, ...]) -> Store:
    """Open the base store of the private store at `path`, of which nothing is written. It may be a private one itself.

    Raises NotFoundError when it is not there, or another store is; FormatVersionError when it is none, or needs a newer
    version; CorruptError when base stores lead back, LimitError for too many.
    """
    assert config.alternate is not None
    place, wanted = config.alternate.path, config.alternate.store_id
    above = (*above, config.store_id)
    advice = f"bring it back, or name the place where it is by now: `moonclipfs overlay create --state {path}`"
    if wanted in above:
        raise CorruptError(f"{path}: its base stores lead back to the store {wanted} at {place}")
    if len(above) > limits.BASE_STORES:
        raise LimitError(f"{path}: more than {limits.BASE_STORES} base stores, one behind the other")
    over = f"{path} is a private store over the store {wanted} at {place}"
    try:
        found = load_config(LocalBackend(place)).store_id
    except (NotFoundError, FormatVersionError) as error:
        raise type(error)(f"{over}: {error}; {advice}") from error
    if found != wanted:
        raise NotFoundError(f"{over}, where another one is, {found}: {advice}")
    index_path = base_index_path(Path(place), wanted, path)
    cache_bytes = limits.BLOCK_CACHE_BYTES
    return Store(Path(place), write=False, purpose="", index_path=index_path, cache_bytes=cache_bytes, above=above)


def _attributes(version: Version) -> Attributes:
    """The attributes of a snapshot's root, from the log; what is missing or odd there gets a default."""
    stored = version.metadata.get("attributes")
    fields = stored if isinstance(stored, Mapping) else {}

    def number(name: str, default: int) -> int:
        value = fields.get(name)
        return value if isinstance(value, int) else default

    return Attributes(
        number("mode", 0o755) & 0o7777,
        number("uid", 0),
        number("gid", 0),
        number("mtime_ns", version.time_ns),
        number("ctime_ns", version.time_ns),
    )


def root_metadata(attributes: Attributes) -> dict[str, int]:
    """What `bind` metadata keeps of the root directory's attributes, under the key "attributes"."""
    return {
        "mode": attributes.mode,
        "uid": attributes.uid,
        "gid": attributes.gid,
        "mtime_ns": attributes.mtime_ns,
        "ctime_ns": attributes.ctime_ns,
    }
