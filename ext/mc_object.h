/* A whole object: raw bytes to an encoded object, and ranges of its blocks back. */
#ifndef MC_OBJECT_H
#define MC_OBJECT_H

#include "mc_block.h"

typedef struct {
    const u8 *raw;
    size_t raw_length;
    unsigned dtype, transform;
    mc_base_bytes base; /* the whole base; for MC_DELTA */
    unsigned base_dtype;
    u64 base_start;
    int models; /* whether rANS may be used: its models do not pay in a very small object */
    int verify; /* decode each block again and compare it with `raw`, and read the finished head */
} mc_request;

/* Room that mc_encode() needs for its output; 0 when the request is not one that can be encoded. */
size_t mc_encode_bound(const mc_request *request);

/* Write the encoded object to `out` and its length to `*length`. */
int mc_encode(mc_scratch *scratch, const mc_request *request, u8 *out, size_t *length);

typedef struct {
    const u8 *head;
    size_t head_length;
    u64 encoded_length;
    u64 first, count; /* blocks */
    const u8 *payload; /* the encoded blocks, nothing before and nothing after them */
    size_t payload_length;
    mc_base_bytes base; /* begins where the base range of block `first` begins; what it lacks counts as zero */
    u8 *out;
    size_t out_length;
    u8 *const *outs; /* in the place of `out`, one for each block, each with room for its raw bytes; or NULL */
} mc_decode_request;

/* Decode and verify; on failure `*block` is the number of the block that is at fault, if one is. */
int mc_decode(mc_scratch *scratch, const mc_decode_request *request, u64 *block);

#endif
