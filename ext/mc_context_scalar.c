#include "mc_kernels.h"

void mc_classify_scalar(u8 *tables, const u8 *contexts, const u8 *symbols, size_t n, const u8 map[MC_CONTEXTS])
{
    unsigned nonzero = 0;
    for (size_t i = 0; i < n; i += MC_LANES) {
        unsigned lanes = n - i < MC_LANES ? (unsigned)(n - i) : MC_LANES;
        const u8 *row = map + MC_STATIC_CONTEXTS * mc_activity(nonzero);
        for (unsigned lane = 0; lane < lanes; lane++)
            tables[i + lane] = row[contexts[i + lane]];
        nonzero = mc_count_nonzero(symbols + i, lanes);
    }
}
