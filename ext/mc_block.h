/* One block: raw bytes to encoded bytes and back. FORMAT.md has the byte tables. */
#ifndef MC_BLOCK_H
#define MC_BLOCK_H

#include "mc_head.h"
#include "mc_scratch.h"

/* How a plane is stored. */
typedef enum { MC_CONST, MC_RAW, MC_ZSTD, MC_RANS } mc_method;

/* Bytes that an encoded block may take on top of its raw bytes. */
#define MC_BLOCK_OVERHEAD 256

/* The bytes of a base that the caller holds: `data` begins at the first block that was asked for. */
typedef struct {
    const u8 *data;
    size_t length;
} mc_base_bytes;

/*
 * The base's elements for one block, in the object's own dtype: in place when they can be used as they are, else
 * cast or filled up with zeros in scratch->base. `skipped` counts elements from the start of base->data.
 */
const u8 *mc_block_base(mc_scratch *scratch, const mc_head *head, const mc_base_bytes *base, u64 skipped, size_t n);

/* Split the block into scratch->planes, and work out scratch->exponents when there is a base. */
void mc_block_split(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *raw, size_t n, const u8 *base);

/* Fill scratch->exponents: from the base, or, without one, with the block's class. */
void mc_block_exponents(mc_scratch *scratch, const mc_head *head, u64 block, size_t n, const u8 *base);

/*
 * Without a base, the exponent class of all elements is where their block is in the object, in sixteenths, so that the
 * parts of an object can have tables of their own.
 */
static inline unsigned mc_block_class(const mc_head *head, u64 block)
{
    return (unsigned)(block * MC_EXPONENT_CLASSES / head->blocks);
}

/*
 * The contexts of plane k as kernels want them: NULL when all symbols are of one table, which is then in *table. The
 * plane above is complete already.
 */
const u8 *mc_model_contexts(mc_scratch *scratch, const mc_head *head, u64 block, unsigned k, const u8 *above, size_t n,
                            unsigned *table);

/* Does the plane look random, so that it is stored raw without another thought? Looks at a part of it. */
int mc_plane_noise(const u8 *plane, size_t n);
int mc_plane_constant(const u8 *plane, size_t n);

/* The lower 6 bits of the contexts of plane k in scratch->contexts, once the plane above it is known. */
const u8 *mc_plane_contexts(mc_scratch *scratch, const mc_head *head, unsigned k, const u8 *above, size_t n);

/*
 * How many contexts symbols are counted in: 16 when the exponent class is all that is looked at, because there is no
 * base or because there are too few elements to pay for more.
 */
unsigned mc_counted_contexts(const mc_head *head);

/* What a first look at a block's planes tells, a bit a plane. */
typedef struct {
    u8 constant, noise;
} mc_plane_kinds;

/* Look at the block's planes, and count the symbols of those that may be worth a model into scratch->counts. */
mc_plane_kinds mc_block_count(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *raw, const u8 *base);

/*
 * Encode with the models in scratch->models. Returns the length; `out` has room for the raw bytes and MC_BLOCK_OVERHEAD
 * more. Sets bit k of *used when plane k took its model.
 */
size_t mc_block_encode(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *raw, const u8 *base,
                       mc_plane_kinds kinds, u8 *out, unsigned *used);

/* Read and check the models of an object, unpacked when the head says so. Leaves *models alone when it has none. */
int mc_read_models(mc_scratch *scratch, const mc_head *head, const u8 *shared, size_t length, mc_models *models);

/* Read them into scratch->models and get them ready for decoding. */
int mc_read_shared(mc_scratch *scratch, const mc_head *head, const u8 *shared, size_t length);

/* Decode a whole block; does not look at its checksum. */
int mc_block_decode(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *encoded, size_t length, const u8 *base,
                    u8 *raw);

#endif
