#include "mc_kernels.h"

#ifdef MC_X86
#include <immintrin.h>

#include "mc_planes_avx2.h"

#define AVX2 __attribute__((target("avx2")))
#define INLINE AVX2 static inline __attribute__((always_inline))

INLINE __m256i load(const u8 *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void store(u8 *p, __m256i v) { _mm256_storeu_si256((__m256i *)p, v); }
INLINE void store128(u8 *p, __m128i v) { _mm_storeu_si128((__m128i *)p, v); }

INLINE __m256i forward16(__m256i c, __m256i b, mc_transform transform)
{
    if (transform == MC_ROTATE)
        return _mm256_or_si256(_mm256_add_epi16(c, c), _mm256_srli_epi16(c, 15));
    if (transform == MC_PLAIN)
        return c;
    __m256i d = _mm256_sub_epi16(c, b);
    return _mm256_xor_si256(_mm256_add_epi16(d, d), _mm256_srai_epi16(d, 15));
}

INLINE __m256i forward32(__m256i c, __m256i b, mc_transform transform)
{
    if (transform == MC_ROTATE)
        return _mm256_or_si256(_mm256_add_epi32(c, c), _mm256_srli_epi32(c, 31));
    if (transform == MC_PLAIN)
        return c;
    __m256i d = _mm256_sub_epi32(c, b);
    return _mm256_xor_si256(_mm256_add_epi32(d, d), _mm256_srai_epi32(d, 31));
}

INLINE __m256i inverse16(__m256i z, __m256i b, mc_transform transform)
{
    if (transform == MC_ROTATE)
        return _mm256_or_si256(_mm256_srli_epi16(z, 1), _mm256_slli_epi16(z, 15));
    if (transform == MC_PLAIN)
        return z;
    __m256i sign = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_and_si256(z, _mm256_set1_epi16(1)));
    return _mm256_add_epi16(_mm256_xor_si256(_mm256_srli_epi16(z, 1), sign), b);
}

INLINE __m256i inverse32(__m256i z, __m256i b, mc_transform transform)
{
    if (transform == MC_ROTATE)
        return _mm256_or_si256(_mm256_srli_epi32(z, 1), _mm256_slli_epi32(z, 31));
    if (transform == MC_PLAIN)
        return z;
    __m256i sign = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_and_si256(z, _mm256_set1_epi32(1)));
    return _mm256_add_epi32(_mm256_xor_si256(_mm256_srli_epi32(z, 1), sign), b);
}

INLINE void split16(const u8 *current, const u8 *base, size_t n, u8 *const planes[], mc_transform transform,
                    mc_split_fn *rest)
{
    const __m256i apart = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
                                           0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    u8 *p0 = planes[0], *p1 = planes[1];
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i b = transform == MC_DELTA ? load(base + 2 * i) : _mm256_setzero_si256();
        __m256i z = forward16(load(current + 2 * i), b, transform);
        z = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(z, apart), 0xd8);
        store128(p0 + i, _mm256_castsi256_si128(z));
        store128(p1 + i, _mm256_extracti128_si256(z, 1));
    }
    u8 *const behind[MC_MAX_WIDTH] = {p0 + i, p1 + i};
    rest(current + 2 * i, base ? base + 2 * i : NULL, n - i, behind);
}

INLINE void merge16(u8 *current, const u8 *base, size_t n, const u8 *const planes[], mc_transform transform,
                    mc_merge_fn *rest)
{
    const u8 *p0 = planes[0], *p1 = planes[1];
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i low = _mm256_permute4x64_epi64(load(p0 + i), 0xd8), high = _mm256_permute4x64_epi64(load(p1 + i), 0xd8);
        __m256i zero = _mm256_setzero_si256();
        __m256i b0 = transform == MC_DELTA ? load(base + 2 * i) : zero, b1 = transform == MC_DELTA ? load(base + 2 * i + 32) : zero;
        store(current + 2 * i, inverse16(_mm256_unpacklo_epi8(low, high), b0, transform));
        store(current + 2 * i + 32, inverse16(_mm256_unpackhi_epi8(low, high), b1, transform));
    }
    const u8 *const behind[MC_MAX_WIDTH] = {p0 + i, p1 + i};
    rest(current + 2 * i, base ? base + 2 * i : NULL, n - i, behind);
}

/* 8 elements to 8 bytes of each plane, planes 0 to 3 one after the other. */
INLINE __m256i apart32(__m256i z)
{
    const __m256i bytes = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                                           0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(z, bytes), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE void split32(const u8 *current, const u8 *base, size_t n, u8 *const planes[], mc_transform transform,
                    mc_split_fn *rest)
{
    u8 *p0 = planes[0], *p1 = planes[1], *p2 = planes[2], *p3 = planes[3];
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i zero = _mm256_setzero_si256();
        __m256i b0 = transform == MC_DELTA ? load(base + 4 * i) : zero, b1 = transform == MC_DELTA ? load(base + 4 * i + 32) : zero;
        __m256i z0 = apart32(forward32(load(current + 4 * i), b0, transform));
        __m256i z1 = apart32(forward32(load(current + 4 * i + 32), b1, transform));
        __m256i even = _mm256_unpacklo_epi64(z0, z1), odd = _mm256_unpackhi_epi64(z0, z1);
        store128(p0 + i, _mm256_castsi256_si128(even));
        store128(p1 + i, _mm256_castsi256_si128(odd));
        store128(p2 + i, _mm256_extracti128_si256(even, 1));
        store128(p3 + i, _mm256_extracti128_si256(odd, 1));
    }
    u8 *const behind[MC_MAX_WIDTH] = {p0 + i, p1 + i, p2 + i, p3 + i};
    rest(current + 4 * i, base ? base + 4 * i : NULL, n - i, behind);
}

