/* Splitting and merging of 2- and 4-byte elements, and their exponents, with AVX2; mc_planes_body.h says what they do. */
#ifndef MC_PLANES_AVX2_H
#define MC_PLANES_AVX2_H

#include "mc_context.h"
#include "mc_planes.h"

mc_split_fn mc_split16_plain_avx2, mc_split16_rotate_avx2, mc_split16_delta_avx2;
mc_split_fn mc_split32_plain_avx2, mc_split32_rotate_avx2, mc_split32_delta_avx2;
mc_merge_fn mc_merge16_plain_avx2, mc_merge16_rotate_avx2, mc_merge16_delta_avx2;
mc_merge_fn mc_merge32_plain_avx2, mc_merge32_rotate_avx2, mc_merge32_delta_avx2;
mc_exponent_fn mc_exponent16_avx2, mc_exponent32_avx2;

#endif
