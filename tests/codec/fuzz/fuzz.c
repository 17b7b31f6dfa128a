/*
 * Fuzzes the C code of the codec: encodes generated elements, decodes them again, then damages the encoded object and
 * decodes that. Built with sanitizers by run.sh. Every run of the same arguments does the same.
 *
 *     fuzz [iterations] [seed]
 *
 * With -DMC_LIBFUZZER it has libFuzzer's entry point instead of main().
 */
#include <stdio.h>
#include <stdlib.h>

#include "mc_chunk.h"
#include "mc_kernels.h"
#include "mc_object.h"
#include "mc_zstd.h"

static void fail(const char *what, int status)
{
    fprintf(stderr, "fuzz: %s: %s\n", what, mc_message(status));
    abort();
}

/* Copies of exactly the right length, so that the sanitizer sees a read or a write of one byte too many. */
static u8 *exact(const u8 *data, size_t length)
{
    u8 *copy = malloc(length ? length : 1);
    if (!copy)
        fail("copy", MC_E_MEMORY);
    memcpy(copy, data, length);
    return copy;
}

/* Make the checksum of a damaged head right, so that what lies behind it is reached. */
static void seal(u8 *data, size_t length)
{
    if (length < MC_PREFIX_BYTES)
        return;
    size_t head_length = mc_get32(data + 24);
    if (head_length < MC_PREFIX_BYTES || head_length > length)
        return;
    u8 *copy = exact(data, head_length);
    memmove(copy + 28, copy + MC_PREFIX_BYTES, head_length - MC_PREFIX_BYTES);
    mc_put32(data + 28, (u32)mc_xxh3(copy, head_length - 4));
    free(copy);
}

/* Raw bytes of the object again, or a failure; never anything outside the buffers. */
static int decode(mc_scratch *scratch, const u8 *encoded, size_t length, const u8 *base, size_t base_length,
                  u8 *out, size_t raw_length)
{
    u64 head_length = 0, block = 0;
    u8 *data = exact(encoded, length);
    int status = mc_head_length(data, length, &head_length);
    if (!status && head_length > length)
        status = MC_E_SHORT_HEAD;
    mc_head head;
    if (!status)
        status = mc_head_parse(&head, data, (size_t)head_length, length);
    if (!status && head.raw_length != raw_length)
        status = MC_E_USAGE;
    if (!status) {
        u64 skip = head.transform == MC_DELTA ? head.base_start * mc_dtype(head.base_dtype)->width : 0;
        if (skip > base_length)
            skip = base_length;
        size_t facing_length = base_length - (size_t)skip, payload_length = length - (size_t)head_length;
        u8 *facing = exact(base + skip, facing_length), *payload = exact(data + head_length, payload_length);
        u8 *alone = exact(data, (size_t)head_length);
        mc_decode_request request = {alone, (size_t)head_length, length, 0, head.blocks, payload, payload_length,
                                     {facing, facing_length}, out, raw_length, NULL};
        status = mc_decode(scratch, &request, &block);
        free(facing);
        free(payload);
        free(alone);
    }
    free(data);
    return status;
}

#ifdef MC_LIBFUZZER

int LLVMFuzzerTestOneInput(const u8 *data, size_t length)
{
    static u8 out[1 << 20], base[4096];
    mc_scratch *scratch = mc_scratch_new();
    mc_head head;
    u64 head_length;
    u8 *copy = exact(data, length);
    seal(copy, length);
    if (!mc_head_length(copy, length, &head_length) && head_length <= length &&
        !mc_head_parse(&head, copy, (size_t)head_length, length) && head.raw_length <= sizeof out)
        (void)decode(scratch, copy, length, base, sizeof base, out, (size_t)head.raw_length);
    free(copy);
    mc_scratch_free(scratch);
    return 0;
}

#else

#define LONGEST 6000

static u64 state;

static u64 random64(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545f4914f6cdd1du;
}

static size_t below(size_t limit) { return (size_t)(random64() >> 33) % limit; }

static void fill(u8 *data, size_t length)
{
    unsigned kind = (unsigned)below(6), spread = 1 + (unsigned)below(20);
    for (size_t i = 0; i < length; i++) {
        u64 r = random64();
        switch (kind) {
        case 0: data[i] = (u8)(r >> 40); break;
        case 1: data[i] = (u8)length; break;
        case 2: data[i] = (u8)((r >> 40) % spread); break;
        case 3: data[i] = r >> 59 ? 0 : (u8)(r >> 40); break;
        case 4: data[i] = i % 4 == 3 ? (u8)(0x3c + (r >> 40) % 4) : (u8)(r >> 32); break;
        default: data[i] = (u8)(i / (1 + spread)); break;
        }
    }
}

static void damage(u8 *data, size_t length)
{
    for (size_t count = 1 + below(4); count-- > 0;) {
        size_t at = below(below(2) ? length : (length < 120 ? length : 120));
        switch (below(4)) {
        case 0: data[at] ^= (u8)(1u << below(8)); break;
        case 1: data[at] = (u8)random64(); break;
        case 2: data[at] = (u8)(below(2) ? 0xff : 0); break;
        default: memset(data + at, (int)below(256), below(length - at) % 9); break;
        }
    }
}

/*
 * Memory that is at fault: of the pieces that an encoder writes, the one that `spoil_at` counts down to loses a bit.
 * run.sh has the linker put these in place of the functions. The first models are left alone: the encoder works with
 * what it reads back of them, so that damage there is only another choice.
 */
static unsigned spoil_at, models_written;

