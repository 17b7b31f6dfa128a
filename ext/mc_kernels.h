/* The kernels that exist once per instruction set, and the choice between them. All sets give the same bytes. */
#ifndef MC_KERNELS_H
#define MC_KERNELS_H

#include "mc_context.h"
#include "mc_planes.h"
#include "mc_rans.h"

typedef u64 mc_hash_fn(const void *data, size_t length); /* XXH3, 64 bits */

typedef struct {
    const char *name;
    mc_split_fn *split[4][3]; /* by log2(width), transform - 1 */
    mc_merge_fn *merge[4][3];
    mc_exponent_fn *exponent[4]; /* by log2(width) */
    mc_above_fn *add_above;
    mc_classify_fn *classify;
    mc_rans_decode_fn *decode;
    mc_rans_encode_fn *encode;
    mc_hash_fn *hash;
} mc_kernels;

extern const mc_kernels mc_kernels_scalar, mc_kernels_avx2, mc_kernels_avx512;

mc_hash_fn mc_hash_scalar, mc_hash_avx2;
mc_classify_fn mc_classify_scalar, mc_classify_avx2;
mc_rans_decode_fn mc_rans_decode_scalar, mc_rans_decode_avx2, mc_rans_decode_avx512;
mc_rans_encode_fn mc_rans_encode_scalar, mc_rans_encode_avx2, mc_rans_encode_avx512;

/* The set in use; the best that this processor has, unless mc_kernels_use() chose another. */
const mc_kernels *mc_kernels_now(void);

/* Take the set of this name from here on. Returns 0 when the processor lacks it or the name is unknown. */
int mc_kernels_use(const char *name);

static inline unsigned mc_log2_width(unsigned width) { return width == 8 ? 3 : width >> 1; }

#endif
