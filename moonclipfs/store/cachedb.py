"""An SQLite file that is a cache: opened at first use, thrown away when damaged, in memory where unwritable."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from moonclipfs.errors import BackendError, BusyError

T = TypeVar("T")
log = logging.getLogger(__name__)

OWNER = "CREATE TABLE owner (tag TEXT NOT NULL)"
"""The table that every cache has beside those of its schema."""
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.01
_ATTEMPTS = 3
_UNWRITABLE = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
)
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


class CacheDatabase:
    """One connection, used by one thread at a time. Several processes of one host may share the file."""

    def __init__(
        self, path: Path | None, schema: str, version: int, tag: str, fill: Callable[[sqlite3.Connection], None]
    ) -> None:
        """`schema` makes tables that do not exist yet; `tag` says whose cache it is: one of another tag or version is
        thrown away. `fill` is called after each opening. `path` None keeps it in memory.
        """
        self.path = path
        self._schema = schema
        self._version = version
        self._tag = tag
        self._fill = fill
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self.failure = ""
        """Why it was last thrown away: other than by `discard`; empty if it was not."""

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` does with the connection; it is called again after the cache was made anew.

        Raises BusyError when another process holds the file for a minute, BackendError when nothing helps.
        """
        with self._lock:
            for _ in range(_ATTEMPTS):
                try:
                    return work(self._open())
                except sqlite3.ProgrammingError:
                    raise
                except (sqlite3.Error, UnicodeDecodeError) as error:  # a damaged schema may be quoted in a message
                    self._recover(error)
                    failure = error
            raise BackendError(f"the index {self.path or 'in memory'} fails again and again: {failure}")

    def discard(self) -> None:
        """Throw the cache away; the next `run` makes it anew."""
        with self._lock:
            self.close()
            if self.path is not None:
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; the next `run` opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            try:
                self._connection = self._connect()
                if self._identity() != (self._version, self._tag):
                    self.failure = "it was of another store or another version"
                    self.discard()
                    self._connection = self._connect()
                self._fill(self._connection)
            except BaseException:
                self.close()
                raise
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        name = ":memory:" if self.path is None else os.fspath(self.path)
        connection = sqlite3.connect(name, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            # The log of WAL lets readers go on beside a writer. NORMAL: a power cut may lose the last changes of the
            # cache, which are made again, and does not damage it.
            _set_wal(connection)
            connection.executescript(
                "PRAGMA synchronous = NORMAL; PRAGMA cell_size_check = ON;"
                "PRAGMA cache_size = -32768; PRAGMA temp_store = MEMORY;"
            )
            with transaction(connection):
                if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,):
                    self._create(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _create(self, connection: sqlite3.Connection) -> None:
        for statement in (*self._schema.split(";"), OWNER):
            connection.execute(statement)
        connection.execute("INSERT INTO owner VALUES (?)", (self._tag,))
        connection.execute(f"PRAGMA user_version = {self._version}")

    def _identity(self) -> tuple[int, str] | None:
        assert self._connection is not None
        with closing(self._connection.execute("SELECT user_version, tag FROM pragma_user_version, owner")) as rows:
            found = rows.fetchone()
        return None if found is None else (found[0], found[1])

    def _recover(self, error: Exception) -> None:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in _BUSY:
            raise BusyError(f"another process holds the index {self.path}: {error}") from error
        # A file that calls itself read-only, and is not, is damaged.
        writable = code == sqlite3.SQLITE_READONLY and self.path is not None and os.access(self.path, os.W_OK)
        if code in _UNWRITABLE and not writable:
            log.info("the index %s cannot be written (%s): it goes on in memory", self.path, error)
            self.close()
            self.path = None
            return
        log.info("the index %s is damaged (%s): it is made anew from the packs", self.path, error)
        self.failure = str(error)
        try:
            self.discard()
        except OSError as failure:
            log.info("the index %s cannot be removed (%s): it goes on in memory", self.path, failure)
            self.path = None


def _set_wal(connection: sqlite3.Connection) -> None:
    """Where another process opens a new file at the same moment, this fails at once, whatever the timeout is."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _BUSY or time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that holds the right to write from its start; undone when the block raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A failed COMMIT, or an error that ended the transaction, leaves nothing to undo.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
