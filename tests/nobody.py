"""Running part of a test without the rights of root, so that permissions mean something."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


class Nobody:
    """A user without rights: the present one, or `nobody` when that is root."""

    def __init__(self) -> None:
        self._uid = os.geteuid() or _NOBODY

    @contextmanager
    def copy(self, source: Path) -> Iterator[Path]:
        """A copy of a tree that belongs to this user, where it can be reached."""
        root = Path(tempfile.mkdtemp())
        root.chmod(0o755)
        try:
            shutil.copytree(source, root / "copy", symlinks=True)
            for path in (root / "copy", *(root / "copy").rglob("*")):
                os.chown(path, self._uid, -1, follow_symlinks=False)
            yield root / "copy"
        finally:
            for directory, _, _ in os.walk(root, onerror=None):
                os.chmod(directory, 0o700)
            shutil.rmtree(root)

    def run(self, action: Callable[[], None]) -> None:
        """Run `action` as this user, in a process of its own; fail when it does."""
        child = os.fork()
        if child == 0:
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
                    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
                os.environ["XDG_CACHE_HOME"] = "/nonexistent"
                action()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0, "it failed in the other process: see what it printed"
