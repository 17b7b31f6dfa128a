/* The contexts of mc_rans.h; included like mc_planes_body.h. */
#include "mc_context.h"

#define EXPONENT_CLASSES(bits)                                                                               \
    MC_TARGET static void MC_NAME(exponent##bits)(u8 *restrict out, const u8 *base, size_t n, unsigned shift,  \
                                                  unsigned mask, unsigned top)                               \
    {                                                                                                        \
        const u##bits##u *restrict b = (const u##bits##u *)base;                                             \
        for (size_t i = 0; i < n; i++) {                                                                     \
            int below = (int)top - (int)(b[i] >> shift & mask);                                              \
            below = below < 0 ? 0 : below;                                                                   \
            out[i] = (u8)(below > 15 ? 15 : below);                                                          \
        }                                                                                                    \
    }
EXPONENT_CLASSES(8)
EXPONENT_CLASSES(16)
EXPONENT_CLASSES(32)
EXPONENT_CLASSES(64)

MC_TARGET static void MC_NAME(add_above)(u8 *restrict out, const u8 *restrict exponents, const u8 *restrict above, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (u8)(exponents[i] | ((above[i] > 0) + (above[i] > 1) + (above[i] > 3)) << 4);
}
