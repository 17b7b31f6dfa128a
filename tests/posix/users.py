"""Processes of other users that make system calls for a test."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

UMASK = 0o022


class User(NamedTuple):
    """Who makes a call."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


STAFF = 4321
"""A group."""
ROOT = User("root", 0, 0)
OWNER = User("owner", 1234, 1234)
MEMBER = User("member", 1235, 1235, (STAFF,))
OTHER = User("other", 1236, 1236)
USERS = (ROOT, OWNER, MEMBER, OTHER)


def outcome(call: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """What a call returns, or the name of its errno."""
    try:
        return "ok", call(*arguments)
    except OSError as error:
        return "error", errno.errorcode.get(error.errno or 0, error.errno)


class Worker:
    """A process of a user. It changes to a directory and makes calls there, one after the other."""

    def __init__(self, user: User) -> None:
        self.user = user
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(user, theirs, self._pipe), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, directory: str | os.PathLike[str], call: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
        """The outcome of `call(*arguments)` in a directory; the function has to be one of a module."""
        self._pipe.send((os.fspath(directory), call, arguments))
        answer: tuple[str, Any] = self._pipe.recv()
        return answer

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join(20)
        self._pipe.close()
        self._process.close()


def _serve(user: User, pipe: Connection, parents: Connection) -> None:
    parents.close()
    become(user)
    while (request := pipe.recv()) is not None:
        directory, call, arguments = request
        os.chdir(directory)
        answer = outcome(call, *arguments)
        os.chdir("/")
        pipe.send(answer)


def become(user: User) -> None:
    """Be a user from here on."""
    os.umask(UMASK)
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)


def run_as(user: User, call: Callable[..., Any], arguments: Sequence[Any] = (), directory: str = "/") -> Any:
    """Make one call as a user; raises AssertionError with the errno when it fails."""
    worker = Worker(user)
    try:
        what, value = worker.call(directory, call, *arguments)
    finally:
        worker.close()
    assert what == "ok", value
    return value
