/* What the decoder knows of an element before it decodes a byte of it: see mc_rans.h. */
#ifndef MC_CONTEXT_H
#define MC_CONTEXT_H

#include "mc_rans.h"

/* out[i] = top - exponent of base element i, held within 0 and 15. */
typedef void mc_exponent_fn(u8 *out, const u8 *base, size_t n, unsigned shift, unsigned mask, unsigned top);

/* out[i] = exponents[i] and the class of above[i]: the lower 6 bits of a context. */
typedef void mc_above_fn(u8 *out, const u8 *exponents, const u8 *above, size_t n);

/*
 * The table of each of n symbols: tables[i] = map[its context], with `contexts` the lower 6 bits of it. May read and
 * write up to 31 bytes past the end.
 */
typedef void mc_classify_fn(u8 *tables, const u8 *contexts, const u8 *symbols, size_t n, const u8 map[MC_CONTEXTS]);

#endif
