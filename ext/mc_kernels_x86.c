/* AVX2 and AVX-512: they differ in rANS alone, since the rest is bound by memory with AVX2 already. */
#include "mc_kernels.h"

#ifdef MC_X86
#include "mc_planes_avx2.h"

#define MC_TARGET __attribute__((target("avx2")))
#define MC_NAME(name) name##_avx2
#include "mc_planes_body.h"
WIDTH(8)
WIDTH(64)

#define PLANES                                                                                               \
    {ROW(split, 8),                                                                                          \
     {mc_split16_plain_avx2, mc_split16_rotate_avx2, mc_split16_delta_avx2},                                 \
     {mc_split32_plain_avx2, mc_split32_rotate_avx2, mc_split32_delta_avx2},                                 \
     ROW(split, 64)},                                                                                        \
        {ROW(merge, 8),                                                                                      \
         {mc_merge16_plain_avx2, mc_merge16_rotate_avx2, mc_merge16_delta_avx2},                             \
         {mc_merge32_plain_avx2, mc_merge32_rotate_avx2, mc_merge32_delta_avx2},                             \
         ROW(merge, 64)},                                                                                    \
        {exponent8_avx2, mc_exponent16_avx2, mc_exponent32_avx2, exponent64_avx2}, add_above_avx2,           \
        mc_classify_avx2

const mc_kernels mc_kernels_avx2 = {"avx2", PLANES, mc_rans_decode_avx2, mc_rans_encode_avx2, mc_hash_avx2};
const mc_kernels mc_kernels_avx512 = {"avx512", PLANES, mc_rans_decode_avx512, mc_rans_encode_avx512, mc_hash_avx2};
#endif
