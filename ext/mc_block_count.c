#include "mc_block.h"

static void count_plain(u32 counts[256], const u8 *symbols, size_t n)
{
    u32 part[4][256] = {{0}};
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (size_t k = 0; k < 4; k++)
            part[k][symbols[i + k]]++;
    for (; i < n; i++)
        part[0][symbols[i]]++;
    for (int symbol = 0; symbol < 256; symbol++)
        counts[symbol] += part[0][symbol] + part[1][symbol] + part[2][symbol] + part[3][symbol];
}

static void count_in_context(mc_counts counts, const u8 *contexts, const u8 *symbols, size_t n)
{
    unsigned nonzero = 0;
    for (size_t i = 0; i < n; i += MC_LANES) {
        unsigned lanes = n - i < MC_LANES ? (unsigned)(n - i) : MC_LANES;
        u32(*row)[256] = counts + MC_STATIC_CONTEXTS * mc_activity(nonzero);
        for (unsigned lane = 0; lane < lanes; lane++)
            row[contexts[i + lane]][symbols[i + lane]]++;
        nonzero = mc_count_nonzero(symbols + i, lanes);
    }
}

void mc_block_count(mc_scratch *scratch, const mc_head *head, const u8 *raw, size_t raw_bytes, const u8 *base)
{
    const unsigned width = mc_plane_count(head);
    const size_t n = raw_bytes / width;
    mc_block_split(scratch, head, raw, n, base);
    for (unsigned k = 0; k < width; k++) {
        const u8 *plane = scratch->planes + k * MC_PLANE_STRIDE;
        if (mc_plane_constant(plane, n) || mc_plane_noise(plane, n))
            continue;
        if (head->transform == MC_ROTATE)
            count_plain(scratch->counts[k][0], plane, n);
        else
            count_in_context(scratch->counts[k], mc_plane_contexts(scratch, head, k, plane + MC_PLANE_STRIDE, n), plane, n);
    }
}
