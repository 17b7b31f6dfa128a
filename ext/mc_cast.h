/* Elementwise casts between float formats, in integers only, so that every platform gives the same bits. */
#ifndef MC_CAST_H
#define MC_CAST_H

#include "mc_dtype.h"

/*
 * Write n elements of format `to`. Narrowing rounds to nearest, ties to even; widening is exact; subnormals are kept.
 * A NaN becomes the quiet NaN of its sign; what is too large becomes infinity, or NaN in E4M3, which has none.
 * `from` and `to` differ and neither is MC_NOT_FLOAT.
 */
void mc_cast(u8 *out, mc_format to, const u8 *in, mc_format from, size_t n);

#endif
