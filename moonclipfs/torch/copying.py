"""Memory copied while training waits, by a few threads that never wait for each other until the end.

Not by torch's own: each of its copies is done when all of its threads are, so on a busy machine a state of hundreds of
tensors waits hundreds of times for a thread that others keep from running.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor, Future, wait

_CHUNK_BYTES = 4 << 20
_libc = ctypes.CDLL(None)
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int
_memmove = _libc.memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p
# Both are called without the GIL.

_Chunk = tuple[str, int, int, int, bool]


def copy_all(jobs: Mapping[str, tuple[int, int, int, bool]], pool: Executor, threads: int) -> set[str]:
    """Copy memory: by key, to an address, from an address, so many bytes; whoever calls keeps both alive.

    Where the last says so, what is there is compared first, up to the first difference, and what is the same is not
    written. Returns the keys of what was the same as a whole.
    """
    chunks: deque[_Chunk] = deque()
    for key, (target, source, length, compare) in jobs.items():
        for at in range(0, length, _CHUNK_BYTES):
            chunks.append((key, target + at, source + at, min(_CHUNK_BYTES, length - at), compare))
    changed: set[str] = {key for key, job in jobs.items() if not job[3]}
    total = sum(chunk[3] for chunk in chunks)
    helpers: list[Future[None]] = []
    try:
        helpers.extend(pool.submit(_work, chunks, changed) for _ in range(min(threads - 1, total // _CHUNK_BYTES)))
        _work(chunks, changed)
    finally:
        # Interrupted, too: nobody may write to memory that the caller takes for free again.
        chunks.clear()
        running = [helper for helper in helpers if not helper.cancel()]
        wait(running)
    for helper in running:
        helper.result()
    return jobs.keys() - changed


def _work(chunks: deque[_Chunk], changed: set[str]) -> None:
    while True:
        try:
            key, target, source, length, compare = chunks.popleft()
        except IndexError:
            return
        if not compare or _memcmp(target, source, length):
            changed.add(key)
            _memmove(target, source, length)
