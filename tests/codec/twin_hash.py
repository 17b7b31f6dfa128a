"""XXH3 (64 bits, seed 0) from its specification, in plain Python and NumPy: slow, and independent of the C code."""

from __future__ import annotations

import struct

import numpy as np

_M64 = (1 << 64) - 1
_P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _u64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & _M64) ^ (product >> 64)


def _avalanche(h: int) -> int:
    h ^= h >> 37
    h = h * 0x165667919E3779F9 & _M64
    return h ^ h >> 32


def _avalanche64(h: int) -> int:
    h ^= h >> 33
    h = h * _P64[1] & _M64
    h ^= h >> 29
    h = h * _P64[2] & _M64
    return h ^ h >> 32


def _mix16(data: bytes, at: int, secret: int) -> int:
    return _fold(_u64(data, at) ^ _u64(_SECRET, secret), _u64(data, at + 8) ^ _u64(_SECRET, secret + 8))


def _short(data: bytes) -> int:
    n = len(data)
    if n == 0:
        return _avalanche64(_u64(_SECRET, 56) ^ _u64(_SECRET, 64))
    if n < 4:
        word = data[0] << 16 | data[n >> 1] << 24 | data[n - 1] | n << 8
        return _avalanche64(word ^ (_u32(_SECRET, 0) ^ _u32(_SECRET, 4)))
    if n <= 8:
        word = (_u32(data, n - 4) + (_u32(data, 0) << 32)) ^ (_u64(_SECRET, 8) ^ _u64(_SECRET, 16))
        word ^= ((word << 49 | word >> 15) ^ (word << 24 | word >> 40)) & _M64
        word = word * 0x9FB21C651E98DF25 & _M64
        word ^= (word >> 35) + n
        word = word * 0x9FB21C651E98DF25 & _M64
        return word ^ word >> 28
    low = _u64(data, 0) ^ (_u64(_SECRET, 24) ^ _u64(_SECRET, 32))
    high = _u64(data, n - 8) ^ (_u64(_SECRET, 40) ^ _u64(_SECRET, 48))
    swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
    return _avalanche((n + swapped + high + _fold(low, high)) & _M64)


def _medium(data: bytes) -> int:
    n = len(data)
    h = n * _P64[0] & _M64
    if n <= 128:
        for i in reversed(range((n - 1) // 32 + 1)):
            h += _mix16(data, 16 * i, 32 * i) + _mix16(data, n - 16 * (i + 1), 32 * i + 16)
        return _avalanche(h & _M64)
    for i in range(8):
        h += _mix16(data, 16 * i, 16 * i)
    h = _avalanche(h & _M64)
    for i in range(8, n // 16):
        h += _mix16(data, 16 * i, 16 * (i - 8) + 3)
    h += _mix16(data, n - 16, 136 - 17)
    return _avalanche(h & _M64)


def _accumulate(acc: np.ndarray, stripes: np.ndarray, secrets: np.ndarray) -> None:
    """Add stripes of 8 words, each with its own 8 words of secret; the order of stripes does not matter."""
    keyed = stripes ^ secrets
    products = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
    swapped = stripes.reshape(-1, 4, 2)[:, :, ::-1].reshape(-1, 8)
    acc += products.sum(axis=0, dtype=np.uint64) + swapped.sum(axis=0, dtype=np.uint64)


def _secret_words(at: int) -> np.ndarray:
    return np.frombuffer(_SECRET, "<u8", 8, at)


def _long(data: bytes) -> int:
    n = len(data)
    acc = np.array([_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0]], np.uint64)
    secrets = np.stack([_secret_words(8 * i) for i in range(16)])
    blocks = (n - 1) // 1024
    with np.errstate(over="ignore"):
        for block in range(blocks):
            _accumulate(acc, np.frombuffer(data, "<u8", 128, 1024 * block).reshape(16, 8), secrets)
            acc ^= acc >> np.uint64(47)
            acc ^= _secret_words(128)
            acc *= np.uint64(_P32[0])
        rest = (n - 1 - 1024 * blocks) // 64
        if rest:
            stripes = np.frombuffer(data, "<u8", 8 * rest, 1024 * blocks).reshape(rest, 8)
            _accumulate(acc, stripes, secrets[:rest])
        _accumulate(acc, np.frombuffer(data, "<u8", 8, n - 64).reshape(1, 8), _secret_words(121).reshape(1, 8))
    words = [int(word) for word in acc]
    h = n * _P64[0] & _M64
    for i in range(4):
        h += _fold(words[2 * i] ^ _u64(_SECRET, 11 + 16 * i), words[2 * i + 1] ^ _u64(_SECRET, 19 + 16 * i))
    return _avalanche(h & _M64)


def xxh3_64(data: bytes) -> int:
    """The 64-bit XXH3 of `data` with seed 0."""
    return _short(data) if len(data) <= 16 else _medium(data) if len(data) <= 240 else _long(data)
