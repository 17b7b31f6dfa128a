# cython: language_level=3, freethreading_compatible=False
"""The compiled half of `moonclipfs.codec`: buffers in, buffers out, the GIL released. It knows no file and no store."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uint8_t, uint64_t

import os

from moonclipfs.errors import CorruptError, UsageError


cdef extern from "mc_base.h" nogil:
    enum:
        MC_OK
        MC_E_MEMORY
        MC_E_USAGE
        MC_E_RANGE
        MC_E_BLOCK_SHORT
        MC_PREFIX_BYTES
        MC_SHARED_BYTES
    const size_t MC_BLOCK_ELEMENTS, MC_BLOCK_BYTES
    const uint64_t MC_MAX_RAW
    const char *mc_message(int status)
    uint64_t mc_xxh3(const void *data, size_t length)

cdef extern from "mc_dtype.h" nogil:
    enum:
        MC_DTYPES
        MC_NOT_FLOAT
    ctypedef int mc_format
    ctypedef struct mc_dtype_info:
        uint8_t width, format
    const mc_dtype_info *mc_dtype(unsigned code)
    int mc_dtype_pair(unsigned code, unsigned base)

cdef extern from "mc_cast.h" nogil:
    void mc_cast(uint8_t *out, mc_format to, const uint8_t *data, mc_format from_, size_t n)

cdef extern from "mc_kernels.h" nogil:
    ctypedef struct mc_kernels:
        const char *name
    const mc_kernels *mc_kernels_now()
    int mc_kernels_use(const char *name)

cdef extern from "mc_head.h" nogil:
    ctypedef struct mc_head:
        unsigned dtype, base_dtype, transform
        uint64_t raw_length, base_start, block_bytes, blocks, head_length
    int mc_head_length(const uint8_t *prefix, size_t length, uint64_t *head_length)
    int mc_head_parse(mc_head *head, const uint8_t *data, size_t length, uint64_t encoded_length)
    unsigned mc_entry_length(const mc_head *head, uint64_t block)
    size_t mc_raw_bytes(const mc_head *head, uint64_t block)

cdef extern from "mc_scratch.h" nogil:
    ctypedef struct mc_scratch:
        uint8_t *output
    mc_scratch *mc_scratch_new()
    void mc_scratch_free(mc_scratch *scratch)
    int mc_scratch_reserve(mc_scratch *scratch, size_t length)
    void mc_scratch_trim(mc_scratch *scratch)

cdef extern from "mc_object.h" nogil:
    ctypedef struct mc_base_bytes:
        const uint8_t *data
        size_t length
    ctypedef struct mc_request:
        const uint8_t *raw
        size_t raw_length
        unsigned dtype, transform
        mc_base_bytes base
        unsigned base_dtype
        uint64_t base_start
        int models, verify
    size_t mc_encode_bound(const mc_request *request)
    int mc_encode(mc_scratch *scratch, const mc_request *request, uint8_t *out, size_t *length)
    ctypedef struct mc_decode_request:
        const uint8_t *head
        size_t head_length
        uint64_t encoded_length, first, count
        const uint8_t *payload
        size_t payload_length
        mc_base_bytes base
        uint8_t *out
        size_t out_length
        uint8_t **outs
    int mc_decode(mc_scratch *scratch, const mc_decode_request *request, uint64_t *block)

cdef extern from "mc_chunk.h" nogil:
    ctypedef struct mc_chunker:
        uint64_t length
        int complete
    void mc_chunker_init(mc_chunker *chunker, uint64_t minimum, uint64_t average, uint64_t maximum)
    size_t mc_chunker_push(mc_chunker *chunker, const uint8_t *data, size_t length, int *border)


LIMITS = {"BLOCK_ELEMENTS": MC_BLOCK_ELEMENTS, "BLOCK_BYTES": MC_BLOCK_BYTES, "RAW_BYTES": MC_MAX_RAW}
"""The limits that are compiled in, by their names in `limits`."""
DTYPES = MC_DTYPES
PREFIX_BYTES = MC_PREFIX_BYTES

cdef const uint8_t *start(const uint8_t[::1] data) noexcept:
    """Address of the first byte; never NULL, so that C may add 0 to it."""
    return &data[0] if data.shape[0] else <const uint8_t *> b""


cdef class _Scratch:
    """Working memory of one call at a time."""

    cdef mc_scratch *memory

    def __cinit__(self):
        self.memory = mc_scratch_new()
        if self.memory is NULL:
            raise MemoryError

    def __dealloc__(self):
        mc_scratch_free(self.memory)


cdef list _idle = []
cdef int _IDLE_LIMIT = 8  # idle scratch memories kept for the next call; more threads than this allocate anew


cdef _Scratch take_scratch():
    return _idle.pop() if _idle else _Scratch()


cdef give_scratch(_Scratch scratch):
    mc_scratch_trim(scratch.memory)
    if len(_idle) < _IDLE_LIMIT:
        _idle.append(scratch)


cdef object failure(int status, str where):
    if status == MC_E_MEMORY:
        return MemoryError()
    text = f"{where}: {mc_message(status).decode()}"
    return UsageError(text) if status in (MC_E_USAGE, MC_E_RANGE) else CorruptError(text)


def kernel() -> str:
    return mc_kernels_now().name.decode()


def use_kernel(str name not None):
    if not mc_kernels_use(name.encode()):
        raise UsageError(f"kernel {name!r}: unknown, or this processor lacks it; take scalar, avx2 or avx512")


def xxh3_64(const uint8_t[::1] data not None) -> int:
    cdef const uint8_t *address = start(data)
    cdef size_t length = data.shape[0]
    cdef uint64_t check
    with nogil:
        check = mc_xxh3(address, length)
    return check


def dtype_width(unsigned code) -> int:
    if code >= MC_DTYPES:
        raise UsageError(f"element type {code}: unknown")
    return mc_dtype(code).width


def can_predict(unsigned code, unsigned base) -> bool:
    if code >= MC_DTYPES or base >= MC_DTYPES:
        raise UsageError(f"element types {code} and {base}: unknown")
    return mc_dtype_pair(code, base) != 0


def cast(const uint8_t[::1] data not None, unsigned dtype, unsigned to) -> bytes:
    if dtype >= MC_DTYPES or to >= MC_DTYPES:
        raise UsageError(f"element types {dtype} and {to}: unknown")
    cdef const mc_dtype_info *a = mc_dtype(dtype)
    cdef const mc_dtype_info *b = mc_dtype(to)
    if a.format == MC_NOT_FLOAT or b.format == MC_NOT_FLOAT or a.format == b.format or data.shape[0] % a.width:
        raise UsageError(f"element types {dtype} and {to}: not a cast of {data.shape[0]} bytes")
    cdef size_t n = data.shape[0] // a.width
    out = PyBytes_FromStringAndSize(NULL, n * b.width)
    cdef uint8_t *target = <uint8_t *> PyBytes_AS_STRING(out)
    cdef const uint8_t *source = start(data)
    with nogil:
        mc_cast(target, b.format, source, a.format, n)
    return out


def encode(const uint8_t[::1] raw not None, unsigned dtype, unsigned transform,
           const uint8_t[::1] base=None, unsigned base_dtype=0, uint64_t base_start=0,
           bint models=True, bint verify=True) -> bytes:
    cdef mc_request request
    request.raw = start(raw)
    request.raw_length = raw.shape[0]
    request.dtype = dtype
    request.transform = transform
    request.base.data = <const uint8_t *> NULL if base is None else start(base)
    request.base.length = 0 if base is None else base.shape[0]
    request.base_dtype = base_dtype
    request.base_start = base_start
    request.models = models
    request.verify = verify
    cdef size_t bound = mc_encode_bound(&request), length = 0
    where = f"encoding {request.raw_length} bytes of type {dtype}"
    if bound == 0:
        raise failure(MC_E_USAGE, where)
    cdef _Scratch scratch = take_scratch()
    cdef int status = MC_E_MEMORY
    try:
        if mc_scratch_reserve(scratch.memory, bound):
            with nogil:
                status = mc_encode(scratch.memory, &request, scratch.memory.output, &length)
        if status != MC_OK:
            raise failure(status, where)
        return PyBytes_FromStringAndSize(<char *> scratch.memory.output, length)
    finally:
        give_scratch(scratch)


def head_length(const uint8_t[::1] prefix not None) -> int:
    cdef uint64_t length = 0
    cdef int status = mc_head_length(start(prefix), prefix.shape[0], &length)
    if status != MC_OK:
        raise failure(status, "encoded object")
    return length


def parse_head(const uint8_t[::1] data not None, uint64_t encoded_length) -> tuple:
    cdef mc_head head
    cdef uint64_t block
    cdef int status = mc_head_parse(&head, start(data), data.shape[0], encoded_length)
    if status != MC_OK:
        raise failure(status, "encoded object")
    lengths = [mc_entry_length(&head, block) for block in range(head.blocks)]
    return (head.dtype, head.base_dtype, head.transform, head.raw_length, head.base_start, head.block_bytes,
            head.head_length, lengths)


cdef run_decode(mc_decode_request *request):
    cdef _Scratch scratch = take_scratch()
    cdef uint64_t block = 0
    cdef int status
    with nogil:
        status = mc_decode(scratch.memory, request, &block)
    give_scratch(scratch)
    if status >= MC_E_BLOCK_SHORT:
        raise failure(status, f"block {block} of an encoded object")
    if status != MC_OK:
        raise failure(status, f"{request.count} blocks from {request.first} of an encoded object")


cdef void fill(mc_decode_request *request, const uint8_t[::1] head, uint64_t encoded_length, uint64_t first,
               uint64_t count, const uint8_t[::1] payload, const uint8_t[::1] base) noexcept:
    request.head = start(head)
    request.head_length = head.shape[0]
    request.encoded_length = encoded_length
    request.first = first
    request.count = count
    request.payload = start(payload)
    request.payload_length = payload.shape[0]
    request.base.data = <const uint8_t *> NULL if base is None else start(base)
    request.base.length = 0 if base is None else base.shape[0]
    request.out = NULL
    request.out_length = 0
    request.outs = NULL


def decode_blocks(const uint8_t[::1] head not None, uint64_t encoded_length, uint64_t first, uint64_t count,
                  const uint8_t[::1] payload not None, uint8_t[::1] out not None, const uint8_t[::1] base=None):
    cdef mc_decode_request request
    fill(&request, head, encoded_length, first, count, payload, base)
    request.out = <uint8_t *> start(out)
    request.out_length = out.shape[0]
    run_decode(&request)


def decode_bytes(const uint8_t[::1] head not None, uint64_t encoded_length, uint64_t first, uint64_t count,
                 const uint8_t[::1] payload not None, uint64_t raw_length, const uint8_t[::1] base=None) -> bytes:
    if raw_length > MC_MAX_RAW:
        raise failure(MC_E_USAGE, f"decoding to {raw_length} bytes")
    cdef mc_decode_request request
    fill(&request, head, encoded_length, first, count, payload, base)
    out = PyBytes_FromStringAndSize(NULL, raw_length)
    request.out = <uint8_t *> PyBytes_AS_STRING(out)
    request.out_length = raw_length
    run_decode(&request)
    return out


def decode_each(const uint8_t[::1] head not None, uint64_t encoded_length, uint64_t first, uint64_t count,
                const uint8_t[::1] payload not None, const uint8_t[::1] base=None) -> list:
    cdef mc_head parsed
    cdef mc_decode_request request
    cdef uint64_t i
    cdef int status = mc_head_parse(&parsed, start(head), head.shape[0], encoded_length)
    if status != MC_OK:
        raise failure(status, "encoded object")
    if first > parsed.blocks or count > parsed.blocks - first:
        raise failure(MC_E_RANGE, f"{count} blocks from {first} of an encoded object")
    fill(&request, head, encoded_length, first, count, payload, base)
    found = []
    cdef uint8_t **outs = <uint8_t **> PyMem_Malloc((count + 1) * sizeof(uint8_t *))
    if outs is NULL:
        raise MemoryError
    try:
        for i in range(count):
            block = PyBytes_FromStringAndSize(NULL, mc_raw_bytes(&parsed, first + i))
            found.append(block)
            outs[i] = <uint8_t *> PyBytes_AS_STRING(block)
        request.outs = outs
        run_decode(&request)
    finally:
        PyMem_Free(outs)
    return found


cdef class Chunker:
    cdef mc_chunker state

    def __cinit__(self, uint64_t minimum, uint64_t average, uint64_t maximum):
        if not 64 <= minimum <= average <= maximum <= 1 << 40:
            raise UsageError(f"chunks of {minimum}, {average}, {maximum} bytes: not in rising order from 64 on")
        mc_chunker_init(&self.state, minimum, average, maximum)

    def push(self, const uint8_t[::1] data not None) -> list:
        cdef const uint8_t *at = start(data)
        cdef size_t left = data.shape[0], taken
        cdef int border = 0
        lengths = []
        while left:
            with nogil:
                taken = mc_chunker_push(&self.state, at, left, &border)
            at += taken
            left -= taken
            if border:
                lengths.append(self.state.length)
        return lengths

    def finish(self) -> list:
        lengths = [] if self.state.complete or not self.state.length else [self.state.length]
        self.state.length = 0
        self.state.complete = 1
        return lengths


if os.environ.get("MOONCLIPFS_KERNEL"):
    use_kernel(os.environ["MOONCLIPFS_KERNEL"])
