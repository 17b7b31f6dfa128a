/* Content-defined chunking: borders that depend on the bytes around them and not on where the bytes are. */
#ifndef MC_CHUNK_H
#define MC_CHUNK_H

#include "mc_base.h"

typedef struct {
    u64 gear[256];
    u64 minimum, average, maximum; /* bytes of a chunk */
    u64 strict, loose;             /* border masks before and after the average length */
    u64 hash, length;              /* of the chunk in work */
    int complete;                  /* the chunk in work has its border: the next byte begins another */
} mc_chunker;

void mc_chunker_init(mc_chunker *chunker, u64 minimum, u64 average, u64 maximum);

/*
 * Take bytes from `data` up to the end of the chunk in work. Returns how many were taken; `*border` is set when they
 * complete the chunk, whose length is then in chunker->length until the next call.
 */
size_t mc_chunker_push(mc_chunker *chunker, const u8 *data, size_t length, int *border);

#endif
