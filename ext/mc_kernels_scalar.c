/* Portable C: every machine, and the meaning of the other sets. */
#include "mc_kernels.h"

#define MC_TARGET
#define MC_NAME(name) name##_scalar
#include "mc_planes_body.h"
WIDTH(8)
WIDTH(16)
WIDTH(32)
WIDTH(64)

const mc_kernels mc_kernels_scalar = {
    "scalar",
    {ROW(split, 8), ROW(split, 16), ROW(split, 32), ROW(split, 64)},
    {ROW(merge, 8), ROW(merge, 16), ROW(merge, 32), ROW(merge, 64)},
    {exponent8_scalar, exponent16_scalar, exponent32_scalar, exponent64_scalar},
    add_above_scalar,
    mc_classify_scalar,
    mc_rans_decode_scalar,
    mc_rans_encode_scalar,
    mc_hash_scalar,
};
