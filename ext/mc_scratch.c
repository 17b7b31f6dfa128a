#include <stdlib.h>
#include <zstd.h>

#include "mc_scratch.h"

#define MC_OUTPUT_KEPT ((size_t)20 << 20) /* enough for the longest data object */

mc_scratch *mc_scratch_new(void)
{
    mc_scratch *scratch = malloc(sizeof *scratch);
    if (!scratch)
        return NULL;
    scratch->compressor = ZSTD_createCCtx();
    scratch->decompressor = ZSTD_createDCtx();
    scratch->output = NULL;
    scratch->output_room = 0;
    if (scratch->compressor && scratch->decompressor)
        return scratch;
    mc_scratch_free(scratch);
    return NULL;
}

void mc_scratch_free(mc_scratch *scratch)
{
    if (!scratch)
        return;
    ZSTD_freeCCtx(scratch->compressor);
    ZSTD_freeDCtx(scratch->decompressor);
    free(scratch->output);
    free(scratch);
}

int mc_scratch_reserve(mc_scratch *scratch, size_t length)
{
    if (length <= scratch->output_room)
        return 1;
    free(scratch->output);
    scratch->output = malloc(length);
    scratch->output_room = scratch->output ? length : 0;
    return scratch->output != NULL;
}

void mc_scratch_trim(mc_scratch *scratch)
{
    if (scratch->output_room <= MC_OUTPUT_KEPT)
        return;
    free(scratch->output);
    scratch->output = NULL;
    scratch->output_room = 0;
}
