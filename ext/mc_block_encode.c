#include "mc_block.h"
#include "mc_kernels.h"
#include "mc_zstd.h"

static int constant(const u8 *bytes, size_t n) { return n == 0 || memcmp(bytes, bytes + 1, n - 1) == 0; }

/* Append the head of a plane to *head and its bytes to *body. */
static void encode_plane(mc_scratch *scratch, mc_zstd_kind kind, const u8 *bytes, size_t n, u8 **head, u8 **body)
{
    if (constant(bytes, n)) {
        *(*head)++ = MC_CONST;
        *(*head)++ = n ? bytes[0] : 0;
        return;
    }
    size_t packed = mc_zstd_pack(scratch, kind, bytes, n, n - n / 64);
    if (packed) {
        *(*head)++ = MC_ZSTD;
        for (int shift = 0; shift < 24; shift += 8)
            *(*head)++ = (u8)(packed >> shift);
        memcpy(*body, scratch->packed, packed);
        *body += packed;
        return;
    }
    *(*head)++ = MC_RAW;
    memcpy(*body, bytes, n);
    *body += n;
}

size_t mc_block_encode(mc_scratch *scratch, const mc_head *head, const u8 *raw, size_t raw_bytes, const u8 *base, u8 *out)
{
    const unsigned width = mc_plane_count(head);
    const size_t n = raw_bytes / width, tail = raw_bytes % width;
    u8 heads[4 * MC_MAX_WIDTH], *head_end = heads;
    u8 *body = out + MC_BLOCK_OVERHEAD, *body_end = body;

    if (head->transform == MC_BYTES) {
        encode_plane(scratch, MC_ZSTD_BYTES, raw, n, &head_end, &body_end);
    } else {
        u8 *planes[MC_MAX_WIDTH];
        for (unsigned k = 0; k < width; k++)
            planes[k] = scratch->planes + k * MC_PLANE_STRIDE;
        mc_kernels_now()->split[mc_log2_width(width)][head->transform - 1](raw, base, n, planes);
        for (unsigned k = width; k-- > 0;)
            encode_plane(scratch, MC_ZSTD_FAST, planes[k], n, &head_end, &body_end);
    }
    memcpy(body_end, raw + n * width, tail);
    body_end += tail;
    size_t head_bytes = (size_t)(head_end - heads), body_bytes = (size_t)(body_end - body);
    memcpy(out, heads, head_bytes);
    memmove(out + head_bytes, body, body_bytes);
    return head_bytes + body_bytes;
}
