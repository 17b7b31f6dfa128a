/* Vector helpers that the AVX2 and the AVX-512 kernels share. */
#ifndef MC_RANS_AVX2_H
#define MC_RANS_AVX2_H

#include <immintrin.h>

#include "mc_rans.h"

#define MC_WORDS_NEAR_END 160
#define MC_AVX2 __attribute__((target("avx2,popcnt")))

/* row[contexts] for 32 contexts below 64. */
MC_AVX2 static inline __m256i mc_lookup32(const u8 *row, __m256i contexts)
{
    __m256i r0 = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)row));
    __m256i r1 = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(row + 16)));
    __m256i r2 = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(row + 32)));
    __m256i r3 = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(row + 48)));
    /* Bit 4, then bit 5, of each context goes to the sign bit, which is what a blend looks at. */
    __m256i bit4 = _mm256_slli_epi16(contexts, 3), bit5 = _mm256_slli_epi16(contexts, 2);
    __m256i low = _mm256_and_si256(contexts, _mm256_set1_epi8(15));
    __m256i a = _mm256_blendv_epi8(_mm256_shuffle_epi8(r0, low), _mm256_shuffle_epi8(r1, low), bit4);
    __m256i b = _mm256_blendv_epi8(_mm256_shuffle_epi8(r2, low), _mm256_shuffle_epi8(r3, low), bit4);
    return _mm256_blendv_epi8(a, b, bit5);
}

MC_AVX2 static inline unsigned mc_nonzero32(__m256i symbols)
{
    u32 zeros = (u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(symbols, _mm256_setzero_si256()));
    return MC_LANES - (unsigned)__builtin_popcount(zeros);
}

/*
 * Where the vector loops read words. A loop goes on while at <= limit; each group takes at most 64 bytes and reads at
 * most 80. First limit lies so far before the end of the stream that nothing past it is read, then the loop goes on in
 * a copy of the last bytes with zeros behind it: to be past limit there is to have used words that do not exist.
 */
typedef struct {
    const u8 *at, *limit;
    u8 tail[MC_WORDS_NEAR_END + 128];
} mc_words;

static inline void mc_words_open(mc_words *words, const mc_reader *reader)
{
    words->at = reader->at;
    words->limit = reader->end - reader->at >= MC_WORDS_NEAR_END ? reader->end - MC_WORDS_NEAR_END : NULL;
}

static inline void mc_words_tail(mc_words *words, const mc_reader *reader)
{
    size_t left = (size_t)(reader->end - words->at); /* at most MC_WORDS_NEAR_END, since at is past limit */
    memcpy(words->tail, words->at, left);
    memset(words->tail + left, 0, sizeof words->tail - left);
    words->at = words->tail;
    words->limit = words->tail + left;
}

#endif
