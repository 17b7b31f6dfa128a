"""The program of the encoder process; `workerprocess.WorkerProcess` starts it."""

from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import sys
from pathlib import Path


def main() -> None:
    """Serve the mount at the other end of the socket that the JSON in the first argument names, until it hangs up."""
    request = json.loads(sys.argv[1])
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy starts threads for each core, of which nothing here has any use
    _find_package()

    from moonclipfs import limits
    from moonclipfs.errors import MoonclipError, NoSpaceError
    from moonclipfs.layers import priority
    from moonclipfs.layers.wire import Channel, error_fields
    from moonclipfs.layers.worker import Worker
    from moonclipfs.store import reserve
    from moonclipfs.store.store import Store

    channel = Channel(socket.socket(fileno=request["fd"]))

    class Forward(logging.Handler):
        """Lets the mount log what is said here."""

        def emit(self, record: logging.LogRecord) -> None:
            try:
                channel.send({"log": [record.levelno, record.name, self.format(record)]})
            except OSError:
                pass  # the mount is gone

    logger = logging.getLogger("moonclipfs")
    logger.addHandler(Forward(request["level"]))
    logger.setLevel(request["level"])

    def open_store() -> Store:
        return Store.open(
            request["store"], write=True, purpose=request["purpose"], cache_bytes=limits.ENCODE_CACHE_BYTES
        )

    try:
        try:
            store = open_store()
        except NoSpaceError:
            if not request["reclaims"]:
                raise
            # A lease needs space. Whoever reclaims takes the reserve again.
            reserve.release(Path(request["store"]))
            store = open_store()
    except MoonclipError as error:
        channel.send({"id": 0, **error_fields(error)})
        sys.exit(error.exit_code)
    priority.set_group(polite=True)
    channel.send({"id": 0, "ready": os.getpid()})
    if not Worker(store, channel).run():
        os._exit(1)  # a dead owner's uploads are cleared by gc
    store.close()


def _find_package() -> None:
    """Let `moonclipfs` be the package that this file is in, wherever the starting process found it."""
    sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
    importlib.import_module("moonclipfs")
    del sys.path[0]


if __name__ == "__main__":
    main()
