"""The compiled extension. Buffers are C-contiguous bytes; the GIL is released while they are worked on."""

from collections.abc import Mapping

from moonclipfs.types import Buffer

LIMITS: Mapping[str, int]
DTYPES: int
PREFIX_BYTES: int

def kernel() -> str: ...
def use_kernel(name: str) -> None: ...
def xxh3_64(data: Buffer) -> int: ...
def dtype_width(code: int) -> int: ...
def can_predict(code: int, base: int) -> bool: ...
def cast(data: Buffer, dtype: int, to: int) -> bytes: ...
def encode(
    raw: Buffer,
    dtype: int,
    transform: int,
    base: Buffer | None = None,
    base_dtype: int = 0,
    base_start: int = 0,
    models: bool = True,
    verify: bool = True,
) -> bytes: ...
def head_length(prefix: Buffer) -> int: ...
def parse_head(data: Buffer, encoded_length: int) -> tuple[int, int, int, int, int, int, int, list[int]]: ...
def decode_blocks(
    head: Buffer,
    encoded_length: int,
    first: int,
    count: int,
    payload: Buffer,
    out: Buffer,
    base: Buffer | None = None,
) -> None: ...
def decode_bytes(
    head: Buffer,
    encoded_length: int,
    first: int,
    count: int,
    payload: Buffer,
    raw_length: int,
    base: Buffer | None = None,
) -> bytes: ...
def decode_each(
    head: Buffer,
    encoded_length: int,
    first: int,
    count: int,
    payload: Buffer,
    base: Buffer | None = None,
) -> list[bytes]: ...

class Chunker:
    def __init__(self, minimum: int, average: int, maximum: int) -> None: ...
    def push(self, data: Buffer) -> list[int]: ...
    def finish(self) -> list[int]: ...
