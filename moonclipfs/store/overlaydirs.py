"""The names of overlays in a store, and the directories that they lead to.

`overlays/NAME` is a small JSON file: which layer directory the overlay is, and what those who only look need to know.
What an overlay needs to be used stands in the journal of that layer, which also keeps it from gc. A layer directory
`overlay.*` without a name belongs to nobody: it was being made or discarded when its process died.

Names are made, changed and removed under one lock, for moments: so a name is there or not, and leads to a whole layer.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    MoonclipError,
    NotFoundError,
    PermissionDeniedError,
    UsageError,
)
from moonclipfs.store import ofd
from moonclipfs.store.backend import LocalBackend, mode_of_files, os_errors
from moonclipfs.store.layerdirs import DIRECTORY as LAYERS
from moonclipfs.store.layerdirs import LayerLock, check_layer_name, layer_holder, layer_names
from moonclipfs.store.log import Names
from moonclipfs.store.target import close_names
from moonclipfs.types import NO_ID, ObjectId

DIRECTORY = "overlays"
_LAYER = re.compile(r"overlay\.[0-9a-f]{16}")
"""The names of the layer directories of overlays, and of dry runs."""
_STAGED = re.compile(r"[0-9a-f]{16}")
_LOCK = ".lock"
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("layer", "base"), (str,)),
    **dict.fromkeys(("ephemeral", "dry_run"), (bool,)),
    **dict.fromkeys(("base_number", "base_sequence", "quota"), (int, NoneType)),
    "base_path": (str, NoneType),
    "created_ns": (int,),
    "owner": (dict,),
}
"""Of what a description says."""
_GONE_PREFIX = ".gone."
"""A layer directory that is being deleted."""
_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class OverlayInfo:
    """What is known of an overlay without opening it. `layer` is the name of its layer directory.

    `base` is what it stands on, as a person is told: `run/ck-1@2`, `overlay x`, `/path`, or nothing. `base_path` and
    `base_number` name the version, if it is one, and `base_sequence` is the log record that bound it; `base_root` is
    the directory object. `quota` is in bytes. `owner`
    says who an ephemeral overlay belongs to (pid, host, mountpoint), for messages.
    """

    name: str
    layer: str
    base: str = ""
    base_path: str | None = None
    base_number: int | None = None
    base_sequence: int | None = None
    base_root: ObjectId = NO_ID
    created_ns: int = 0
    quota: int | None = None
    ephemeral: bool = False
    dry_run: bool = False
    owner: Mapping[str, object] = field(default_factory=dict)

    def settings(self) -> bytes:
        """All but the name, as JSON."""
        fields = asdict(self)
        del fields["name"]
        return json.dumps({**fields, "base_root": self.base_root.hex()}).encode()

    @classmethod
    def parse(cls, name: str, data: bytes) -> OverlayInfo:
        """Read what `settings` wrote. Raises CorruptError."""
        try:
            fields: dict[str, Any] = json.loads(data)
            known = {key: fields[key] for key in cls.__slots__ if key in fields and key != "name"}
            known["base_root"] = bytes.fromhex(known["base_root"])
            info = cls(name, **known)
            odd = [key for key, types in _TYPES.items() if type(getattr(info, key)) not in types]
            if odd or len(info.base_root) != len(NO_ID) or not is_overlay_layer(info.layer):
                raise ValueError("odd fields")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(
                f"overlays/{name} is damaged ({error!r}): restore it from a copy, or discard it"
            ) from error
        return info


def _damaged(name: str, why: str) -> CorruptError:
    return CorruptError(f"overlays/{name} is damaged ({why}): restore it from a copy, or discard it")


def check_overlay_name(name: str) -> None:
    """Raise UsageError for what cannot be the name of an overlay."""
    try:
        check_layer_name(name)
    except UsageError:
        raise UsageError(
            f"{name!r} cannot name an overlay: use up to 200 letters, digits, dots, dashes and underscores"
        ) from None
    if name.startswith("."):
        raise UsageError(f"{name!r} cannot name an overlay: it begins with a dot")


# Looking


def overlay_names(root: Path) -> list[str]:
    """The names of all overlays of a store, sorted."""
    directory = Path(root) / DIRECTORY
    with os_errors(f"list {directory}"):
        try:
            return sorted(name for name in os.listdir(directory) if not name.startswith("."))
        except FileNotFoundError:
            return []


def overlay_infos(root: Path) -> list[OverlayInfo]:
    """All overlays of a store, by name. Raises CorruptError."""
    found, damaged = intact_infos(root)
    if damaged:
        raise damaged[0]
    return found


def intact_infos(root: Path) -> tuple[list[OverlayInfo], list[CorruptError]]:
    """The overlays of a store whose descriptions can be read, by name, and what is wrong with the others."""
    found, damaged = [], []
    for name in overlay_names(root):
        try:
            found.append(_read(Path(root), name))
        except CorruptError as error:
            damaged.append(error)
        except NotFoundError:
            continue  # discarded meanwhile
    return found, damaged


def find_overlay(root: Path, name: str) -> OverlayInfo:
    """One overlay. Raises NotFoundError, which suggests close names, CorruptError."""
    check_overlay_name(name)
    try:
        return _read(Path(root), name)
    except NotFoundError:
        similar = " or ".join(close_names(name, overlay_names(root)))
        raise NotFoundError(
            f"no overlay {name} in {root}" + (f"; did you mean {similar}?" if similar else "")
        ) from None


def is_named(root: Path, name: str) -> bool:
    """Whether there is an overlay of this name, be it damaged."""
    return os.path.lexists(Path(root) / DIRECTORY / name)


def is_over(root: Path, info: OverlayInfo) -> bool:
    """Whether an ephemeral overlay belongs to nobody any more: the next `sweep` clears it away."""
    return info.ephemeral and layer_holder(Path(root) / LAYERS / info.layer) is None


def layer_title(root: Path, layer: str) -> str:
    """What a layer directory is called for people: by the name of its overlay, if it has one."""
    if is_overlay_layer(layer):
        for name in overlay_names(root):
            with suppress(MoonclipError):  # damaged, or discarded meanwhile
                if _read(root, name).layer == layer:
                    return f"overlay {name}"
    return f"layer {layer}"


def pinned_versions(root: Path, names: Names) -> Mapping[tuple[str, int], list[str]]:
    """The versions, by path and number, that overlays stand on, wherever they were moved, and the names of these."""
    standing: dict[int, list[str]] = {}
    for info in overlay_infos(root):
        if info.base_sequence is not None and not is_over(root, info):
            standing.setdefault(info.base_sequence, []).append(info.name)
    if not standing:
        return {}
    versions = names.all_versions()
    return {(one.path, one.number): standing[one.sequence] for one in versions if one.sequence in standing}


def _read(root: Path, name: str) -> OverlayInfo:
    path = root / DIRECTORY / name
    with os_errors(f"read {path}"):
        if not stat.S_ISREG(os.lstat(path).st_mode):  # nobody is to wait for a pipe
            raise _damaged(name, "no regular file")
        with open(path, "rb") as file:
            return OverlayInfo.parse(name, file.read(limits.MIB))


# Changing; all of these raise BusyError when the lock of the names is not to be had, PermissionDeniedError,
# NoSpaceError, BackendError.


@contextmanager
def naming(backend: LocalBackend) -> Iterator[None]:
    """Hold the lock of the names, which is waited for shortly."""
    directory = Path(backend.path(DIRECTORY))
    path = directory / _LOCK
    if not directory.is_dir():
        mode = 0o2770 if mode_of_files(backend.root) & 0o070 else 0o700
        with os_errors(f"make the directory {directory}"):
            with suppress(FileExistsError):
                backend.ops.mkdir(str(directory), mode)
                os.chmod(directory, mode)
            backend.sync_directory(str(backend.root))
    fd = _open_lock(path, mode_of_files(directory))
    try:
        with os_errors(f"lock {path}"):
            deadline = time.monotonic() + _WAIT_SECONDS
            while not ofd.lock(fd):
                if time.monotonic() > deadline:
                    raise BusyError(f"{path} is locked by another process: try again")
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        with suppress(OSError):
            ofd.unlock(fd)
        os.close(fd)


def _open_lock(path: Path, mode: int) -> int:
    with os_errors(f"lock {path}"):
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        if os.fstat(fd).st_uid == os.geteuid():
            os.fchmod(fd, mode)  # whatever the umask: the group of a shared store locks it too
        return fd


def new_layer_name() -> str:
    """A name for the layer directory of a new overlay."""
    return f"overlay.{secrets.token_hex(8)}"


def is_overlay_layer(name: str) -> bool:
    """Whether a layer directory of this name belongs to an overlay, or to a dry run."""
    return _LAYER.fullmatch(name) is not None


def require_free(root: Path, name: str) -> None:
    """Raise ExistsError when an overlay has this name, UsageError for what cannot be one."""
    check_overlay_name(name)
    if is_named(root, name):
        raise ExistsError(f"there is an overlay {name} already: choose another name, or discard it first")


def add_name(backend: LocalBackend, info: OverlayInfo) -> None:
    """Inside `naming`: make the name, durably; from here on the overlay is there. Raises ExistsError."""
    require_free(backend.root, info.name)
    backend.create(f"{DIRECTORY}/{info.name}", info.settings())


def set_info(backend: LocalBackend, info: OverlayInfo) -> None:
    """Inside `naming`: let the name tell something else, in one step."""
    backend.replace(f"{DIRECTORY}/{info.name}", info.settings())


def rename_overlay(backend: LocalBackend, old: str, new: str) -> OverlayInfo:
    """Call an overlay otherwise, in one step. Raises NotFoundError, ExistsError, UsageError."""
    with naming(backend):
        info = find_overlay(backend.root, old)
        require_free(backend.root, new)
        with os_errors(f"rename the overlay {old}"):
            backend.ops.rename(backend.path(f"{DIRECTORY}/{old}"), backend.path(f"{DIRECTORY}/{new}"))
            backend.sync_directory(backend.path(DIRECTORY))
    return replace(info, name=new)


def remove_overlay(backend: LocalBackend, name: str) -> None:
    """Take the name of an overlay away, then all that it had. Whoever calls this has its lock. Harmless when it is
    gone.
    """
    with naming(backend):
        gone = _remove(backend, name)
    _clear(gone)


def remove_damaged(backend: LocalBackend, name: str) -> None:
    """The same for an overlay that cannot be opened. Raises BusyError when a process has it all the same."""
    with ExitStack() as stack:
        with suppress(CorruptError, NotFoundError):  # then nobody can have it
            layer = find_overlay(backend.root, name).layer
            lock = LayerLock.acquire(backend.root / LAYERS / layer, {"pid": os.getpid()})
            stack.callback(lock.release)
        remove_overlay(backend, name)


def _remove(backend: LocalBackend, name: str) -> Path | None:
    """Inside `naming`. What a damaged name led to is an orphan from then on."""
    try:
        layer = _read(backend.root, name).layer
    except NotFoundError:
        return None
    except CorruptError:
        layer = None
    with os_errors(f"discard the overlay {name}"):
        backend.ops.unlink(backend.path(f"{DIRECTORY}/{name}"))
        backend.sync_directory(backend.path(DIRECTORY))
    return None if layer is None else _set_aside(backend, layer)


def _set_aside(backend: LocalBackend, layer: str) -> Path | None:
    """Take a layer directory out of those whose journals gc reads, in one step. Inside `naming`."""
    gone = backend.path(f"{DIRECTORY}/{_GONE_PREFIX}{layer}.{secrets.token_hex(4)}")
    with os_errors(f"discard the layer {layer}"):
        try:
            backend.ops.rename(backend.path(f"{LAYERS}/{layer}"), gone)
        except FileNotFoundError:
            return None
    return Path(gone)


def _clear(gone: Path | None) -> None:
    """Delete what was set aside. What cannot be deleted stays for the next `sweep`."""
    if gone is None:
        return
    note = gone / "staged-in"
    elsewhere = Path(os.readlink(note)) if note.is_symlink() else None
    # Only what is called as a staging directory of this layer is, wherever the note leads, and files like those in it.
    if elsewhere is not None and elsewhere.name.endswith("-" + gone.name.removeprefix(_GONE_PREFIX).rpartition(".")[0]):
        with suppress(OSError):
            for staged in elsewhere.iterdir():
                if _STAGED.fullmatch(staged.name):
                    staged.unlink()
            elsewhere.rmdir()
    shutil.rmtree(gone, ignore_errors=True)


def discard_layer(backend: LocalBackend, layer: str) -> None:
    """Delete a layer directory that no name leads to. Whoever calls this has its lock."""
    with naming(backend):
        gone = _set_aside(backend, layer)
    _clear(gone)


def sweep(backend: LocalBackend) -> list[str]:
    """Clear away layer directories of overlays that have no name, and ephemeral overlays that nobody holds; returns
    the names of these. Raises CorruptError when a name cannot be read: then it is not known what is an orphan.
    """
    root = backend.root
    if not any(map(is_overlay_layer, layer_names(root))) and not os.path.isdir(backend.path(DIRECTORY)):
        return []
    ended: list[str] = []
    with naming(backend):
        gone = [Path(backend.path(f"{DIRECTORY}/{name}")) for name in _left_aside(backend)]
        named = {info.layer: info for info in overlay_infos(root)}
        for layer in layer_names(root):
            owner = named.get(layer)
            if not is_overlay_layer(layer) or (owner is not None and not owner.ephemeral):
                continue
            lock = _free(root, layer)
            if lock is None:
                continue
            # Whoever waits to open it gets the lock after this, and finds that the name is gone.
            try:
                gone += filter(None, [_set_aside(backend, layer) if owner is None else _remove(backend, owner.name)])
            finally:
                lock.release()
            if owner is not None:
                ended.append(owner.name)
    for path in gone:
        _clear(path)
    return ended


def _left_aside(backend: LocalBackend) -> list[str]:
    return [name for name in os.listdir(backend.path(DIRECTORY)) if name.startswith(_GONE_PREFIX)]


def _free(root: Path, layer: str) -> LayerLock | None:
    """The lock of a layer, unless somebody has it, or it is another user's."""
    try:
        return LayerLock.acquire(root / LAYERS / layer, {"pid": os.getpid()})
    except (BusyError, NotFoundError, PermissionDeniedError):
        return None
