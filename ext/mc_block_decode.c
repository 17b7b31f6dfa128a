#include "mc_block.h"
#include "mc_kernels.h"
#include "mc_zstd.h"

typedef struct {
    const u8 *at, *end;
} reader;

static size_t left(const reader *r) { return (size_t)(r->end - r->at); }

/* One plane's method, and where its bytes are once they are known. */
typedef struct {
    mc_method method;
    u8 value;
    u32 frame_length;
} plane_head;

static int read_plane_head(reader *r, plane_head *plane)
{
    if (left(r) < 1)
        return MC_E_BLOCK_SHORT;
    plane->method = *r->at++;
    if (plane->method == MC_CONST) {
        if (left(r) < 1)
            return MC_E_BLOCK_SHORT;
        plane->value = *r->at++;
    } else if (plane->method == MC_ZSTD) {
        if (left(r) < 3)
            return MC_E_BLOCK_SHORT;
        plane->frame_length = (u32)r->at[0] | (u32)r->at[1] << 8 | (u32)r->at[2] << 16;
        r->at += 3;
    } else if (plane->method != MC_RAW) {
        return MC_E_METHOD;
    }
    return MC_OK;
}

/* Make `*bytes` point at the plane's n bytes: inside the block when they are raw, else at `room`. */
static int read_plane(mc_scratch *scratch, reader *r, const plane_head *plane, size_t n, u8 *room, const u8 **bytes)
{
    *bytes = room;
    if (plane->method == MC_CONST) {
        memset(room, plane->value, n);
    } else if (plane->method == MC_RAW) {
        if (left(r) < n)
            return MC_E_BLOCK_SHORT;
        *bytes = r->at;
        r->at += n;
    } else {
        if (left(r) < plane->frame_length)
            return MC_E_BLOCK_SHORT;
        int status = mc_zstd_unpack(scratch, room, n, r->at, plane->frame_length);
        r->at += plane->frame_length;
        return status;
    }
    return MC_OK;
}

int mc_block_decode(mc_scratch *scratch, const mc_head *head, const u8 *block, size_t length, const u8 *base, u8 *raw,
                    size_t raw_bytes)
{
    const unsigned width = mc_plane_count(head);
    const size_t n = raw_bytes / width, tail = raw_bytes % width;
    reader r = {block, block + length};
    plane_head planes[MC_MAX_WIDTH];
    const u8 *bytes[MC_MAX_WIDTH];
    int status;

    for (unsigned k = width; k-- > 0;)
        if ((status = read_plane_head(&r, &planes[k])))
            return status;
    if (head->transform == MC_BYTES) {
        if ((status = read_plane(scratch, &r, &planes[0], n, raw, &bytes[0])))
            return status;
        if (bytes[0] != raw)
            memcpy(raw, bytes[0], n);
    } else {
        for (unsigned k = width; k-- > 0;)
            if ((status = read_plane(scratch, &r, &planes[k], n, scratch->planes + k * MC_PLANE_STRIDE, &bytes[k])))
                return status;
        mc_kernels_now()->merge[mc_log2_width(width)][head->transform - 1](raw, base, n, bytes);
    }
    if (left(&r) < tail)
        return MC_E_BLOCK_SHORT;
    memcpy(raw + n * width, r.at, tail);
    return left(&r) == tail ? MC_OK : MC_E_BLOCK_LONG;
}
