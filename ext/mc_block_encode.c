#include "mc_block.h"
#include "mc_kernels.h"
#include "mc_zstd.h"

typedef struct {
    mc_scratch *scratch;
    const mc_head *head;
    u64 block;
    mc_plane_kinds kinds;
    mc_writer stream; /* grows downwards from the end of scratch->words */
    u8 *stream_end;
    int streams; /* planes that are in the stream */
    mc_method method[MC_MAX_WIDTH];
    const u8 *bytes[MC_MAX_WIDTH]; /* what is stored of each plane: the plane, or its frame in out */
    size_t length[MC_MAX_WIDTH];
} block_encoder;

/* Code the plane with its model; returns by how much the stream grew, the states counted once. */
static size_t encode_rans(block_encoder *e, unsigned k, const u8 *plane, size_t n)
{
    mc_scratch *scratch = e->scratch;
    const mc_model *model = &scratch->models.plane[k];
    const mc_kernels *kernels = mc_kernels_now();
    const u8 *before = e->stream.at;
    unsigned table;
    const u8 *contexts = mc_model_contexts(scratch, e->head, e->block, k, plane + MC_PLANE_STRIDE, n, &table);
    if (contexts)
        kernels->classify(scratch->tables, contexts, plane, n, model->map);
    kernels->encode(plane, n, contexts ? scratch->tables : NULL, table, model->bits, &scratch->encoders[k], &e->stream);
    return (size_t)(before - e->stream.at) + (e->streams ? 0 : MC_STATE_BYTES);
}

/*
 * Repeats are what zstd sees and the models do not, so it is tried where the symbols are few. A piece of the plane
 * shows whether it can win. Returns the length of the frame in scratch->packed, or 0 when it is not below `limit`.
 */
static size_t try_zstd(block_encoder *e, const u8 *plane, size_t n, size_t limit)
{
    const size_t piece = 8192;
    if (n > piece) {
        if (limit > n / 4 && e->head->transform != MC_PLAIN && limit < n)
            return 0;
        size_t packed = mc_zstd_pack(e->scratch, MC_ZSTD_FAST, plane + (n - piece) / 2, piece, piece);
        if (!packed || (double)packed * (double)n > (double)limit * (double)piece)
            return 0;
    }
    return mc_zstd_pack(e->scratch, MC_ZSTD_FAST, plane, n, limit);
}

/* Choose how plane k is stored. A frame is kept at *frames, which moves past it. */
static void encode_plane(block_encoder *e, unsigned k, size_t n, u8 **frames)
{
    const u8 *plane = e->scratch->planes + k * MC_PLANE_STRIDE;
    mc_writer before = e->stream;
    size_t best = n - n / 128;
    e->method[k] = MC_RAW;
    e->bytes[k] = plane;
    e->length[k] = n;
    if (e->kinds.constant >> k & 1) {
        static const u8 zero = 0; /* stands in a plane without bytes: what its memory holds is left from other objects */
        e->method[k] = MC_CONST;
        e->bytes[k] = n ? plane : &zero;
        e->length[k] = 0;
        return;
    }
    const int noise = e->kinds.noise >> k & 1;
    if (noise && e->head->transform != MC_PLAIN)
        return; /* integers that count look like noise too, but not to zstd */
    if (!noise && e->scratch->models.plane[k].tables) {
        size_t grown = encode_rans(e, k, plane, n);
        if (grown < best) {
            e->method[k] = MC_RANS;
            e->length[k] = 0;
            e->streams++;
            best = grown;
        } else {
            e->stream = before;
        }
    }
    size_t packed = try_zstd(e, plane, n, best);
    if (packed) {
        e->stream = before;
        e->streams -= e->method[k] == MC_RANS;
        e->method[k] = MC_ZSTD;
        e->bytes[k] = *frames;
        e->length[k] = packed;
        memcpy(*frames, e->scratch->packed, packed);
        *frames += packed;
    }
}

static u8 *put(u8 *at, const void *bytes, size_t length)
{
    memcpy(at, bytes, length);
    return at + length;
}

/* Heads of the planes, their bytes, the tail of the block, the stream. */
static u8 *assemble(const block_encoder *e, unsigned width, const u8 *tail, size_t tail_bytes, u8 *at)
{
    for (unsigned k = width; k-- > 0;) {
        *at++ = (u8)e->method[k];
        if (e->method[k] == MC_CONST)
            *at++ = e->bytes[k][0];
        for (int shift = 0; e->method[k] == MC_ZSTD && shift < 24; shift += 8)
            *at++ = (u8)(e->length[k] >> shift);
    }
    for (unsigned k = width; k-- > 0;)
        at = put(at, e->bytes[k], e->length[k]);
    at = put(at, tail, tail_bytes);
    if (e->streams) {
        at = put(at, e->stream.state, MC_STATE_BYTES);
        at = put(at, e->stream.at, (size_t)(e->stream_end - e->stream.at));
    }
    return at;
}

static size_t encode_bytes(mc_scratch *scratch, const u8 *raw, size_t n, u8 *out)
{
    block_encoder e = {.scratch = scratch, .method = {MC_RAW}, .bytes = {raw}, .length = {n}};
    size_t packed = 0;
    if (mc_plane_constant(raw, n)) {
        e.method[0] = MC_CONST;
        e.length[0] = 0;
    } else if ((packed = mc_zstd_pack(scratch, MC_ZSTD_BYTES, raw, n, n - n / 128))) {
        e.method[0] = MC_ZSTD;
        e.bytes[0] = scratch->packed;
        e.length[0] = packed;
    }
    return (size_t)(assemble(&e, 1, raw + n, 0, out) - out);
}

size_t mc_block_encode(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *raw, const u8 *base,
                       mc_plane_kinds kinds, u8 *out, unsigned *used)
{
    const size_t raw_bytes = mc_raw_bytes(head, block);
    if (head->transform == MC_BYTES)
        return encode_bytes(scratch, raw, raw_bytes, out);
    const unsigned width = mc_plane_count(head);
    const size_t n = raw_bytes / width;
    block_encoder e = {.scratch = scratch, .head = head, .block = block, .kinds = kinds};
    e.stream_end = e.stream.at = scratch->words + sizeof scratch->words;
    for (int lane = 0; lane < MC_LANES; lane++)
        e.stream.state[lane] = MC_LOW;
    mc_block_split(scratch, head, block, raw, n, base);
    u8 *frames = scratch->frames;
    for (unsigned k = 0; k < width; k++)
        encode_plane(&e, k, n, &frames);
    for (unsigned k = 0; k < width; k++)
        *used |= (unsigned)(e.method[k] == MC_RANS) << k;
    return (size_t)(assemble(&e, width, raw + n * width, raw_bytes % width, out) - out);
}
