"""Following a path through symbolic links, as the kernel does at a mount, for those who read without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from moonclipfs import limits
from moonclipfs.errors import NotFoundError

T = TypeVar("T")


def follow(
    top: T, path: bytes, lookup: Callable[[T, bytes], T], link: Callable[[T], bytes | None], *, last: bool = True
) -> T:
    """The node at `path` below `top`; `link` gives the text of a symbolic link and None for any other node.

    A link at the end of the path is followed too if `last`. Raises NotFoundError, also for links that lead above `top`,
    to an absolute path, or through more than `limits.SYMLINKS` others.
    """
    way, rest, followed = [top], _parts(path), 0
    while rest:
        name = rest.pop(0)
        if name == b"..":
            if len(way) == 1:
                raise NotFoundError(f"{os.fsdecode(path)} leads out of what is stored")
            way.pop()
            continue
        node = lookup(way[-1], name)
        text = link(node)
        if text is None or not (rest or last):
            way.append(node)
            continue
        followed += 1
        if text.startswith(b"/") or followed > limits.SYMLINKS:
            where = "in a circle" if followed > limits.SYMLINKS else "out of what is stored"
            raise NotFoundError(
                f"{os.fsdecode(path)}: its link {os.fsdecode(name)} -> {os.fsdecode(text)} leads {where}"
            )
        rest = _parts(text) + rest
    return way[-1]


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]
