"""The process behind a mount in the background; `mount.mount` starts it and waits for its report."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def main() -> None:
    """Leave the starting process, serve the mount that the JSON in the first argument names, report through a pipe."""
    # Before anything is imported that starts threads.
    if os.fork():
        os._exit(0)
    os.setsid()
    request = json.loads(sys.argv[1])
    report_fd = request["report_fd"]
    os.set_inheritable(report_fd, False)
    _find_package()

    from moonclipfs.errors import MoonclipError
    from moonclipfs.fuse.prepare import MountOptions
    from moonclipfs.fuse.server import serve, set_up_log

    def report(message: Mapping[str, Any]) -> None:
        os.write(report_fd, json.dumps(message).encode())

    def ready() -> None:
        report({"ready": os.getpid()})
        os.close(report_fd)  # who waits goes on now; after an error, only when this process has ended
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # whoever started this has read what was said until here

    options = MountOptions(**request["options"])
    try:
        set_up_log(options.log, request["place"], background=True)
        os.chdir("/")
        serve(request["store"], request["place"], options, ready)
    except MoonclipError as error:
        report({"error": type(error).__name__, "message": str(error)})
        sys.exit(error.exit_code)
    except Exception:
        logging.getLogger(__name__).exception("the server ended by an unexpected error")
        raise


def _find_package() -> None:
    """Let `moonclipfs` be the package that this file is in, wherever the starting process found it.

    The directory that holds it is searched for this one import only: it may hold modules by other names too.
    """
    sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
    importlib.import_module("moonclipfs")
    del sys.path[0]


if __name__ == "__main__":
    main()
