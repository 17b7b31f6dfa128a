"""The encoder process as the mount sees it: started when it is needed, asked, and noticed when it dies."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from moonclipfs.errors import BackendError
from moonclipfs.layers.wire import Channel, error_of

log = logging.getLogger(__name__)

_MAIN = Path(__file__).with_name("worker_main.py")
_START_SECONDS = 60.0
_END_SECONDS = 10.0


class WorkerDiedError(BackendError):
    """The encoder process ended before it answered."""


class WorkerProcess:
    """One encoder process. Thread-safe."""

    def __init__(self, store_path: str | os.PathLike[str], purpose: str, *, reclaims: bool = False) -> None:
        """Start it, and wait until it has opened the store: one that `reclaims` first may use the store's reserve on a
        full disk. Raises what opening raises, WorkerDiedError.
        """
        ours, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        request = {
            "fd": theirs.fileno(),
            "store": os.path.abspath(store_path),
            "purpose": purpose,
            "reclaims": reclaims,
            "level": logging.getLogger("moonclipfs").getEffectiveLevel(),
        }
        with theirs:
            self._process = subprocess.Popen(
                # -P: the current directory may be anybody's, and must not be searched for modules.
                [sys.executable, "-P", os.fspath(_MAIN), json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                start_new_session=True,  # a Ctrl-C is for the mount, which ends this in its turn
            )
        self.pid = self._process.pid
        self._channel = Channel(ours)
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, Future[dict[str, Any]]] = {0: Future()}
        self.death: WorkerDiedError | None = None
        """How it ended, once it is known that it has."""
        ready = self._open[0]
        self._reader = threading.Thread(target=self._read, name="moonclipfs encoder answers", daemon=True)
        self._reader.start()
        try:
            ready.result(_START_SECONDS)
        except BaseException:
            self.stop()
            raise
        finally:
            del ready  # see `ask`

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises the error that it answers, WorkerDiedError, LimitError."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self.death is not None:
                raise WorkerDiedError(str(self.death))
            number, self._next = self._next, self._next + 1
            self._open[number] = answer
        try:
            self._send({"op": op, "id": number, **fields})
        except BaseException:
            with self._lock:
                self._open.pop(number, None)
            raise
        try:
            return answer.result()
        finally:
            # Its error holds this frame, and so all that the callers hold: staged files would keep their space until
            # cycles are looked for, which is seldom.
            del answer

    def tell(self, op: str, **fields: Any) -> None:
        """Send what is not answered, and may be lost: when it would have to wait, and to a dead process. Waits for
        nothing.
        """
        with suppress(OSError):  # the reader notices, and ends whoever waits
            self._channel.offer({"op": op, **fields})

    def _send(self, request: Mapping[str, Any]) -> None:
        with suppress(OSError):  # as above
            self._channel.send(request)

    def stop(self) -> None:
        """End it, in order if it can, and wait until it is gone. What is under way raises WorkerDiedError."""
        self._channel.shut()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._channel.close()
        self._said.close()

    def _read(self) -> None:
        while (message := self._channel.receive()) is not None:
            if "log" in message:
                level, name, text = message["log"]
                logging.getLogger(name).log(level, "%s", text)
                continue
            with self._lock:
                answer = self._open.pop(message["id"], None)
            if answer is None:
                continue
            if "error" in message:
                answer.set_exception(error_of(message))
            else:
                answer.set_result(message)
            del answer  # see `ask`
        self._channel.shut()
        self._end()

    def _end(self) -> None:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        with self._lock:
            self.death = WorkerDiedError(f"the encoder process {_how(code)}{self._last_words()}")
            waiting, self._open = list(self._open.values()), {}
        for answer in waiting:
            answer.set_exception(WorkerDiedError(str(self.death)))  # of each its own: one that is kept keeps frames

    def _last_words(self) -> str:
        size = os.fstat(self._said.fileno()).st_size
        said = os.pread(self._said.fileno(), 4096, max(0, size - 4096)).decode(errors="replace").strip()
        return f": {said.splitlines()[-1]}" if said else ""


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
