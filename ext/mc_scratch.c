#include <stdlib.h>
#include <zstd.h>

#include "mc_scratch.h"

mc_scratch *mc_scratch_new(void)
{
    mc_scratch *scratch = malloc(sizeof *scratch);
    if (!scratch)
        return NULL;
    scratch->compressor = ZSTD_createCCtx();
    scratch->decompressor = ZSTD_createDCtx();
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
    free(scratch);
}