INLINE void merge32(u8 *current, const u8 *base, size_t n, const u8 *const planes[], mc_transform transform,
                    mc_merge_fn *rest)
{
    const u8 *p0 = planes[0], *p1 = planes[1], *p2 = planes[2], *p3 = planes[3];
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        /* Unpacking interleaves within halves, so the elements come out as 0-3, 16-19 and so on. */
        __m256i a = load(p0 + i), b = load(p1 + i), c = load(p2 + i), d = load(p3 + i);
        __m256i ab0 = _mm256_unpacklo_epi8(a, b), ab1 = _mm256_unpackhi_epi8(a, b);
        __m256i cd0 = _mm256_unpacklo_epi8(c, d), cd1 = _mm256_unpackhi_epi8(c, d);
        __m256i q0 = _mm256_unpacklo_epi16(ab0, cd0), q1 = _mm256_unpackhi_epi16(ab0, cd0);
        __m256i q2 = _mm256_unpacklo_epi16(ab1, cd1), q3 = _mm256_unpackhi_epi16(ab1, cd1);
        __m256i z[4] = {_mm256_permute2x128_si256(q0, q1, 0x20), _mm256_permute2x128_si256(q2, q3, 0x20),
                        _mm256_permute2x128_si256(q0, q1, 0x31), _mm256_permute2x128_si256(q2, q3, 0x31)};
        for (size_t k = 0; k < 4; k++) {
            __m256i before = transform == MC_DELTA ? load(base + 4 * i + 32 * k) : _mm256_setzero_si256();
            store(current + 4 * i + 32 * k, inverse32(z[k], before, transform));
        }
    }
    const u8 *const behind[MC_MAX_WIDTH] = {p0 + i, p1 + i, p2 + i, p3 + i};
    rest(current + 4 * i, base ? base + 4 * i : NULL, n - i, behind);
}

#define KERNELS(bits, name, transform)                                                                       \
    AVX2 void mc_split##bits##_##name##_avx2(const u8 *current, const u8 *base, size_t n,                     \
                                             u8 *const planes[MC_MAX_WIDTH])                                 \
    {                                                                                                        \
        split##bits(current, base, n, planes, transform,                                                     \
                    mc_kernels_scalar.split[bits / 16][transform - 1]);                                      \
    }                                                                                                        \
    AVX2 void mc_merge##bits##_##name##_avx2(u8 *current, const u8 *base, size_t n,                           \
                                             const u8 *const planes[MC_MAX_WIDTH])                           \
    {                                                                                                        \
        merge##bits(current, base, n, planes, transform,                                                     \
                    mc_kernels_scalar.merge[bits / 16][transform - 1]);                                      \
    }
KERNELS(16, plain, MC_PLAIN)
KERNELS(16, rotate, MC_ROTATE)
KERNELS(16, delta, MC_DELTA)
KERNELS(32, plain, MC_PLAIN)
KERNELS(32, rotate, MC_ROTATE)
KERNELS(32, delta, MC_DELTA)

/* Exponents of 2- and 4-byte formats fit a byte; a saturating subtraction holds the class at 0. */
INLINE __m256i classes(__m256i exponents, unsigned top)
{
    return _mm256_min_epu8(_mm256_subs_epu8(_mm256_set1_epi8((char)top), exponents), _mm256_set1_epi8(15));
}

AVX2 void mc_exponent16_avx2(u8 *out, const u8 *base, size_t n, unsigned shift, unsigned mask, unsigned top)
{
    const __m128i by = _mm_cvtsi32_si128((int)shift);
    const __m256i keep = _mm256_set1_epi16((short)mask);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i a = _mm256_and_si256(_mm256_srl_epi16(load(base + 2 * i), by), keep);
        __m256i b = _mm256_and_si256(_mm256_srl_epi16(load(base + 2 * i + 32), by), keep);
        store(out + i, classes(_mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8), top));
    }
    mc_kernels_scalar.exponent[1](out + i, base + 2 * i, n - i, shift, mask, top);
}

AVX2 void mc_exponent32_avx2(u8 *out, const u8 *base, size_t n, unsigned shift, unsigned mask, unsigned top)
{
    const __m128i by = _mm_cvtsi32_si128((int)shift);
    const __m256i keep = _mm256_set1_epi32((int)mask);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i e[4];
        for (size_t k = 0; k < 4; k++)
            e[k] = _mm256_and_si256(_mm256_srl_epi32(load(base + 4 * i + 32 * k), by), keep);
        __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(e[0], e[1]), _mm256_packus_epi32(e[2], e[3]));
        packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        store(out + i, classes(packed, top));
    }
    mc_kernels_scalar.exponent[2](out + i, base + 4 * i, n - i, shift, mask, top);
}
#endif
