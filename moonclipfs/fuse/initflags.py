"""Abilities of the kernel that libfuse does not ask for: a small extension adds them to the greeting of a mount.

`load` must run before pyfuse3 is imported, since the extension stands before a function of libfuse. Without it (it
was not built, libfuse is older than 3.14, pyfuse3 came first) a mount works all the same, and `granted` says 0.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

PARALLEL_DIROPS = 1 << 18
"""Lookups and listings in one directory go on side by side."""
CACHE_SYMLINKS = 1 << 23
HANDLE_KILLPRIV_V2 = 1 << 28
"""The server clears setuid and setgid where a write, truncate or chown has to: the kernel asks for no attribute."""
DIRECT_IO_ALLOW_MMAP = 1 << 36
"""A file that is open past the page cache can be mapped all the same."""

_WANTED = PARALLEL_DIROPS | CACHE_SYMLINKS | HANDLE_KILLPRIV_V2 | DIRECT_IO_ALLOW_MMAP
_SWITCH = "MOONCLIPFS_INIT_FLAGS"
"""Environment variable; 0 mounts without the extension."""

_extension: ModuleType | None = None


def load() -> None:
    """Load the extension for all libraries, unless it is absent, switched off, or pyfuse3 was there first."""
    global _extension
    if _extension is not None or "pyfuse3" in sys.modules or os.environ.get(_SWITCH) == "0":
        return
    before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        _extension = importlib.import_module("moonclipfs._fuseinit")
    except ImportError:
        return
    finally:
        sys.setdlopenflags(before)


def arm(*, writable: bool) -> None:
    """Ask for the flags at the next mount. One that cannot be written to has no privileges to clear."""
    if _extension is not None:
        _extension.arm(_WANTED if writable else _WANTED & ~HANDLE_KILLPRIV_V2)


def active() -> bool:
    """True when the mount was greeted through the extension."""
    return _extension is not None and bool(_extension.active())


def granted() -> int:
    """The flags that hold for the mount; 0 when that is not known."""
    return int(_extension.granted()) if _extension is not None else 0
