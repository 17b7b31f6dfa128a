#include "mc_kernels.h"

#ifdef MC_X86
#include "mc_rans_avx2.h"

#define MC_AVX512 __attribute__((target("avx2,popcnt,avx512f,avx512bw,avx512vl,avx512dq")))
#define INLINE MC_AVX512 static inline __attribute__((always_inline))

/* Decode with 16 states; returns the slots, whose low bytes are the symbols. */
INLINE __m512i take(__m512i *state, __m512i table, __m128i bits, __m512i mask, const u32 *slots, const u8 **at)
{
    const __m512i field = _mm512_set1_epi32(0xfff), low = _mm512_set1_epi32((int)MC_LOW);
    __m512i index = _mm512_or_si512(_mm512_and_si512(*state, mask), _mm512_sll_epi32(table, bits));
    __m512i slot = _mm512_i32gather_epi32(index, slots, 4);
    __m512i frequency = _mm512_and_si512(_mm512_srli_epi32(slot, 8), field);
    __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srl_epi32(*state, bits)), _mm512_srli_epi32(slot, 20));
    __mmask16 who = _mm512_cmplt_epu32_mask(x, low);
    __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)*at));
    *state = _mm512_mask_or_epi32(x, who, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(who, words));
    *at += 2 * __builtin_popcount(who);
    return slot;
}

INLINE size_t decode_groups(u8 *out, size_t i, size_t full, const u8 *contexts, const mc_model *model, const u32 *slots,
                            __m512i state[2], mc_words *words, unsigned *nonzero, int active)
{
    const __m128i bits = _mm_cvtsi32_si128((int)model->bits);
    const __m512i mask = _mm512_set1_epi32((1 << model->bits) - 1);
    __m512i s0 = state[0], s1 = state[1];
    const u8 *at = words->at, *limit = words->limit;
    for (; i < full && at <= limit; i += MC_LANES) {
        __m256i table = _mm256_setzero_si256();
        if (contexts) {
            const u8 *row = model->map + (active ? MC_STATIC_CONTEXTS * mc_activity(*nonzero) : 0);
            table = mc_lookup32(row, _mm256_loadu_si256((const __m256i *)(contexts + i)));
        }
        __m512i a = take(&s0, _mm512_cvtepu8_epi32(_mm256_castsi256_si128(table)), bits, mask, slots, &at);
        __m512i b = take(&s1, _mm512_cvtepu8_epi32(_mm256_extracti128_si256(table, 1)), bits, mask, slots, &at);
        _mm_storeu_si128((__m128i *)(out + i), _mm512_cvtepi32_epi8(a));
        _mm_storeu_si128((__m128i *)(out + i + 16), _mm512_cvtepi32_epi8(b));
        if (active) {
            const __m512i symbol = _mm512_set1_epi32(255);
            *nonzero = (unsigned)(__builtin_popcount(_mm512_test_epi32_mask(a, symbol)) +
                                  __builtin_popcount(_mm512_test_epi32_mask(b, symbol)));
        }
    }
    state[0] = s0, state[1] = s1;
    words->at = at;
    return i;
}

INLINE int decode(u8 *out, size_t n, const u8 *contexts, const mc_model *model, const u32 *slots, mc_reader *reader,
                  int active)
{
    const size_t full = n - n % MC_LANES;
    unsigned nonzero = 0;
    __m512i state[2] = {_mm512_loadu_si512(reader->state), _mm512_loadu_si512(reader->state + 16)};
    mc_words words;
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
    _mm512_storeu_si512(reader->state, state[0]);
    _mm512_storeu_si512(reader->state + 16, state[1]);
    return mc_rans_decode_group(out + i, (unsigned)(n - i), contexts ? contexts + i : NULL,
                                model->map + MC_STATIC_CONTEXTS * mc_activity(nonzero), model->bits, slots, reader);
}

