#include "mc_kernels.h"

#ifdef MC_X86
#include "mc_rans_avx2.h"

#define INLINE MC_AVX2 static inline __attribute__((always_inline))

/* For a mask of 8 lanes that take a word: which word each takes, and which lanes give one, packed to the end. */
static u32 take_order[256][8], give_order[256][8];

__attribute__((constructor)) static void fill_orders(void)
{
    for (unsigned mask = 0; mask < 256; mask++) {
        unsigned words = (unsigned)__builtin_popcount(mask), taken = 0;
        for (unsigned lane = 0; lane < 8; lane++)
            if (mask >> lane & 1) {
                take_order[mask][lane] = taken;
                give_order[mask][8 - words + taken++] = lane;
            }
    }
}

/* Decode with 8 states; returns the symbols in the low bytes. */
INLINE __m256i take(__m256i *state, __m256i table, __m128i bits, __m256i mask, const u32 *slots, const u8 **at)
{
    const __m256i field = _mm256_set1_epi32(0xfff), low = _mm256_set1_epi32((int)MC_LOW);
    __m256i index = _mm256_or_si256(_mm256_and_si256(*state, mask), _mm256_sll_epi32(table, bits));
    __m256i slot = _mm256_i32gather_epi32((const int *)slots, index, 4);
    __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(slot, 8), field);
    __m256i x = _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srl_epi32(*state, bits)), _mm256_srli_epi32(slot, 20));
    __m256i needy = _mm256_cmpgt_epi32(low, x);
    unsigned who = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(needy));
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)*at));
    words = _mm256_permutevar8x32_epi32(words, _mm256_loadu_si256((const __m256i *)take_order[who]));
    *state = _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, 16), words), needy);
    *at += 2 * __builtin_popcount(who);
    return _mm256_and_si256(slot, _mm256_set1_epi32(255));
}

INLINE size_t decode_groups(u8 *out, size_t i, size_t full, const u8 *contexts, const mc_model *model, const u32 *slots,
                            __m256i state[4], mc_words *words, unsigned *nonzero, int active)
{
    const __m128i bits = _mm_cvtsi32_si128((int)model->bits);
    const __m256i mask = _mm256_set1_epi32((1 << model->bits) - 1);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i s0 = state[0], s1 = state[1], s2 = state[2], s3 = state[3];
    const u8 *at = words->at, *limit = words->limit;
    for (; i < full && at <= limit; i += MC_LANES) {
        __m128i t0 = _mm_setzero_si128(), t1 = t0, t2 = t0, t3 = t0;
        if (contexts) {
            const u8 *row = model->map + (active ? MC_STATIC_CONTEXTS * mc_activity(*nonzero) : 0);
            __m256i table = mc_lookup32(row, _mm256_loadu_si256((const __m256i *)(contexts + i)));
            t0 = _mm256_castsi256_si128(table);
            t2 = _mm256_extracti128_si256(table, 1);
            t1 = _mm_srli_si128(t0, 8);
            t3 = _mm_srli_si128(t2, 8);
        }
        __m256i a = take(&s0, _mm256_cvtepu8_epi32(t0), bits, mask, slots, &at);
        __m256i b = take(&s1, _mm256_cvtepu8_epi32(t1), bits, mask, slots, &at);
        __m256i c = take(&s2, _mm256_cvtepu8_epi32(t2), bits, mask, slots, &at);
        __m256i d = take(&s3, _mm256_cvtepu8_epi32(t3), bits, mask, slots, &at);
        __m256i symbols = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
        symbols = _mm256_permutevar8x32_epi32(symbols, order);
        _mm256_storeu_si256((__m256i *)(out + i), symbols);
        if (active)
            *nonzero = mc_nonzero32(symbols);
    }
    state[0] = s0, state[1] = s1, state[2] = s2, state[3] = s3;
    words->at = at;
    return i;
}

INLINE int decode(u8 *out, size_t n, const u8 *contexts, const mc_model *model, const u32 *slots, mc_reader *reader,
                  int active)
{
    const size_t full = n - n % MC_LANES;
    unsigned nonzero = 0;
    __m256i state[4];
    mc_words words;
    for (int k = 0; k < 4; k++)
        state[k] = _mm256_loadu_si256((const __m256i *)(reader->state + 8 * k));
    mc_words_open(&words, reader);
    size_t i = words.limit ? decode_groups(out, 0, full, contexts, model, slots, state, &words, &nonzero, active) : 0;
    if (i < full) {
        mc_words_tail(&words, reader);
        i = decode_groups(out, i, full, contexts, model, slots, state, &words, &nonzero, active);
        if (i < full || words.at > words.limit)
            return MC_E_STREAM;
        words.at = reader->end - (words.limit - words.at);
    }
    reader->at = words.at;
    for (int k = 0; k < 4; k++)
        _mm256_storeu_si256((__m256i *)(reader->state + 8 * k), state[k]);
    return mc_rans_decode_group(out + i, (unsigned)(n - i), contexts ? contexts + i : NULL,
                                model->map + MC_STATIC_CONTEXTS * mc_activity(nonzero), model->bits, slots, reader);
}

