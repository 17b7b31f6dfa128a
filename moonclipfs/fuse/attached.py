"""A mount for the lifetime of one process: in a mount namespace of its own, gone when that process ends or says so."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moonclipfs import errors
from moonclipfs.errors import MountError
from moonclipfs.fuse.control import MOUNT_VARIABLE, RUN_VARIABLE, SOCKET, ask_at, runtime_directory
from moonclipfs.fuse.mounts import mount_at
from moonclipfs.fuse.namespace import Isolation, enter_arguments
from moonclipfs.fuse.prepare import MountOptions, detach, prepare

SIGNALS = frozenset(
    {
        signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    }
)  # fmt: skip
"""What a scheduler or a terminal may send to every process: the server lives until it is told otherwise."""
_SERVER = Path(__file__).with_name("__main__.py")
_STEP_SECONDS = 0.1
_LOG_TAIL_BYTES = 1 << 16


class AttachedMount:
    """A store mounted for this process and what it starts. `stop` ends it, and so does the end of this process."""

    def __init__(
        self,
        store: str,
        mountpoint: str,
        options: MountOptions,
        *,
        isolation: Isolation | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        temporary: bool = False,
    ) -> None:
        """Mount; `cancelled` may ask to give up. `SIGNALS` are to be blocked here until `stop`. With `temporary`, the
        directory was made for this: the server removes it if this process is killed, which else does so itself.

        Raises what `mount` raises, InterruptedError when cancelled: nothing is mounted then, and no process left.
        """
        self.place = prepare(store, mountpoint, options)
        self.run_directory = tempfile.mkdtemp(prefix="run-", dir=runtime_directory())
        self.environment = {**os.environ, MOUNT_VARIABLE: self.place, RUN_VARIABLE: self.run_directory}
        self.log = options.log or os.path.join(self.run_directory, "log")
        try:
            self._start(store, options, isolation, cancelled, temporary)
        except BaseException:
            shutil.rmtree(self.run_directory, ignore_errors=True)
            raise

    def _start(
        self,
        store: str,
        options: MountOptions,
        isolation: Isolation | None,
        cancelled: Callable[[], bool],
        temporary: bool,
    ) -> None:
        reading, writing = os.pipe()
        lifeline, self._lifeline = os.pipe()
        request = {
            "store": store,
            "place": self.place,
            "options": asdict(options),
            "report_fd": writing,
            "lifeline_fd": lifeline,
            "isolation": None if isolation is None else isolation.value,
            "parent": os.getpid(),
            "temporary": temporary,
        }
        with open(reading, "rb") as reports, tempfile.TemporaryFile() as said:
            try:
                self.server = subprocess.Popen(
                    [sys.executable, "-P", _SERVER, json.dumps(request)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    env=self.environment,
                    pass_fds=(writing, lifeline),
                )
            finally:
                os.close(writing)
                os.close(lifeline)
            while not select.select([reports], [], [], _STEP_SECONDS)[0]:
                if cancelled():
                    self._end_lifeline()
                    self.server.wait()
                    raise InterruptedError
            report = reports.read()
            said.seek(0)
            last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
        answer = json.loads(report or b"{}")
        if "ready" not in answer:
            self._end_lifeline()
            self.server.wait()
            kind = getattr(errors, answer.get("error", ""), MountError)
            raise kind(answer.get("message") or f"the server of {self.place} ended early: {last or 'it said nothing'}")
        self.isolation = Isolation(answer["isolation"])

    def command_line(self, command: list[str], mask: Collection[int]) -> list[str]:
        """The command line that runs `command` where the mount is, with the signals of `mask` blocked."""
        return enter_arguments(self.server.pid, self.isolation, mask, command)

    def ask(self, operation: str, /, **arguments: Any) -> dict[str, Any]:
        """Ask the server, for as long as it takes. Raises what it answers, NotFoundError when it has ended."""
        return ask_at(Path(self.run_directory, SOCKET), self.place, operation, **arguments)

    def stop(self) -> None:
        """Tell the server to store what is there, to unmount and to end; its end is for the caller to wait for."""
        self._end_lifeline()

    def finish(self) -> str:
        """Wait for the server's end, clear what it left, and return what went wrong, empty for nothing."""
        self._end_lifeline()
        code = self.server.wait()
        if self.isolation is Isolation.NONE and (mount := mount_at(self.place)) is not None and mount.is_ours:
            detach(self.place, lazy=True)
        if code == 0:
            shutil.rmtree(self.run_directory, ignore_errors=True)
            return ""
        said = _last_error(self.log)
        ended = f"its server ended with code {code}" if code > 0 else f"its server was killed by signal {-code}"
        return f"{said or ended}; see {self.log}"

    def _end_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def _last_error(path: str) -> str:
    """What the last line of a log that tells of an error says, empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = next((line for line in reversed(lines) if " ERROR " in line), "")
    return found.partition(" ERROR ")[2].partition(": ")[2]
