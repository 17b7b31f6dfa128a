"""Every error of the project: what a person reads, the exit code, the errno a mount answers, whether a retry helps.

The first line of a class's docstring says what happened; an instance's text says where, and what to do.
Exit codes differ by kind; 2 stays with wrong usage of the command line.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class MoonclipError(Exception):
    """Something went wrong in moonclipfs."""

    exit_code = 1
    errno = errno.EIO
    retry = False


class UsageError(MoonclipError):
    """The request itself makes no sense."""

    exit_code = 2
    errno = errno.EINVAL


class NotFoundError(MoonclipError):
    """A store, snapshot, version, path or tensor does not exist."""

    exit_code = 3
    errno = errno.ENOENT


class StaleError(NotFoundError):
    """What was found before is something else by now: whoever looks again finds that."""

    errno = errno.ESTALE


class ExistsError(MoonclipError):
    """A name that must be new is taken."""

    exit_code = 4
    errno = errno.EEXIST


class CorruptError(MoonclipError):
    """Stored bytes do not pass their checksum, or contradict themselves."""

    exit_code = 5
    errno = errno.EIO


class NoSpaceError(MoonclipError):
    """The disk, or a quota on it, is full."""

    exit_code = 6
    errno = errno.ENOSPC
    retry = True


class PermissionDeniedError(MoonclipError):
    """The operating system refuses access."""

    exit_code = 7
    errno = errno.EACCES


class ReadOnlyError(PermissionDeniedError):
    """A write to something that is open for reading only."""

    errno = errno.EROFS


class BusyError(MoonclipError):
    """Another process holds what is needed."""

    exit_code = 8
    errno = errno.EBUSY
    retry = True


class FormatVersionError(MoonclipError):
    """The store was written by a newer version, or is not a store."""

    exit_code = 9


class FuseUnavailableError(MoonclipError):
    """This machine or container cannot mount a FUSE file system."""

    exit_code = 10
    errno = errno.ENODEV


class BackendError(MoonclipError):
    """Reading or writing the store's directory failed."""

    exit_code = 11
    retry = True


class LimitError(MoonclipError):
    """A number exceeds a named limit of `limits.py`."""

    exit_code = 12
    errno = errno.EFBIG


class NotEmptyError(MoonclipError):
    """A directory that must be empty is not."""

    errno = errno.ENOTEMPTY


class NoDirectoryError(MoonclipError):
    """A directory is needed, and something else is there."""

    errno = errno.ENOTDIR


class DirectoryError(MoonclipError):
    """A directory is there, and something else is needed."""

    errno = errno.EISDIR


class NameTooLongError(LimitError):
    """A name is longer than a directory can hold."""

    errno = errno.ENAMETOOLONG


class TooManyLinksError(LimitError):
    """A file or directory has as many links as it can have."""

    errno = errno.EMLINK


class TooManyOpenError(LimitError):
    """A mount has as many files open, or as many names in use, as it can have."""

    errno = errno.ENFILE


class NotPermittedError(PermissionDeniedError):
    """The operation is not allowed on this kind of thing, whoever asks."""

    errno = errno.EPERM


class CrossTreeError(UsageError):
    """A rename or link would lead from one tree of a mount into another."""

    errno = errno.EXDEV


class QuotaError(NoSpaceError):
    """A quota of moonclipfs is used up."""

    errno = errno.EDQUOT


class StagingFullError(MoonclipError):
    """The staging area is at its limit: whoever writes has to wait until some of it is encoded."""

    exit_code = 8
    errno = errno.EAGAIN
    retry = True


class LeaseLostError(MoonclipError):
    """This process was taken for dead, so what it prepared must not be published."""

    exit_code = 13


class MissingObjectError(CorruptError):
    """An object that something refers to is in no pack."""


class StagingLostError(CorruptError):
    """Staged bytes that were not encoded yet are gone."""


class DeltaCycleError(CorruptError):
    """The bases of an object lead back to itself, or further than the depth limit."""


class MountError(MoonclipError):
    """A mount could not be made, or did not answer."""

    exit_code = 14


class RanksError(MoonclipError):
    """A save of several ranks is not whole: one of them did not bring its part."""

    exit_code = 15
    retry = True


class ParseError(Exception):
    """A file is not of the format it looked like. Never leaves `formats`: the file is stored as opaque bytes."""


class TruncatedError(ParseError):
    """Bytes that the file itself announces are missing."""


@contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """Raise what users of files expect: FileNotFoundError, PermissionError, OSError with the errno of the kind."""
    try:
        yield
    except MoonclipError as error:
        raise OSError(error.errno, str(error), path) from error
