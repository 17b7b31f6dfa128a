#include "mc_cast.h"

typedef struct {
    int exponent_bits, mantissa_bits, has_infinity;
} shape;

static const shape F64 = {11, 52, 1}, F32 = {8, 23, 1}, BF16 = {8, 7, 1}, F16 = {5, 10, 1}, E4M3 = {4, 3, 0},
                   E5M2 = {5, 2, 1};

#define INLINE static inline __attribute__((always_inline))

/* Shift right, rounding to nearest and ties to even; a shift past the value's width gives 0. */
INLINE u64 round_shift(u64 value, int shift)
{
    if (shift <= 0)
        return value << -shift;
    if (shift > 62)
        return 0;
    return (value + (((u64)1 << (shift - 1)) - 1) + ((value >> shift) & 1)) >> shift;
}

INLINE u64 convert(u64 x, shape s, shape d)
{
    const int source_bias = (1 << (s.exponent_bits - 1)) - 1, bias = (1 << (d.exponent_bits - 1)) - 1;
    const u64 source_top = ((u64)1 << s.exponent_bits) - 1, top = ((u64)1 << d.exponent_bits) - 1;
    const u64 infinity = d.has_infinity ? top << d.mantissa_bits : ((top << d.mantissa_bits) | 7);
    const u64 nan = d.has_infinity ? infinity | (u64)1 << (d.mantissa_bits - 1) : infinity;
    const u64 sign = (x >> (s.exponent_bits + s.mantissa_bits)) << (d.exponent_bits + d.mantissa_bits);
    u64 mantissa = x & (((u64)1 << s.mantissa_bits) - 1);
    const u64 field = (x >> s.mantissa_bits) & source_top;
    int exponent = (int)field - source_bias;

    if (field == source_top && (s.has_infinity || mantissa == 7)) {
        if (s.has_infinity && mantissa == 0)
            return sign | infinity;
        return sign | nan;
    }
    if (field == 0) {
        if (mantissa == 0)
            return sign;
        int shift = __builtin_clzll(mantissa) - (63 - s.mantissa_bits);
        mantissa <<= shift;
        exponent = 1 - source_bias - shift;
    } else {
        mantissa |= (u64)1 << s.mantissa_bits;
    }
    exponent += bias;
    const int drop = s.mantissa_bits - d.mantissa_bits;
    /* The implicit bit adds one to the exponent field, and so does a carry out of the mantissa. */
    u64 out = exponent >= 1 ? ((u64)(exponent - 1) << d.mantissa_bits) + round_shift(mantissa, drop)
                            : round_shift(mantissa, drop + 1 - exponent);
    return sign | (out < infinity ? out : infinity);
}

#define CAST(FROM, from_bits, TO, to_bits)                                                                   \
    static void FROM##_to_##TO(u8 *out, const u8 *in, size_t n)                                              \
    {                                                                                                        \
        for (size_t i = 0; i < n; i++)                                                                       \
            ((u##to_bits##u *)out)[i] = (u##to_bits)convert(((const u##from_bits##u *)in)[i], FROM, TO);     \
    }
#define CASTS(FROM, from_bits)                                                                               \
    CAST(FROM, from_bits, F64, 64)                                                                           \
    CAST(FROM, from_bits, F32, 32)                                                                           \
    CAST(FROM, from_bits, BF16, 16)                                                                          \
    CAST(FROM, from_bits, F16, 16)                                                                           \
    CAST(FROM, from_bits, E4M3, 8)                                                                           \
    CAST(FROM, from_bits, E5M2, 8)
CASTS(F64, 64)
CASTS(BF16, 16)
CASTS(F16, 16)
CASTS(E4M3, 8)
CASTS(E5M2, 8)
CAST(F32, 32, F64, 64)
CAST(F32, 32, F32, 32)
CAST(F32, 32, F16, 16)
CAST(F32, 32, E4M3, 8)
CAST(F32, 32, E5M2, 8)

/* The everyday pair, in a form that compilers vectorise: the same result as convert(). */
static void F32_to_BF16(u8 *out, const u8 *in, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        u32 x = ((const u32u *)in)[i];
        u32 rounded = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
        u32 nan = (x >> 16 & 0x8000) | 0x7fc0;
        ((u16u *)out)[i] = (u16)((x & 0x7fffffff) > 0x7f800000 ? nan : rounded);
    }
}

typedef void cast_fn(u8 *, const u8 *, size_t);
#define ROW(FROM) {FROM##_to_F64, FROM##_to_F32, FROM##_to_BF16, FROM##_to_F16, FROM##_to_E4M3, FROM##_to_E5M2}
static cast_fn *const casts[6][6] = {ROW(F64), ROW(F32), ROW(BF16), ROW(F16), ROW(E4M3), ROW(E5M2)};

void mc_cast(u8 *out, mc_format to, const u8 *in, mc_format from, size_t n)
{
    casts[from - MC_F64][to - MC_F64](out, in, n);
}
