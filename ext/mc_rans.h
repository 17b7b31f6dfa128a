/*
 * Range asymmetric numeral systems: 32 interleaved states of 32 bits that give and take 16-bit words.
 *
 * One stream serves all the planes of a block that are coded this way, from the highest to the lowest: the states
 * stand at its start and run on from plane to plane. Element i belongs to state i % 32. A symbol is coded with one of
 * up to MC_TABLES tables; which one, its context tells: a value that the decoder knows before the symbol.
 */
#ifndef MC_RANS_H
#define MC_RANS_H

#include "mc_base.h"

#define MC_LANES 32
#define MC_LOW ((u32)1 << 15) /* states are in [MC_LOW, MC_LOW << 16); encoders begin with MC_LOW */
#define MC_TABLES 16
#define MC_BITS_MIN 8
#define MC_BITS_MAX 12 /* frequencies of a table add up to 1 << bits */
#define MC_STATE_BYTES (4 * MC_LANES)

/*
 * A context has 8 bits: bits 0-3 the class of the base element's exponent, bits 4-5 the class of the byte above this
 * one in the same element, bits 6-7 the activity: how many of the 32 symbols before this group were not zero.
 */
#define MC_CONTEXTS 256
#define MC_EXPONENT_CLASSES 16
#define MC_STATIC_CONTEXTS 64 /* the part that does not depend on the plane itself */
#define MC_LEVELS 4
enum { MC_BY_EXPONENT = 1, MC_BY_ABOVE = 2, MC_BY_ACTIVITY = 4 };

static inline unsigned mc_above_class(unsigned above) { return (above > 0) + (above > 1) + (above > 3); }
static inline unsigned mc_activity(unsigned nonzero) { return (nonzero > 0) + (nonzero > 4) + (nonzero > 16); }

typedef struct {
    unsigned tables; /* 0: the plane is not coded this way anywhere */
    unsigned bits;
    unsigned shape;      /* parts of the context that the map depends on, MC_BY_... */
    u8 map[MC_CONTEXTS]; /* context to table */
    u16 frequency[MC_TABLES][256];
} mc_model;

/* What the blocks of an object share: one model a plane. */
typedef struct {
    unsigned exponent_top; /* the base exponent of class 0; see mc_context.h */
    mc_model plane[MC_MAX_WIDTH];
} mc_models;

/* For decoding: a slot's symbol in bits 0-7, its frequency in 8-19, its place among the symbol's slots in 20-31. */
typedef struct {
    u32 slots[MC_TABLES << MC_BITS_MAX];
} mc_decoder;

/* For encoding: q = x / frequency as a multiplication with `reciprocal`, shifted right by 32 + the shift in `step`. */
typedef struct {
    u32 reciprocal[MC_TABLES << 8];
    u32 step[MC_TABLES << 8]; /* bits 0-11 total - frequency, 12-24 bias, 25-31 shift */
} mc_encoder;

void mc_decoder_build(mc_decoder *decoder, const mc_model *model);
void mc_encoder_build(mc_encoder *encoder, const mc_model *model);

typedef struct {
    u32 state[MC_LANES];
    const u8 *at, *end;
} mc_reader;

typedef struct {
    u32 state[MC_LANES];
    u8 *at; /* words are written downwards from here */
} mc_writer;

/*
 * Decode n symbols. `contexts` are the lower 6 bits of each; NULL when all are of the one table `table`. Kernels may read
 * 32 bytes past the end of `contexts` and write 32 bytes past the end of `out`. MC_E_STREAM when the words run out.
 */
typedef int mc_rans_decode_fn(u8 *out, size_t n, const u8 *contexts, unsigned table, const mc_model *model,
                              const mc_decoder *decoder, mc_reader *reader);

/*
 * Encode n symbols, last one first. `tables` is the table of each; NULL when all are of the one table `table`. Writes
 * 2 * n bytes at most, but needs 64 bytes of room more.
 */
typedef void mc_rans_encode_fn(const u8 *symbols, size_t n, const u8 *tables, unsigned table, unsigned bits,
                               const mc_encoder *encoder, mc_writer *writer);

/* The scalar steps; the other kernels take them for a last group that is not full. */
static inline int mc_rans_decode_group(u8 *out, unsigned lanes, const u8 *contexts, const u8 *row, unsigned bits,
                                       const u32 *slots, mc_reader *reader)
{
    const u32 mask = ((u32)1 << bits) - 1;
    for (unsigned lane = 0; lane < lanes; lane++) {
        u32 x = reader->state[lane];
        u32 table = contexts ? row[contexts[lane]] : 0;
        u32 slot = slots[(table << bits) | (x & mask)];
        out[lane] = (u8)slot;
        x = (slot >> 8 & 0xfff) * (x >> bits) + (slot >> 20);
        if (x < MC_LOW) {
            if (reader->end - reader->at < 2)
                return MC_E_STREAM;
            x = x << 16 | mc_get16(reader->at);
            reader->at += 2;
        }
        reader->state[lane] = x;
    }
    return MC_OK;
}

static inline void mc_rans_encode_group(const u8 *symbols, unsigned lanes, const u8 *tables, unsigned table, unsigned bits,
                                        const mc_encoder *encoder, mc_writer *writer)
{
    for (unsigned lane = lanes; lane-- > 0;) {
        u32 x = writer->state[lane];
        u32 index = (tables ? tables[lane] : table) << 8 | symbols[lane];
        u32 step = encoder->step[index], complement = step & 0xfff;
        if (x >= (((u32)1 << bits) - complement) << (31 - bits)) {
            writer->at -= 2;
            mc_put16(writer->at, (u16)x);
            x >>= 16;
        }
        u32 q = (u32)((u64)x * encoder->reciprocal[index] >> 32) >> (step >> 25);
        writer->state[lane] = x + (step >> 12 & 0x1fff) + q * complement;
    }
}

static inline unsigned mc_count_nonzero(const u8 *bytes, unsigned n)
{
    unsigned count = 0;
    for (unsigned i = 0; i < n; i++)
        count += bytes[i] != 0;
    return count;
}

#endif
