#define XXH_INLINE_ALL
#include <xxhash.h>

#include "mc_base.h"

u64 mc_xxh3(const void *data, size_t length) { return XXH3_64bits(data, length); }
