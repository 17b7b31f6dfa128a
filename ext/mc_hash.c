#define XXH_INLINE_ALL
#include <xxhash.h>

#include "mc_kernels.h"

u64 mc_hash_scalar(const void *data, size_t length) { return XXH3_64bits(data, length); }
u64 mc_xxh3(const void *data, size_t length) { return mc_kernels_now()->hash(data, length); }
