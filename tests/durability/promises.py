"""What programs were promised, and whether a mount keeps it."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from moonclipfs.store.store import Store
from moonclipfs.types import Version
from tests.durability.load import PAGE, bytes_of
from tests.layers.sealkit import stored

Found: TypeAlias = "bytes | str | None"
"""The bytes of a file or of a page, the text of a link, or nothing."""
Value: TypeAlias = "list[Any] | str | bytes | None"
"""As `load.py` tells them; bytes were found by an earlier look."""


class Promises:
    """What each path may be. `read` takes what programs told since the last time, `broken` looks at a mount."""

    def __init__(self) -> None:
        self.allowed: dict[str, list[Value]] = defaultdict(lambda: [None])
        self.written: dict[str, list[Value]] = defaultdict(list)
        """All that was ever written to a path; to a name, where directories move."""
        self.sealed: dict[str, list[str]] = {}
        self.told = 0
        self._versions: set[tuple[str, int]] = set()

    def read(self, log: Path) -> None:
        """Take up a log, and remove it."""
        for line in log.read_text().splitlines():
            self.told += 1
            about = json.loads(line)
            path = about["path"]
            if "sealed" in about:
                self.sealed[path] = about["sealed"]
            elif "may" in about:
                self.allowed[path].append(about["may"])
                self.written[_key(path)].append(about["may"])
            else:
                self.allowed[path] = [about["is"]]
        log.unlink()

    def broken(self, root: Path) -> list[str]:
        """What is not as it was promised. From here on, all is what was found."""
        problems: list[str] = []
        there = dict(everything(root))
        unknown = set(there) - {path.partition("#")[0] for path in self.allowed}
        problems += [f"{path}: nobody made it" for path in sorted(unknown)]
        for path, allowed in list(self.allowed.items()):
            name, _, number = path.partition("#")
            found = there.get(name)
            if number and isinstance(found, bytes):
                found = found[int(number) * PAGE : (int(number) + 1) * PAGE]
                found = found or None
            if not any(_is(path, found, value) for value in allowed) and not _is_whole_of_pages(allowed):
                problems.append(f"{path}: {_short(found)} and may be {[_short(one) for one in allowed]}")
            if found is None and allowed == [None]:
                del self.allowed[path]
            else:
                self.allowed[path] = [found]
        moving = {path.split("/")[1] for path in there if path.startswith(("moving/here/", "moving/there/"))}
        if len(moving) > 1:
            problems.append("moving: the directory is at both places")
        return problems

    def broken_versions(self, store: Store) -> list[str]:
        """What is wrong with versions, after all that was captured is published. Each version is looked at once."""
        problems: list[str] = []
        names = store.names()
        for version in names.all_versions():
            if (version.path, version.number) not in self._versions:
                self._versions.add((version.path, version.number))
                problems += self._strange(store, version)
        for path, files in self.sealed.items():
            versions = names.versions(path)
            if path.startswith("checkpoints/") and not (versions and set(files) <= set(stored(store, versions[-1]))):
                problems.append(f"{path}: its seal was accepted, and it has not all of {files} in {versions}")
        self.sealed.clear()
        return problems

    def _strange(self, store: Store, version: Version) -> Iterator[str]:
        for path, data in stored(store, version).items():
            name = f"{version.path}/{path}"
            if not any(_is(name, data, value) for value in self.written[_key(name)]):
                yield f"version {version.number} of {name}: {_short(data)} was never written"


def everything(root: Path) -> Iterator[tuple[str, Found]]:
    """All files and links below a directory, and what is in them."""
    for directory, _, files in os.walk(root, onerror=_fail):
        for name in files:
            path = Path(directory, name)
            found = os.readlink(path) if path.is_symlink() else path.read_bytes()
            yield str(path.relative_to(root)), found
        for name in os.listdir(directory):
            path = Path(directory, name)
            if path.is_symlink() and path.is_dir():
                yield str(path.relative_to(root)), os.readlink(path)


def _fail(error: OSError) -> None:
    raise error


def _key(path: str) -> str:
    return path.rpartition("/")[2] if path.startswith("moving/") else path


def _is(path: str, found: Found, value: Value) -> bool:
    if found is None or value is None:
        return found is value or (found is None and isinstance(value, list) and len(value) > 2)
    if isinstance(value, str | bytes):
        return found == value
    expected = bytes_of(path, value[0], value[1])
    return isinstance(found, bytes) and (expected.startswith(found) if len(value) > 2 else expected == found)


def _is_whole_of_pages(allowed: list[Value]) -> bool:
    """True for a file of which pages are told one by one, while it is made."""
    return "pages" in allowed


def _short(found: Value) -> str:
    if isinstance(found, bytes):
        zeros = found.count(0)
        return f"{len(found)} bytes {found[:4].hex()}..{found[-4:].hex()}" + (f", {zeros} zeros" if zeros else "")
    return str(found)
