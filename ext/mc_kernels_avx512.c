#include "mc_kernels.h"

#ifdef MC_X86
#define MC_TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512vl,avx512dq")))
#define MC_NAME(name) name##_avx512
#include "mc_planes_body.h"
#include "mc_context_body.h"

const mc_kernels mc_kernels_avx512 = {
    "avx512",
    TABLE(split),
    TABLE(merge),
    {MC_NAME(exponent8), MC_NAME(exponent16), MC_NAME(exponent32), MC_NAME(exponent64)},
    MC_NAME(add_above),
    mc_classify_avx2,
    mc_rans_decode_avx512,
    mc_rans_encode_avx512,
};
#endif
