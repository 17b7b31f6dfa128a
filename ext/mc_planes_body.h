/*
 * The loops of mc_planes.h and mc_context.h, for a file that defines MC_TARGET (a function attribute) and MC_NAME (which
 * adds the name of an instruction set), and then asks for WIDTH(bits) of the element widths that it needs. Plain C that
 * compilers vectorise: one constant transform per loop.
 */
#include "mc_context.h"
#include "mc_planes.h"

#define FORWARD_PLAIN(bits, c, b) (c)
#define FORWARD_ROTATE(bits, c, b) ((u##bits)(((c) << 1) | ((c) >> (bits - 1))))
#define FORWARD_DELTA(bits, c, b) zigzag##bits((u##bits)((c) - (b)))
#define INVERSE_PLAIN(bits, z, b) (z)
#define INVERSE_ROTATE(bits, z, b) ((u##bits)(((z) >> 1) | ((z) << (bits - 1))))
#define INVERSE_DELTA(bits, z, b) ((u##bits)(unzigzag##bits(z) + (b)))

#define ZIGZAG(bits)                                                                                         \
    MC_TARGET static inline u##bits zigzag##bits(u##bits d)                                                  \
    {                                                                                                        \
        return (u##bits)((u##bits)(d << 1) ^ (u##bits)(0 - (u##bits)(d >> (bits - 1))));                     \
    }                                                                                                        \
    MC_TARGET static inline u##bits unzigzag##bits(u##bits z)                                                \
    {                                                                                                        \
        return (u##bits)((u##bits)(z >> 1) ^ (u##bits)(0 - (u##bits)(z & 1)));                               \
    }
ZIGZAG(8)
ZIGZAG(16)
ZIGZAG(32)
ZIGZAG(64)

#define STORE_8(z) p0[i] = (u8)(z);
#define STORE_16(z) STORE_8(z) p1[i] = (u8)((z) >> 8);
#define STORE_32(z) STORE_16(z) p2[i] = (u8)((z) >> 16); p3[i] = (u8)((z) >> 24);
#define STORE_64(z) STORE_32(z) p4[i] = (u8)((z) >> 32); p5[i] = (u8)((z) >> 40); p6[i] = (u8)((z) >> 48); p7[i] = (u8)((z) >> 56);
#define LOAD_8 p0[i]
#define LOAD_16 (u16)(p0[i] | p1[i] << 8)
#define LOAD_32 ((u32)p0[i] | (u32)p1[i] << 8 | (u32)p2[i] << 16 | (u32)p3[i] << 24)
#define LOAD_64 ((u64)LOAD_32 | (u64)p4[i] << 32 | (u64)p5[i] << 40 | (u64)p6[i] << 48 | (u64)p7[i] << 56)

#define POINTERS_8(constant) constant u8 *restrict p0 = planes[0];
#define POINTERS_16(constant) POINTERS_8(constant) constant u8 *restrict p1 = planes[1];
#define POINTERS_32(constant) POINTERS_16(constant) constant u8 *restrict p2 = planes[2], *restrict p3 = planes[3];
#define POINTERS_64(constant)                                                                                \
    POINTERS_32(constant) constant u8 *restrict p4 = planes[4], *restrict p5 = planes[5];                    \
    constant u8 *restrict p6 = planes[6], *restrict p7 = planes[7];

#define LOOPS(bits, transform, base_element)                                                                 \
    MC_TARGET static void MC_NAME(split##bits##transform)(const u8 *current, const u8 *base, size_t n,        \
                                                          u8 *const planes[MC_MAX_WIDTH])                    \
    {                                                                                                        \
        const u##bits##u *restrict c = (const u##bits##u *)current;                                          \
        const u##bits##u *restrict b = (const u##bits##u *)base;                                             \
        POINTERS_##bits()                                                                                    \
        (void)b;                                                                                             \
        for (size_t i = 0; i < n; i++) {                                                                     \
            u##bits z = FORWARD_##transform(bits, c[i], base_element);                                       \
            STORE_##bits(z)                                                                                  \
        }                                                                                                    \
    }                                                                                                        \
    MC_TARGET static void MC_NAME(merge##bits##transform)(u8 *current, const u8 *base, size_t n,              \
                                                          const u8 *const planes[MC_MAX_WIDTH])              \
    {                                                                                                        \
        u##bits##u *restrict c = (u##bits##u *)current;                                                      \
        const u##bits##u *restrict b = (const u##bits##u *)base;                                             \
        POINTERS_##bits(const)                                                                               \
        (void)b;                                                                                             \
        for (size_t i = 0; i < n; i++) {                                                                     \
            u##bits z = LOAD_##bits;                                                                         \
            c[i] = INVERSE_##transform(bits, z, base_element);                                               \
        }                                                                                                    \
    }

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

#define WIDTH(bits)                                                                                          \
    LOOPS(bits, PLAIN, 0) LOOPS(bits, ROTATE, 0) LOOPS(bits, DELTA, b[i]) EXPONENT_CLASSES(bits)

MC_TARGET static void MC_NAME(add_above)(u8 *restrict out, const u8 *restrict exponents, const u8 *restrict above, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (u8)(exponents[i] | ((above[i] > 0) + (above[i] > 1) + (above[i] > 3)) << 4);
}

#define ROW(what, bits) {MC_NAME(what##bits##PLAIN), MC_NAME(what##bits##ROTATE), MC_NAME(what##bits##DELTA)}
