#include "mc_block.h"

#define FEW_ELEMENTS ((u64)1 << 14)

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

/*
 * Equal symbols in equal contexts in a row make each count wait for the one before it. Where nearly all symbols are
 * zero, zeros are therefore counted by context alone, in four parts, and the few others are corrected.
 */
typedef u32 zero_counts[4][MC_STATIC_CONTEXTS];

static void count_sparse(u32 (*row)[256], zero_counts zeros, const u8 *contexts, const u8 *symbols)
{
    for (unsigned lane = 0; lane < MC_LANES; lane += 4) {
        zeros[0][contexts[lane]]++;
        zeros[1][contexts[lane + 1]]++;
        zeros[2][contexts[lane + 2]]++;
        zeros[3][contexts[lane + 3]]++;
    }
    for (unsigned eight = 0; eight < MC_LANES; eight += 8) {
        if (!mc_get64(symbols + eight))
            continue;
        for (unsigned lane = eight; lane < eight + 8; lane++)
            if (symbols[lane]) {
                zeros[lane % 4][contexts[lane]]--;
                row[contexts[lane]][symbols[lane]]++;
            }
    }
}

static void count_dense(u32 (*row)[256], const u8 *contexts, const u8 *symbols, unsigned lanes)
{
    u16 keys[MC_LANES];
    u32 *counts = &row[0][0];
    for (unsigned lane = 0; lane < lanes; lane++)
        keys[lane] = (u16)(contexts[lane] << 8 | symbols[lane]);
    for (unsigned lane = 0; lane < lanes; lane++)
        counts[keys[lane]]++;
}

static void count_by_exponent(mc_counts counts, const u8 *exponents, const u8 *symbols, size_t n)
{
    for (size_t i = 0; i < n; i += MC_LANES)
        count_dense(counts, exponents + i, symbols + i, n - i < MC_LANES ? (unsigned)(n - i) : MC_LANES);
}

static void count_in_context(mc_counts counts, const u8 *contexts, const u8 *symbols, size_t n)
{
    zero_counts zeros[MC_LEVELS] = {{{0}}};
    const size_t full = n - n % MC_LANES;
    unsigned level = mc_activity(0);
    for (size_t i = 0; i < full; i += MC_LANES) {
        unsigned nonzero = mc_count_nonzero(symbols + i, MC_LANES);
        u32(*row)[256] = counts + MC_STATIC_CONTEXTS * level;
        if (nonzero <= 4)
            count_sparse(row, zeros[level], contexts + i, symbols + i);
        else
            count_dense(row, contexts + i, symbols + i, MC_LANES);
        level = mc_activity(nonzero);
    }
    count_dense(counts + MC_STATIC_CONTEXTS * level, contexts + full, symbols + full, (unsigned)(n - full));
    for (level = 0; level < MC_LEVELS; level++)
        for (unsigned context = 0; context < MC_STATIC_CONTEXTS; context++)
            for (int part = 0; part < 4; part++)
                counts[level * MC_STATIC_CONTEXTS + context][0] += zeros[level][part][context];
}

unsigned mc_counted_contexts(const mc_head *head)
{
    int few = head->raw_length / mc_plane_count(head) <= FEW_ELEMENTS;
    return head->transform == MC_ROTATE || few ? MC_EXPONENT_CLASSES : MC_CONTEXTS;
}

mc_plane_kinds mc_block_count(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *raw, const u8 *base)
{
    const unsigned width = mc_plane_count(head);
    const size_t n = mc_raw_bytes(head, block) / width;
    const int plain = mc_counted_contexts(head) == MC_EXPONENT_CLASSES;
    mc_plane_kinds kinds = {0, 0};
    mc_block_split(scratch, head, block, raw, n, base);
    for (unsigned k = 0; k < width; k++) {
        const u8 *plane = scratch->planes + k * MC_PLANE_STRIDE;
        if (mc_plane_constant(plane, n))
            kinds.constant |= (u8)(1u << k);
        else if (mc_plane_noise(plane, n))
            kinds.noise |= (u8)(1u << k);
        else if (head->transform == MC_ROTATE)
            count_plain(scratch->counts[k][mc_block_class(head, block)], plane, n);
        else if (plain)
            count_by_exponent(scratch->counts[k], scratch->exponents, plane, n);
        else
            count_in_context(scratch->counts[k], mc_plane_contexts(scratch, head, k, plane + MC_PLANE_STRIDE, n), plane, n);
    }
    return kinds;
}
