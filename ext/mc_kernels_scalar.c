/* Portable C: every machine, and the meaning of the other sets. */
#include "mc_kernels.h"

#define MC_TARGET
#define MC_NAME(name) name##_scalar
#include "mc_planes_body.h"

const mc_kernels mc_kernels_scalar = {"scalar", TABLE(split), TABLE(merge)};
