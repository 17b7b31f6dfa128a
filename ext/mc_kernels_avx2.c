#include "mc_kernels.h"

#ifdef MC_X86
#define MC_TARGET __attribute__((target("avx2")))
#define MC_NAME(name) name##_avx2
#include "mc_planes_body.h"

const mc_kernels mc_kernels_avx2 = {"avx2", TABLE(split), TABLE(merge)};
#endif