static void spoil(u8 *data, size_t length)
{
    if (length && spoil_at && --spoil_at == 0)
        data[below(length)] ^= (u8)(1u << below(8));
}

size_t __real_mc_zstd_pack(mc_scratch *, mc_zstd_kind, const u8 *, size_t, size_t);
size_t __wrap_mc_zstd_pack(mc_scratch *scratch, mc_zstd_kind kind, const u8 *data, size_t length, size_t limit)
{
    size_t packed = __real_mc_zstd_pack(scratch, kind, data, length, limit);
    spoil(scratch->packed, packed);
    return packed;
}

u8 *__real_mc_models_write(const mc_models *, unsigned, u8 *);
u8 *__wrap_mc_models_write(const mc_models *models, unsigned width, u8 *at)
{
    u8 *end = __real_mc_models_write(models, width, at);
    if (models_written++)
        spoil(at, (size_t)(end - at));
    return end;
}

/* The models of the object just encoded, cut off anywhere: where they end, the memory may end. */
static void read_cut_models(const mc_scratch *scratch, unsigned width)
{
    static u8 room[MC_SHARED_BYTES];
    static mc_models models;
    size_t length = (size_t)(__real_mc_models_write(&scratch->models, width, room) - room);
    if (below(4) == 0)
        damage(room, length);
    length = below(length + 1);
    u8 *cut = exact(room, length);
    (void)mc_models_read(&models, width, cut, length);
    free(cut);
}

/* Encode, one time in eight with memory that is at fault, and decode; what was damaged unseen must do no harm. */
static size_t round_trip(mc_scratch *scratch, const mc_request *request, u8 *encoded, u8 *out)
{
    size_t length = 0;
    models_written = 0;
    unsigned faulty = spoil_at = below(8) ? 0 : 1 + (unsigned)below(5);
    int status = mc_encode(scratch, request, encoded, &length);
    faulty = faulty && !spoil_at;
    spoil_at = 0;
    if (status && !faulty)
        fail("encode", status);
    if (status)
        return 0;
    if (request->transform != MC_BYTES)
        read_cut_models(scratch, mc_dtype(request->dtype)->width);
    status = decode(scratch, encoded, length, request->base.data, request->base.length, out, request->raw_length);
    if (status || memcmp(out, request->raw, request->raw_length))
        fail(faulty ? "decode what was stored with a fault" : "decode", status ? status : MC_E_VERIFY);
    return length;
}

/* One object: round trip, then damage, most of the time with a head whose checksum is right. */
static void one(mc_scratch *scratch)
{
    static const char *const kernels[] = {"scalar", "avx2", "avx512"};
    static u8 raw_room[LONGEST], base_room[LONGEST];
    (void)mc_kernels_use(kernels[below(3)]);
    size_t raw_length = below(LONGEST), base_length = below(LONGEST);
    fill(raw_room, raw_length);
    fill(base_room, base_length);
    for (size_t i = 0; i < raw_length && i < base_length && below(64); i++)
        base_room[i] = (u8)(raw_room[i] + (below(30) == 0));
    u8 *raw = exact(raw_room, raw_length), *base = exact(base_room, base_length);
    mc_request request = {raw, raw_length, (unsigned)below(MC_DTYPES), (unsigned)below(4), {base, base_length},
                          (unsigned)below(MC_DTYPES), below(4) ? 0 : below(900), below(8) != 0, 1};
    size_t bound = mc_encode_bound(&request), length = 0;
    if (bound) {
        u8 *encoded = malloc(bound), *out = malloc(raw_length ? raw_length : 1);
        if (!encoded || !out)
            fail("buffers", MC_E_MEMORY);
        length = round_trip(scratch, &request, encoded, out);
        if (length) {
            damage(encoded, length);
            if (below(8) == 0)
                length -= below(length < 20 ? length : 20);
            if (below(4))
                seal(encoded, length);
            (void)mc_kernels_use(kernels[below(3)]);
            (void)decode(scratch, encoded, length, base, base_length, out, raw_length);
        }
        free(encoded);
        free(out);
    }
    free(raw);
    free(base);
}

static void chunk_one(void)
{
    static u8 room[LONGEST];
    size_t length = below(LONGEST), sum = 0;
    fill(room, length);
    u8 *data = exact(room, length);
    mc_chunker chunker;
    mc_chunker_init(&chunker, 64, 128, 64 + 128 + below(500));
    for (size_t at = 0; at < length;) {
        int border;
        size_t piece = 1 + below(length - at);
        size_t taken = mc_chunker_push(&chunker, data + at, piece, &border);
        if (!taken || taken > piece || chunker.length > chunker.maximum)
            fail("chunk", MC_E_RANGE);
        at += taken;
        sum += taken;
    }
    if (sum != length)
        fail("chunk", MC_E_RANGE);
    free(data);
}

static void run(mc_scratch *scratch, u64 seed)
{
    state = seed * 0x9e3779b97f4a7c15u + 1;
    one(scratch);
    if (seed % 16 == 0)
        chunk_one();
}

int main(int argc, char **argv)
{
    u64 iterations = argc > 1 ? strtoull(argv[1], NULL, 10) : 20000, first = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    mc_scratch *scratch = mc_scratch_new();
    if (!scratch)
        fail("scratch", MC_E_MEMORY);
    for (u64 i = 0; i < iterations; i++)
        run(scratch, first + i);
    mc_scratch_free(scratch);
    printf("fuzz: %llu iterations from seed %llu, nothing found\n", (unsigned long long)iterations, (unsigned long long)first);
    return 0;
}

#endif
