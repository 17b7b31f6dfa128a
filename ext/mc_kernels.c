#include "mc_kernels.h"

static const mc_kernels *chosen;

static const mc_kernels *supported(const char *name)
{
#ifdef MC_X86
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && (!name || !strcmp(name, "avx512")))
        return &mc_kernels_avx512;
    if (avx2 && (!name || !strcmp(name, "avx2")))
        return &mc_kernels_avx2;
#endif
    return !name || !strcmp(name, "scalar") ? &mc_kernels_scalar : NULL;
}

const mc_kernels *mc_kernels_now(void)
{
    const mc_kernels *now = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
    return now ? now : supported(NULL);
}

int mc_kernels_use(const char *name)
{
    const mc_kernels *found = supported(name);
    if (found)
        __atomic_store_n(&chosen, found, __ATOMIC_RELEASE);
    return found != NULL;
}
