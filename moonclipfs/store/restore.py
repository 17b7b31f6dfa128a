"""Attributes of entries given to files of the host."""

from __future__ import annotations

import os
import stat

from moonclipfs.types import Entry, EntryType

_SET_ID = stat.S_ISUID | stat.S_ISGID
_XATTR_NAMESPACE = b"user."


def restore_attributes(path: bytes, entry: Entry, name: bytes) -> list[str]:
    """Give `path` the owner (as root), mode, extended attributes and times of an entry.

    Returns what this host would not take, in words; `name` is what `path` is going to be called.

    A set-user-id or set-group-id bit comes back only together with its owner. Raises OSError where the mode or the
    times cannot be set.
    """
    attributes, notes = entry.attributes, []
    if os.geteuid() == 0:
        try:
            os.chown(path, attributes.uid, attributes.gid, follow_symlinks=False)
        except OSError as error:  # root of a container has not every owner, and is not root on every file system
            notes.append(f"{os.fsdecode(name)}: owner {attributes.uid}:{attributes.gid}: {error.strerror}")
    if entry.type is not EntryType.SYMLINK:
        status = os.lstat(path)
        owned = (status.st_uid, status.st_gid) == (attributes.uid, attributes.gid)
        for xattr, value in attributes.xattrs.items():
            if not xattr.startswith(_XATTR_NAMESPACE):
                continue
            try:
                os.setxattr(path, xattr, value, follow_symlinks=False)
            except OSError as error:
                notes.append(f"{os.fsdecode(name)}: extended attribute {os.fsdecode(xattr)}: {error.strerror}")
        os.chmod(path, attributes.mode if owned else attributes.mode & ~_SET_ID)
    os.utime(path, ns=(attributes.mtime_ns, attributes.mtime_ns), follow_symlinks=False)
    return notes
