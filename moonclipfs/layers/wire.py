"""Messages between a mount and its encoder process: a length of 4 bytes and a msgpack map each, over a socket."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

import msgpack

from moonclipfs import errors, limits
from moonclipfs.errors import LimitError, MoonclipError

_LENGTH = struct.Struct("<I")


class Channel:
    """One end of the connection. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises LimitError for one that is too long, OSError when the other end is gone."""
        data = msgpack.packb(message, use_bin_type=True)
        if len(data) > limits.WIRE_BYTES:
            raise LimitError(f"a message of {len(data)} bytes to or from the encoder: at most {limits.WIRE_BYTES}")
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)))
            self._socket.sendall(data)

    def offer(self, message: Mapping[str, Any]) -> bool:
        """Send a short message if that waits for nothing; else it is not sent. Raises OSError as `send` does."""
        data = msgpack.packb(message, use_bin_type=True)
        data = _LENGTH.pack(len(data)) + data
        if not self._lock.acquire(blocking=False):
            return False
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
            if sent < len(data):  # hardly ever, of something so short
                self._socket.sendall(data[sent:])
        except BlockingIOError:
            return False
        finally:
            self._lock.release()
        return True

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other end is gone. Waits."""
        head = self._exactly(_LENGTH.size)
        data = None if head is None else self._exactly(_LENGTH.unpack(head)[0])
        if data is None:
            return None
        message: dict[str, Any] = msgpack.unpackb(data, raw=False, use_list=False, strict_map_key=False)
        return message

    def shut(self) -> None:
        """End the connection for both; a `receive` that waits returns None. Harmless when repeated."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was faster

    def close(self) -> None:
        """Close the socket, when nobody uses it any more."""
        self._socket.close()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def _exactly(self, length: int) -> bytearray | None:
        data = bytearray(length)
        view, at = memoryview(data), 0
        while at < length:
            try:
                count = self._socket.recv_into(view[at:])
            except OSError:
                return None
            if not count:
                return None
            at += count
        return data


def error_fields(error: Exception) -> dict[str, str]:
    """What is sent of an error."""
    if isinstance(error, MoonclipError):
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "MoonclipError", "message": f"an unexpected error: {error!r}"}


def error_of(fields: Mapping[str, Any]) -> MoonclipError:
    """The error that `error_fields` described."""
    kind = getattr(errors, str(fields["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, MoonclipError)):
        kind = MoonclipError
    return kind(fields["message"])
