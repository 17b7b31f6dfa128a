/* XXH3 with AVX2: the header picks its code by what the compiler may use. */
#include "mc_kernels.h"

#ifdef MC_X86
#ifndef __clang__ /* which has no such pragma, and builds the SSE2 code here too */
#pragma GCC target("avx2")
#endif
#define XXH_INLINE_ALL
#include <xxhash.h>

u64 mc_hash_avx2(const void *data, size_t length) { return XXH3_64bits(data, length); }
#endif
