/* Elements to byte planes and back, through rotation or through the difference to a base. */
#ifndef MC_PLANES_H
#define MC_PLANES_H

#include "mc_base.h"

typedef enum {
    MC_PLAIN = 1,  /* the element as it is */
    MC_ROTATE = 2, /* rotated left by one: a float's exponent fills the top byte, its sign is the lowest bit */
    MC_DELTA = 3   /* zigzag(element - base element), so that small differences of either sign are small numbers */
} mc_transform;

/* Plane k gets byte k (0 = lowest) of each transformed element. `base` is read for MC_DELTA only. */
typedef void mc_split_fn(const u8 *current, const u8 *base, size_t n, u8 *const planes[MC_MAX_WIDTH]);
typedef void mc_merge_fn(u8 *current, const u8 *base, size_t n, const u8 *const planes[MC_MAX_WIDTH]);

#endif
