#include "mc_block.h"
#include "mc_kernels.h"
#include "mc_log2.h"

int mc_plane_constant(const u8 *plane, size_t n) { return n == 0 || memcmp(plane, plane + 1, n - 1) == 0; }

int mc_plane_noise(const u8 *plane, size_t n)
{
    enum { PIECES = 4, PIECE = 2048 };
    u32 counts[4][256] = {{0}}; /* four tables: equal bytes in a row would wait for each other's sums in one */
    size_t pieces = n >= (size_t)4 * PIECES * PIECE ? PIECES : 1, length = pieces == 1 ? n : PIECE;
    for (size_t piece = 0; piece < pieces; piece++) {
        const u8 *at = plane + piece * (n / PIECES);
        for (size_t i = 0; i + 4 <= length; i += 4)
            for (int k = 0; k < 4; k++)
                counts[k][at[i + (size_t)k]]++;
    }
    float bits = 0, total = (float)(pieces * (length / 4 * 4));
    for (int symbol = 0; symbol < 256; symbol++) {
        float count = (float)(counts[0][symbol] + counts[1][symbol] + counts[2][symbol] + counts[3][symbol]);
        bits -= count * mc_log2(count + 1e-9f);
    }
    /* Random bytes in a sample seem to have 255 / (2 ln 2) bits less than 8 a byte. To save 1.6 % is not worth the time. */
    return total >= 256 && bits + total * mc_log2(total) > 7.87f * total - 184.0f;
}

void mc_block_split(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *raw, size_t n, const u8 *base)
{
    const mc_dtype_info *type = mc_dtype(head->dtype);
    const mc_kernels *kernels = mc_kernels_now();
    unsigned log2_width = mc_log2_width(type->width);
    u8 *planes[MC_MAX_WIDTH];
    for (unsigned k = 0; k < type->width; k++)
        planes[k] = scratch->planes + k * MC_PLANE_STRIDE;
    kernels->split[log2_width][head->transform - 1](raw, base, n, planes);
    mc_block_exponents(scratch, head, block, n, base);
}

void mc_block_exponents(mc_scratch *scratch, const mc_head *head, u64 block, size_t n, const u8 *base)
{
    const mc_dtype_info *type = mc_dtype(head->dtype);
    if (base && type->exponent_mask)
        mc_kernels_now()->exponent[mc_log2_width(type->width)](scratch->exponents, base, n, type->exponent_shift,
                                                               type->exponent_mask, scratch->models.exponent_top);
    else
        memset(scratch->exponents, base ? 0 : (int)mc_block_class(head, block), n);
}

const u8 *mc_plane_contexts(mc_scratch *scratch, const mc_head *head, unsigned k, const u8 *above, size_t n)
{
    if (k + 1 == mc_dtype(head->dtype)->width)
        return scratch->exponents;
    mc_kernels_now()->add_above(scratch->contexts, scratch->exponents, above, n);
    return scratch->contexts;
}

const u8 *mc_model_contexts(mc_scratch *scratch, const mc_head *head, u64 block, unsigned k, const u8 *above, size_t n,
                            unsigned *table)
{
    const mc_model *model = &scratch->models.plane[k];
    *table = 0;
    if (head->transform != MC_DELTA && !(model->shape & (MC_BY_ABOVE | MC_BY_ACTIVITY)))
        *table = model->map[mc_block_class(head, block)];
    else if (model->tables > 1)
        return mc_plane_contexts(scratch, head, k, above, n);
    return NULL;
}
