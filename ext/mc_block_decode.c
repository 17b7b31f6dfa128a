#include "mc_block.h"
#include "mc_kernels.h"
#include "mc_zstd.h"

typedef struct {
    const u8 *at, *end;
} cursor;

static size_t left(const cursor *c) { return (size_t)(c->end - c->at); }

static const u8 *take(cursor *c, size_t length)
{
    if (left(c) < length)
        return NULL;
    const u8 *bytes = c->at;
    c->at += length;
    return bytes;
}

typedef struct {
    mc_method method;
    size_t length;   /* stored bytes */
    const u8 *bytes; /* stored bytes, or the value of a constant plane */
} plane;

static int read_plane_head(cursor *c, plane *p, size_t n, const mc_model *model)
{
    const u8 *method = take(c, 1), *extra;
    if (!method)
        return MC_E_BLOCK_SHORT;
    p->method = *method;
    p->length = 0;
    switch (*method) {
    case MC_CONST:
        p->bytes = take(c, 1);
        return p->bytes ? MC_OK : MC_E_BLOCK_SHORT;
    case MC_RAW:
        p->length = n;
        return MC_OK;
    case MC_ZSTD:
        if (!(extra = take(c, 3)))
            return MC_E_BLOCK_SHORT;
        p->length = (size_t)extra[0] | (size_t)extra[1] << 8 | (size_t)extra[2] << 16;
        return MC_OK;
    case MC_RANS:
        return model && model->tables ? MC_OK : MC_E_METHOD;
    default:
        return MC_E_METHOD;
    }
}

/* The stream takes what is left of the block: its states, then words. */
static int open_stream(cursor *c, mc_reader *stream)
{
    const u8 *states = take(c, MC_STATE_BYTES);
    if (!states)
        return MC_E_BLOCK_SHORT;
    for (int lane = 0; lane < MC_LANES; lane++) {
        stream->state[lane] = mc_get32(states + 4 * lane);
        if (stream->state[lane] < MC_LOW || stream->state[lane] >> 31)
            return MC_E_STREAM;
    }
    stream->at = c->at;
    stream->end = c->at = c->end;
    return MC_OK;
}

static int close_stream(const mc_reader *stream)
{
    for (int lane = 0; lane < MC_LANES; lane++)
        if (stream->state[lane] != MC_LOW)
            return MC_E_STREAM;
    return stream->at == stream->end ? MC_OK : MC_E_STREAM;
}

static int decode_rans(mc_scratch *scratch, const mc_head *head, u64 block, unsigned k, const u8 *above, size_t n,
                       mc_reader *stream, u8 *room)
{
    unsigned table;
    const u8 *contexts = mc_model_contexts(scratch, head, block, k, above, n, &table);
    return mc_kernels_now()->decode(room, n, contexts, table, &scratch->models.plane[k], &scratch->decoders[k], stream);
}

/* Read the heads of all planes and find their bytes, the tail and the stream, which fill the block exactly. */
static int read_layout(mc_scratch *scratch, const mc_head *head, cursor *c, size_t n, size_t tail_bytes, plane planes[],
                       const u8 **tail, mc_reader *stream)
{
    const unsigned width = mc_plane_count(head);
    int status, streams = 0;
    for (unsigned k = width; k-- > 0;) {
        const mc_model *model = head->transform == MC_BYTES ? NULL : &scratch->models.plane[k];
        if ((status = read_plane_head(c, &planes[k], n, model)))
            return status;
        streams += planes[k].method == MC_RANS;
    }
    for (unsigned k = width; k-- > 0;)
        if (planes[k].method != MC_CONST && !(planes[k].bytes = take(c, planes[k].length)))
            return MC_E_BLOCK_SHORT;
    if (!(*tail = take(c, tail_bytes)))
        return MC_E_BLOCK_SHORT;
    if (streams && (status = open_stream(c, stream)))
        return status;
    return left(c) ? MC_E_BLOCK_LONG : MC_OK;
}

static int decode_bytes(mc_scratch *scratch, const plane *p, u8 *raw, size_t n)
{
    if (p->method == MC_ZSTD)
        return mc_zstd_unpack(scratch, raw, n, p->bytes, p->length);
    if (p->method == MC_CONST)
        memset(raw, *p->bytes, n);
    else
        memcpy(raw, p->bytes, n);
    return MC_OK;
}

int mc_block_decode(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *encoded, size_t length, const u8 *base,
                    u8 *raw)
{
    const unsigned width = mc_plane_count(head);
    const size_t raw_bytes = mc_raw_bytes(head, block), n = raw_bytes / width, tail_bytes = raw_bytes % width;
    cursor c = {encoded, encoded + length};
    plane planes[MC_MAX_WIDTH];
    const u8 *bytes[MC_MAX_WIDTH], *tail;
    mc_reader stream = {.at = NULL, .end = NULL};
    int status = read_layout(scratch, head, &c, n, tail_bytes, planes, &tail, &stream), streams = 0;
    if (status)
        return status;
    if (head->transform == MC_BYTES)
        return decode_bytes(scratch, &planes[0], raw, n);

    mc_block_exponents(scratch, head, block, n, base);
    for (unsigned k = width; k-- > 0;) {
        u8 *room = scratch->planes + k * MC_PLANE_STRIDE;
        bytes[k] = planes[k].method == MC_RAW ? planes[k].bytes : room;
        if (planes[k].method == MC_RANS)
            status = decode_rans(scratch, head, block, k, k + 1 < width ? bytes[k + 1] : NULL, n, &stream, room);
        else if (planes[k].method != MC_RAW)
            status = decode_bytes(scratch, &planes[k], room, n);
        if (status)
            return status;
        streams += planes[k].method == MC_RANS;
    }
    if (streams && (status = close_stream(&stream)))
        return status;
    mc_kernels_now()->merge[mc_log2_width(width)][head->transform - 1](raw, base, n, bytes);
    memcpy(raw + n * width, tail, tail_bytes);
    return MC_OK;
}
