/* Portable C: every machine, and the meaning of the other sets. */
#include "mc_kernels.h"

#define MC_TARGET
#define MC_NAME(name) name##_scalar
#include "mc_planes_body.h"
#include "mc_context_body.h"

const mc_kernels mc_kernels_scalar = {
    "scalar",
    TABLE(split),
    TABLE(merge),
    {MC_NAME(exponent8), MC_NAME(exponent16), MC_NAME(exponent32), MC_NAME(exponent64)},
    MC_NAME(add_above),
    mc_classify_scalar,
    mc_rans_decode_scalar,
    mc_rans_encode_scalar,
};
