/* Working memory of one thread at a time: buffers for one block and the zstd contexts. */
#ifndef MC_SCRATCH_H
#define MC_SCRATCH_H

#include "mc_model.h"

#define MC_PLANE_STRIDE (MC_BLOCK_ELEMENTS + 64) /* kernels may store a whole vector at a plane's end */

typedef struct {
    void *compressor, *decompressor; /* ZSTD_CCtx, ZSTD_DCtx */
    mc_models models, stored; /* what is worked with; what an encoder reads back of it from the finished object */
    mc_decoder decoders[MC_MAX_WIDTH];
    mc_encoder encoders[MC_MAX_WIDTH];
    mc_counts counts[MC_MAX_WIDTH];
    u8 base[MC_BLOCK_ELEMENTS * MC_MAX_WIDTH];
    u8 planes[MC_PLANE_STRIDE * MC_MAX_WIDTH];
    u8 exponents[MC_PLANE_STRIDE], contexts[MC_PLANE_STRIDE], tables[MC_PLANE_STRIDE];
    u8 words[MC_BLOCK_ELEMENTS * (MC_MAX_WIDTH + 2) + 256]; /* a block's stream grows downwards in it */
    u8 frames[MC_BLOCK_ELEMENTS * MC_MAX_WIDTH]; /* zstd frames of a block's planes */
    u8 decoded[MC_BLOCK_ELEMENTS * MC_MAX_WIDTH];   /* a block that is verified */
    u8 shared[MC_SHARED_BYTES];                      /* the models of an object in their stored form */
    u8 *output; /* room for an encoded object */
    size_t output_room;
    u8 packed[MC_BLOCK_BYTES + 1024]; /* the zstd frame of a plane or of a block of bytes, before it is chosen */
} mc_scratch;

mc_scratch *mc_scratch_new(void); /* NULL when out of memory */
void mc_scratch_free(mc_scratch *scratch);

/* Make scratch->output at least so long; 0 when out of memory. Give back a very long one. */
int mc_scratch_reserve(mc_scratch *scratch, size_t length);
void mc_scratch_trim(mc_scratch *scratch);

#endif
