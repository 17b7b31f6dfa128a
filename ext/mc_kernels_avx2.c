#include "mc_kernels.h"

#ifdef MC_X86
#define MC_TARGET __attribute__((target("avx2")))
#define MC_NAME(name) name##_avx2
#include "mc_planes_body.h"
#include "mc_context_body.h"

const mc_kernels mc_kernels_avx2 = {
    "avx2",
    TABLE(split),
    TABLE(merge),
    {MC_NAME(exponent8), MC_NAME(exponent16), MC_NAME(exponent32), MC_NAME(exponent64)},
    MC_NAME(add_above),
    mc_classify_avx2,
    mc_rans_decode_avx2,
    mc_rans_encode_avx2,
};
#endif
