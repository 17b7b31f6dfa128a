#include "mc_kernels.h"

#ifdef MC_X86
#define MC_TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512vl,avx512dq")))
#define MC_NAME(name) name##_avx512
#include "mc_planes_body.h"

const mc_kernels mc_kernels_avx512 = {"avx512", TABLE(split), TABLE(merge)};
#endif