MC_AVX512 int mc_rans_decode_avx512(u8 *out, size_t n, const u8 *contexts, unsigned table, const mc_model *model,
                                    const mc_decoder *decoder, mc_reader *reader)
{
    if (!contexts)
        return decode(out, n, NULL, model, decoder->slots + ((size_t)table << model->bits), reader, 0);
    if (!(model->shape & MC_BY_ACTIVITY))
        return decode(out, n, contexts, model, decoder->slots, reader, 0);
    return decode(out, n, contexts, model, decoder->slots, reader, 1);
}

/* Encode with 16 states; `index` is table << 8 | symbol of each. */
INLINE void give(__m512i *state, __m512i index, const u32 *reciprocals, const u32 *steps, __m512i total, __m128i limit_shift, u8 **at)
{
    __m512i reciprocal = _mm512_i32gather_epi32(index, reciprocals, 4);
    __m512i step = _mm512_i32gather_epi32(index, steps, 4);
    __m512i complement = _mm512_and_si512(step, _mm512_set1_epi32(0xfff));
    __m512i bias = _mm512_and_si512(_mm512_srli_epi32(step, 12), _mm512_set1_epi32(0x1fff));
    __m512i limit = _mm512_sll_epi32(_mm512_sub_epi32(total, complement), limit_shift);
    __mmask16 who = _mm512_cmpge_epu32_mask(*state, limit);
    unsigned count = (unsigned)__builtin_popcount(who);
    *at -= 2 * count;
    __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(who, *state));
    _mm256_mask_storeu_epi16(*at, (__mmask16)((1u << count) - 1), words);
    __m512i x = _mm512_mask_srli_epi32(*state, who, *state, 16);
    __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(x, reciprocal), 32);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(reciprocal, 32));
    __m512i q = _mm512_srlv_epi32(_mm512_mask_blend_epi32(0xaaaa, even, odd), _mm512_srli_epi32(step, 25));
    *state = _mm512_add_epi32(_mm512_add_epi32(x, bias), _mm512_mullo_epi32(q, complement));
}

INLINE __m512i index16(const u8 *symbols, const u8 *tables)
{
    __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)symbols));
    if (tables)
        index = _mm512_or_si512(index, _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)tables)), 8));
    return index;
}

INLINE void encode(const u8 *symbols, size_t n, const u8 *tables, unsigned table, unsigned bits, const mc_encoder *encoder,
                   mc_writer *writer)
{
    const size_t first = (size_t)table << 8;
    const u32 *reciprocals = encoder->reciprocal + first, *steps = encoder->step + first;
    size_t i = n - n % MC_LANES;
    mc_rans_encode_group(symbols + i, (unsigned)(n - i), tables ? tables + i : NULL, table, bits, encoder, writer);
    const __m512i total = _mm512_set1_epi32(1 << bits);
    const __m128i shift = _mm_cvtsi32_si128(31 - (int)bits);
    __m512i s0 = _mm512_loadu_si512(writer->state), s1 = _mm512_loadu_si512(writer->state + 16);
    u8 *at = writer->at;
    while (i) {
        i -= MC_LANES;
        give(&s1, index16(symbols + i + 16, tables ? tables + i + 16 : NULL), reciprocals, steps, total, shift, &at);
        give(&s0, index16(symbols + i, tables ? tables + i : NULL), reciprocals, steps, total, shift, &at);
    }
    _mm512_storeu_si512(writer->state, s0);
    _mm512_storeu_si512(writer->state + 16, s1);
    writer->at = at;
}

MC_AVX512 void mc_rans_encode_avx512(const u8 *symbols, size_t n, const u8 *tables, unsigned table,
                              unsigned bits, const mc_encoder *encoder, mc_writer *writer)
{
    if (tables)
        encode(symbols, n, tables, 0, bits, encoder, writer);
    else
        encode(symbols, n, NULL, table, bits, encoder, writer);
}
#endif
