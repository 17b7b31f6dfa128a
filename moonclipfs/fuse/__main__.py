"""The process behind a mount in the background; `mount.mount` starts it and waits for its report."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def main() -> None:
    """Leave the starting process, serve the mount that the JSON in the first argument names, report through a pipe.

    With a `lifeline_fd` it stays a child of that process, makes the mount in a namespace of its own, and ends it when
    the other end of that pipe is closed: signals that everybody gets are blocked then.
    """
    request = json.loads(sys.argv[1])
    lifeline_fd = request.get("lifeline_fd")
    # Before anything is imported that starts threads.
    if lifeline_fd is None and os.fork():
        os._exit(0)
    os.setsid()
    report_fd = request["report_fd"]
    os.set_inheritable(report_fd, False)
    _find_package()
    said: dict[str, object] = {"ready": os.getpid()}
    if lifeline_fd is not None:
        said["isolation"] = _follow(lifeline_fd, request["isolation"])

    from moonclipfs.errors import MoonclipError
    from moonclipfs.fuse import initflags
    from moonclipfs.fuse.prepare import MountOptions

    initflags.load()
    from moonclipfs.fuse.server import serve, set_up_log

    def report(message: Mapping[str, Any]) -> None:
        os.write(report_fd, json.dumps(message).encode())

    def ready() -> None:
        report(said)
        os.close(report_fd)  # who waits goes on now; after an error, only when this process has ended
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # whoever started this has read what was said until here

    options = MountOptions(**request["options"])
    try:
        set_up_log(options.log, request["place"], background=True)
        os.chdir("/")
        code = serve(request["store"], request["place"], options, ready)
        if request.get("temporary") and os.getppid() != request["parent"]:
            with contextlib.suppress(OSError):  # it is not empty, or no directory of ours any more
                os.rmdir(request["place"])
        sys.exit(code)
    except MoonclipError as error:
        report({"error": type(error).__name__, "message": str(error)})
        sys.exit(error.exit_code)
    except Exception:
        logging.getLogger(__name__).exception("the server ended by an unexpected error")
        raise


def _follow(lifeline_fd: int, wanted: str | None) -> str:
    """Isolate this process, and let it get SIGTERM at the end of the lifeline; return the kind of isolation."""
    from moonclipfs.fuse.namespace import Isolation, isolate

    os.set_inheritable(lifeline_fd, False)
    isolation = isolate(None if wanted is None else Isolation(wanted))

    def follow() -> None:
        os.read(lifeline_fd, 1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="lifeline", daemon=True).start()
    return isolation.value


def _find_package() -> None:
    """Let `moonclipfs` be the package that this file is in, wherever the starting process found it.

    The directory that holds it is searched for this one import only: it may hold modules by other names too.
    """
    sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
    importlib.import_module("moonclipfs")
    del sys.path[0]


if __name__ == "__main__":
    main()
