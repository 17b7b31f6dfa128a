"""A hub on this machine: one repository, as huggingface_hub asks for it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

REPOSITORY = "someone/tiny"
_BLOCK = 1 << 16


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, commit: str, *arguments: object) -> None:
        self.root, self.commit = root, commit
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        body, name = b"", path.rpartition("/")[2]
        if path.startswith(f"/{REPOSITORY}/resolve/") and (self.root / name).exists():
            body = (self.root / name).read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", self.commit)
        elif path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            body = json.dumps({"id": REPOSITORY, "sha": self.commit, "siblings": self._files("rfilename")}).encode()
            self.send_response(200)
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            body = json.dumps(self._files("path")).encode()
            self.send_response(200)
        else:
            self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            for start in range(0, len(body), _BLOCK):  # slow enough for two downloads to meet
                self.wfile.write(body[start : start + _BLOCK])
                time.sleep(0.01)

    def _files(self, key: str) -> list[dict[str, object]]:
        found = []
        for path in sorted(self.root.iterdir()):
            digest = hashlib.sha1(path.read_bytes()).hexdigest()
            found.append({"type": "file", key: path.name, "size": path.stat().st_size, "oid": digest})
        return found

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def hub(root: Path, commit: str) -> Iterator[str]:
    """Serve the files of a directory as a commit of REPOSITORY; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, root, commit))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
