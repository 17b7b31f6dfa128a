"""The control socket of a mount: one JSON object a line in, one out. Only its owner and root may talk to it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import trio

from moonclipfs import errors, limits
from moonclipfs.errors import MoonclipError, MountError, NotFoundError, PermissionDeniedError, UsageError

log = logging.getLogger(__name__)

Answer = Callable[[], Mapping[str, Any]]
"""Answers at once, on the event loop."""
Verb = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""May take long; called on a thread with the arguments of the request. Its MoonclipErrors reach whoever asked."""
_CONNECT_SECONDS = 5.0
_PEER = struct.Struct("3i")
MOUNT_VARIABLE = "MOONCLIPFS_MOUNT"
"""In the environment of a command that has a mount of its own: the mountpoint."""
RUN_VARIABLE = "MOONCLIPFS_RUN"
"""Beside it: the directory of that mount's socket and log."""


SOCKET = "sock"
"""The suffix, or name, of a socket; see `runtime_path`."""


def runtime_directory() -> Path:
    """Where this user's sockets and logs of mounts lie; made when absent. Raises PermissionDeniedError."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime, "moonclipfs") if runtime else Path(f"/tmp/moonclipfs-{os.geteuid()}")
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(directory)
    except OSError as error:
        raise PermissionDeniedError(f"cannot make {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionDeniedError(
            f"{directory} is not a directory of yours alone (mode 0700): remove it, or set XDG_RUNTIME_DIR"
        )
    return directory


def runtime_path(mountpoint: str, suffix: str) -> Path:
    """The socket ("sock") or log ("log") of the mount at a real path.

    The mount of a namespace keeps its own where its variables say, since others may have mounts at that path too.
    """
    own = os.environ.get(RUN_VARIABLE)
    if own and os.environ.get(MOUNT_VARIABLE) == mountpoint:
        return Path(own, suffix)
    name = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]
    return runtime_directory() / f"{name}.{suffix}"


class ControlServer:
    """Listens from here on, and answers while `serve` runs; a context manager that removes the socket."""

    def __init__(self, path: Path, operations: Mapping[str, Answer], verbs: Mapping[str, Verb] | None = None) -> None:
        """One of `operations` or `verbs` answers each "op". What is at `path`, of a server that is dead or detached,
        is replaced.
        """
        self.path = path
        self._operations = operations
        self._verbs = verbs or {}
        # Of each kind, so that who waits for a long one is in nobody else's way.
        self._threads = {name: trio.CapacityLimiter(limits.CONTROL_CLIENTS) for name in self._verbs}
        self._connected = 0
        self._silent: dict[trio.CancelScope, None] = {}
        """The clients that have nothing asked, longest silent first."""
        self._left = trio.Event()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        except OSError as error:
            self._socket.close()
            raise MountError(
                f"cannot listen at {path} ({error}): let XDG_RUNTIME_DIR be a short, writable path"
            ) from error
        finally:
            os.umask(before)
        self._status = os.lstat(path)
        self._socket.listen(limits.CONTROL_CONNECTIONS)

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a lazy unmount, a new server of the same place may have put its own socket there. Ours is open until
        # here, so that no other can have its inode number.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), self._status):
                self.path.unlink()
        self._socket.close()

    async def serve(self) -> None:
        """Answer until cancelled. Whatever goes wrong with a client ends the talk with that one only."""

        async def client(stream: trio.SocketStream) -> None:
            self._connected += 1
            try:
                async with stream:
                    if self._connected <= limits.CONTROL_CONNECTIONS or self._drop_silent():
                        await self._talk(stream)
            except Exception:
                log.exception("unexpected error at the control socket")
            finally:
                self._connected -= 1
                self._left.set()

        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._socket.dup()))
        await trio.serve_listeners(client, [listener])

    async def idle(self) -> None:
        """Return when nobody is connected."""
        while self._connected:
            self._left = trio.Event()
            await self._left.wait()

    def _drop_silent(self) -> bool:
        """Drop who was silent for the longest time; False when all wait for an answer."""
        scope = next(iter(self._silent), None)
        if scope is None:
            return False
        del self._silent[scope]
        scope.cancel()
        return True

    async def _receive(self, stream: trio.SocketStream) -> bytes:
        """What a client says next; nothing when it has left, or was silent for too long."""
        with trio.move_on_after(limits.CONTROL_IDLE_SECONDS) as scope:
            self._silent[scope] = None
            try:
                return bytes(await stream.receive_some())
            finally:
                self._silent.pop(scope, None)
        return b""

    async def _talk(self, stream: trio.SocketStream) -> None:
        credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(credentials)
        if uid not in (os.geteuid(), 0):
            return
        received = bytearray()
        with contextlib.suppress(trio.BrokenResourceError):
            while data := await self._receive(stream):
                received += data
                while (end := received.find(b"\n")) >= 0 and end < limits.CONTROL_LINE_BYTES:
                    line = bytes(received[:end])
                    del received[: end + 1]
                    await stream.send_all(json.dumps(await self._answer(line)).encode() + b"\n")
                if len(received) > limits.CONTROL_LINE_BYTES:
                    return

    async def _answer(self, line: bytes) -> Mapping[str, Any]:
        try:
            request = json.loads(line)
            name = request.pop("op")
            quick, slow = self._operations.get(name), self._verbs.get(name)
            if quick is None and slow is None:
                raise LookupError(name)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            names = sorted([*self._operations, *self._verbs])
            return _error(UsageError(f'a request is {{"op": NAME, ...}} on one line; the names are {names}'))
        try:
            if quick is not None:
                return quick()
            assert slow is not None
            return await trio.to_thread.run_sync(
                _do, slow, request, limiter=self._threads[name], abandon_on_cancel=True
            )
        except MoonclipError as error:
            return _error(error)
        except (KeyError, TypeError, ValueError) as error:
            log.exception("request %s at the control socket", name)
            return _error(UsageError(f"{name}: {error!r}"))


def _do(verb: Verb, request: Mapping[str, Any]) -> Mapping[str, Any]:
    # An error that trio brings from a thread holds its frames until garbage is looked for, and these hold staged files.
    try:
        return verb(request)
    except MoonclipError as error:
        return _error(error)


def _error(error: MoonclipError) -> Mapping[str, Any]:
    return {"error": type(error).__name__, "message": str(error)}


def ask(mountpoint: str, operation: str, timeout: float | None = 5.0, /, **arguments: Any) -> dict[str, Any]:
    """Ask the server of the mount at a real path, waiting `timeout` seconds, or as long as it takes with None.

    Raises what the server answers, NotFoundError when none listens, MountError for no answer.
    """
    with connect(mountpoint) as client:
        return ask_on(client, mountpoint, operation, timeout, **arguments)


def ask_at(socket_path: Path, mountpoint: str, operation: str, /, **arguments: Any) -> dict[str, Any]:
    """As `ask`, at a socket that only its maker knows of, for as long as it takes."""
    with _connect(socket_path, mountpoint) as client:
        return ask_on(client, mountpoint, operation, None, **arguments)


def ask_on(
    client: socket.socket, mountpoint: str, operation: str, timeout: float | None = 5.0, /, **arguments: Any
) -> dict[str, Any]:
    """As `ask`, over a connection that was made before."""
    client.settimeout(timeout)
    try:
        client.sendall(json.dumps({**arguments, "op": operation}).encode() + b"\n")
        with client.makefile("rb") as lines:
            answer = json.loads(lines.readline(limits.CONTROL_ANSWER_BYTES))
    except (OSError, ValueError) as error:
        raise MountError(f"the server of {mountpoint} does not answer: {error}") from error
    if not isinstance(answer, dict):
        raise MountError(f"the server of {mountpoint} answers {answer}")
    if "error" in answer:
        raise _error_named(answer)
    return answer


def _error_named(answer: Mapping[str, Any]) -> MoonclipError:
    kind = getattr(errors, str(answer["error"]), None)
    message = str(answer.get("message", answer))
    return kind(message) if isinstance(kind, type) and issubclass(kind, MoonclipError) else MountError(message)


def server_pid(mountpoint: str) -> int | None:
    """The process that serves a mount, by its number here, or None when none listens."""
    try:
        with connect(mountpoint) as client:
            return peer_pid(client)
    except (NotFoundError, PermissionDeniedError):
        return None


def peer_pid(client: socket.socket) -> int | None:
    """The process at the other end, by its number here."""
    pid, _, _ = _PEER.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(pid) or None


def connect(mountpoint: str) -> socket.socket:
    """A connection to the server of the mount at a real path. Raises NotFoundError, PermissionDeniedError."""
    return _connect(runtime_path(mountpoint, SOCKET), mountpoint)


def _connect(path: Path, mountpoint: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(_CONNECT_SECONDS)  # of a server that was killed and cannot end, nobody takes the call
    try:
        client.connect(str(path))
    except OSError as error:
        client.close()
        raise NotFoundError(
            f"nothing answers for the mount at {mountpoint}: its server was killed (mount again: nothing is lost), "
            f"or it is another user's ({path}: {error.strerror})"
        ) from error
    return client