MC_AVX2 int mc_rans_decode_avx2(u8 *out, size_t n, const u8 *contexts, unsigned table, const mc_model *model,
                                const mc_decoder *decoder, mc_reader *reader)
{
    if (!contexts)
        return decode(out, n, NULL, model, decoder->slots + ((size_t)table << model->bits), reader, 0);
    if (!(model->shape & MC_BY_ACTIVITY))
        return decode(out, n, contexts, model, decoder->slots, reader, 0);
    return decode(out, n, contexts, model, decoder->slots, reader, 1);
}

/* Encode with 8 states; `index` is table << 8 | symbol of each. */
INLINE void give(__m256i *state, __m256i index, const u32 *reciprocals, const u32 *steps, __m256i total, __m128i limit_shift, u8 **at)
{
    __m256i reciprocal = _mm256_i32gather_epi32((const int *)reciprocals, index, 4);
    __m256i step = _mm256_i32gather_epi32((const int *)steps, index, 4);
    __m256i complement = _mm256_and_si256(step, _mm256_set1_epi32(0xfff));
    __m256i bias = _mm256_and_si256(_mm256_srli_epi32(step, 12), _mm256_set1_epi32(0x1fff));
    __m256i limit = _mm256_sll_epi32(_mm256_sub_epi32(total, complement), limit_shift);
    __m256i stays = _mm256_cmpgt_epi32(limit, *state);
    unsigned who = ~(unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(stays)) & 255;
    __m256i words = _mm256_permutevar8x32_epi32(*state, _mm256_loadu_si256((const __m256i *)give_order[who]));
    words = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    /* What lies below the words that count is written over by the next ones. */
    _mm_storeu_si128((__m128i *)(*at - 16), packed);
    *at -= 2 * __builtin_popcount(who);
    __m256i x = _mm256_blendv_epi8(_mm256_srli_epi32(*state, 16), *state, stays);
    __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(x, reciprocal), 32);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(reciprocal, 32));
    __m256i q = _mm256_srlv_epi32(_mm256_blend_epi32(even, odd, 0xaa), _mm256_srli_epi32(step, 25));
    *state = _mm256_add_epi32(_mm256_add_epi32(x, bias), _mm256_mullo_epi32(q, complement));
}

INLINE __m256i index8(const u8 *symbols, const u8 *tables)
{
    __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)symbols));
    if (tables)
        index = _mm256_or_si256(index, _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)tables)), 8));
    return index;
}

INLINE void encode(const u8 *symbols, size_t n, const u8 *tables, unsigned table, unsigned bits, const mc_encoder *encoder,
                   mc_writer *writer)
{
    const size_t first = (size_t)table << 8;
    const u32 *reciprocals = encoder->reciprocal + first, *steps = encoder->step + first;
    size_t i = n - n % MC_LANES;
    mc_rans_encode_group(symbols + i, (unsigned)(n - i), tables ? tables + i : NULL, table, bits, encoder, writer);
    const __m256i total = _mm256_set1_epi32(1 << bits);
    const __m128i shift = _mm_cvtsi32_si128(31 - (int)bits);
    __m256i state[4];
    u8 *at = writer->at;
    for (int k = 0; k < 4; k++)
        state[k] = _mm256_loadu_si256((const __m256i *)(writer->state + 8 * k));
    while (i) {
        i -= MC_LANES;
        for (int k = 3; k >= 0; k--)
            give(&state[k], index8(symbols + i + 8 * k, tables ? tables + i + 8 * k : NULL), reciprocals, steps, total, shift, &at);
    }
    for (int k = 0; k < 4; k++)
        _mm256_storeu_si256((__m256i *)(writer->state + 8 * k), state[k]);
    writer->at = at;
}

MC_AVX2 void mc_rans_encode_avx2(const u8 *symbols, size_t n, const u8 *tables, unsigned table,
                              unsigned bits, const mc_encoder *encoder, mc_writer *writer)
{
    if (tables)
        encode(symbols, n, tables, 0, bits, encoder, writer);
    else
        encode(symbols, n, NULL, table, bits, encoder, writer);
}

MC_AVX2 void mc_classify_avx2(u8 *tables, const u8 *contexts, const u8 *symbols, size_t n, const u8 map[MC_CONTEXTS])
{
    unsigned nonzero = 0;
    for (size_t i = 0; i < n; i += MC_LANES) {
        const u8 *row = map + MC_STATIC_CONTEXTS * mc_activity(nonzero);
        __m256i table = mc_lookup32(row, _mm256_loadu_si256((const __m256i *)(contexts + i)));
        _mm256_storeu_si256((__m256i *)(tables + i), table);
        nonzero = mc_nonzero32(_mm256_loadu_si256((const __m256i *)(symbols + i)));
    }
}
#endif
