#include "mc_base.h"

static const char *const messages[MC_E_COUNT] = {
    [MC_OK] = "no error",
    [MC_E_MEMORY] = "out of memory",
    [MC_E_USAGE] = "buffers do not fit the request",
    [MC_E_SHORT_HEAD] = "the head is cut short",
    [MC_E_MAGIC] = "not an encoded object, or one of a newer version",
    [MC_E_DTYPE] = "unknown element type, or a base of a type that cannot predict it",
    [MC_E_TRANSFORM] = "unknown transform",
    [MC_E_RAW_LENGTH] = "raw length above the limit",
    [MC_E_HEAD_LENGTH] = "head length does not fit the number of blocks",
    [MC_E_HEAD_CHECK] = "the head does not pass its checksum",
    [MC_E_TABLE] = "an entropy table contradicts itself",
    [MC_E_EXPONENT] = "the shared exponent is none that the element type has",
    [MC_E_BLOCK_LENGTHS] = "the lengths of the blocks do not add up to the length of the object",
    [MC_E_RANGE] = "no such blocks",
    [MC_E_BLOCK_SHORT] = "the block is cut short",
    [MC_E_BLOCK_LONG] = "the block has bytes that nothing uses",
    [MC_E_METHOD] = "unknown method of a plane",
    [MC_E_ZSTD] = "zstd cannot decode a plane, or its length is wrong",
    [MC_E_STREAM] = "an entropy-coded stream does not end as it must",
    [MC_E_BLOCK_CHECK] = "the decoded block does not pass its checksum",
    [MC_E_VERIFY] = "the encoding does not decode to what was encoded; nothing was stored",
};

const char *mc_message(int status)
{
    return status >= 0 && status < MC_E_COUNT ? messages[status] : "unknown status";
}
