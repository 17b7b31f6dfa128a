#include "mc_object.h"
#include "mc_zstd.h"

static int head_of(const mc_request *request, mc_head *head)
{
    if (request->dtype >= MC_DTYPES || request->transform > MC_DELTA || request->raw_length > MC_MAX_RAW)
        return MC_E_USAGE;
    if (request->transform != MC_BYTES && !mc_dtype(request->dtype)->width)
        return MC_E_USAGE;
    head->dtype = request->dtype;
    head->transform = request->transform;
    head->base_dtype = MC_NO_DTYPE;
    head->base_start = 0;
    if (request->transform == MC_DELTA) {
        if (request->base_dtype >= MC_DTYPES || !mc_dtype_pair(request->dtype, request->base_dtype) ||
            request->base_start > MC_MAX_RAW)
            return MC_E_USAGE;
        head->base_dtype = request->base_dtype;
        head->base_start = request->base_start;
    }
    head->packed = 0;
    head->raw_length = request->raw_length;
    head->block_bytes = mc_block_bytes(head->dtype);
    head->blocks = (head->raw_length + head->block_bytes - 1) / head->block_bytes;
    return MC_OK;
}

size_t mc_encode_bound(const mc_request *request)
{
    mc_head head;
    if (head_of(request, &head))
        return 0;
    return MC_PREFIX_BYTES + MC_SHARED_BYTES + head.blocks * (MC_ENTRY_BYTES + MC_BLOCK_OVERHEAD) +
           (size_t)head.raw_length + MC_BLOCK_OVERHEAD;
}

/* The base elements of a block; NULL when there is no base. */
static const u8 *base_of(mc_scratch *scratch, const mc_head *head, const mc_request *request, u64 block)
{
    if (head->transform != MC_DELTA)
        return NULL;
    size_t n = mc_raw_bytes(head, block) / mc_plane_count(head);
    return mc_block_base(scratch, head, &request->base, head->base_start + block * MC_BLOCK_ELEMENTS, n);
}

/*
 * The largest exponent of the base, but for one element in a thousand, as seen in the middle of some of the blocks.
 * Exponent classes count downwards from it.
 */
static unsigned find_exponent_top(mc_scratch *scratch, const mc_head *head, const mc_request *request)
{
    enum { BLOCKS = 8, ELEMENTS = 512 };
    const mc_dtype_info *type = mc_dtype(head->dtype);
    u32 counts[2048] = {0}, sampled = 0, above = 0;
    for (u64 i = 0; i < BLOCKS && i < head->blocks; i++) {
        u64 block = head->blocks <= BLOCKS ? i : i * (head->blocks - 1) / (BLOCKS - 1);
        size_t n = mc_raw_bytes(head, block) / type->width, count = n < ELEMENTS ? n : ELEMENTS;
        u64 first = head->base_start + block * MC_BLOCK_ELEMENTS + (n - count) / 2;
        const u8 *base = mc_block_base(scratch, head, &request->base, first, count);
        for (size_t j = 0; j < count; j++) {
            u64 element = 0;
            memcpy(&element, base + j * type->width, type->width);
            counts[element >> type->exponent_shift & type->exponent_mask]++;
        }
        sampled += (u32)count;
    }
    unsigned top = type->exponent_mask;
    while (top > 0 && (above += counts[top]) * 1000 <= sampled)
        top--;
    return top;
}

/*
 * Models for all planes, from all blocks. What the first look at a block told waits in its place of the block table
 * until the block is encoded.
 */
static void fit_models(mc_scratch *scratch, const mc_head *head, const mc_request *request, u8 *entry)
{
    const unsigned width = mc_plane_count(head);
    const unsigned contexts = mc_counted_contexts(head);
    for (unsigned k = 0; k < width; k++)
        memset(scratch->counts[k], 0, contexts * sizeof scratch->counts[k][0]);
    for (u64 block = 0; block < head->blocks; block++, entry += MC_ENTRY_BYTES) {
        const u8 *raw = request->raw + block * head->block_bytes, *base = base_of(scratch, head, request, block);
        mc_plane_kinds kinds = mc_block_count(scratch, head, block, raw, base);
        entry[0] = kinds.constant;
        entry[1] = kinds.noise;
    }
    for (unsigned k = 0; k < width; k++)
        if (request->models)
            mc_model_fit(&scratch->models.plane[k], scratch->counts[k], contexts);
        else
            scratch->models.plane[k].tables = 0;
}

static int verify_block(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *encoded, size_t length,
                        const u8 *base, const u8 *raw)
{
    int status = mc_block_decode(scratch, head, block, encoded, length, base, scratch->decoded);
    return status ? status : memcmp(scratch->decoded, raw, mc_raw_bytes(head, block)) ? MC_E_VERIFY : MC_OK;
}

/* Encode all blocks to *at, which moves to their end, and fill in their entries of the block table. */
static int encode_blocks(mc_scratch *scratch, const mc_head *head, const mc_request *request, u8 *entry, u8 **at,
                         unsigned *used)
{
    int status = MC_OK;
    for (u64 block = 0; block < head->blocks && !status; block++, entry += MC_ENTRY_BYTES) {
        const u8 *raw = request->raw + block * head->block_bytes, *base = base_of(scratch, head, request, block);
        const mc_plane_kinds kinds = {entry[0], entry[1]};
        size_t raw_bytes = mc_raw_bytes(head, block);
        size_t encoded = mc_block_encode(scratch, head, block, raw, base, kinds, *at, used);
        mc_put32(entry, (u32)encoded);
        mc_put64(entry + 4, mc_xxh3(raw, raw_bytes));
        if (request->verify)
            status = verify_block(scratch, head, block, *at, encoded, base, raw);
        *at += encoded;
    }
    return status;
}

/* What the blocks are coded with is what was read back from the stored models, so that verifying them covers these. */
static int read_back(mc_scratch *scratch, const mc_head *head, const u8 *shared, size_t length)
{
    int status = mc_read_shared(scratch, head, shared, length);
    for (unsigned k = 0; k < mc_plane_count(head) && !status; k++)
        mc_encoder_build(&scratch->encoders[k], &scratch->models.plane[k]);
    return status;
}

/*
 * Store the models, without those that lost in every block, as a zstd frame if that is shorter. They took as
 * much before, so there is room. Returns the end of them.
 */
static u8 *write_models(mc_scratch *scratch, mc_head *head, unsigned used, u8 *at)
{
    const unsigned width = mc_plane_count(head);
    for (unsigned k = 0; k < width; k++)
        if (!(used >> k & 1))
            scratch->models.plane[k].tables = 0;
    size_t length = (size_t)(mc_models_write(&scratch->models, width, at) - at);
    size_t packed = mc_zstd_pack(scratch, MC_ZSTD_BYTES, at, length, length);
    if (!packed)
        return at + length;
    head->packed = 1;
    memcpy(at, scratch->packed, packed);
    return at + packed;
}

/* The blocks have been verified with the models at hand: the finished head must give these again. */
static int verify_models(mc_scratch *scratch, const mc_head *head)
{
    if (mc_read_models(scratch, head, head->shared, head->shared_length, &scratch->stored))
        return MC_E_VERIFY;
    if (head->transform == MC_BYTES)
        return MC_OK;
    return mc_models_equal(&scratch->models, &scratch->stored, mc_plane_count(head)) ? MC_OK : MC_E_VERIFY;
}

int mc_encode(mc_scratch *scratch, const mc_request *request, u8 *out, size_t *length)
{
    mc_head head;
    int status = head_of(request, &head);
    if (status)
        return status;
    const int split = head.transform != MC_BYTES;
    u8 *entries = out + MC_PREFIX_BYTES, *shared = entries + head.blocks * MC_ENTRY_BYTES, *payload = shared;
    scratch->models.exponent_top = 0;
    if (split) {
        if (head.transform == MC_DELTA && mc_dtype(head.dtype)->exponent_mask)
            scratch->models.exponent_top = find_exponent_top(scratch, &head, request);
        fit_models(scratch, &head, request, entries);
        payload = mc_models_write(&scratch->models, mc_plane_count(&head), shared);
        if ((status = read_back(scratch, &head, shared, (size_t)(payload - shared))))
            return status;
    }
    unsigned used = 0;
    u8 *end = payload;
    if ((status = encode_blocks(scratch, &head, request, entries, &end, &used)))
        return status;
    u8 *begin = split ? write_models(scratch, &head, used, shared) : payload;
    if (begin != payload)
        memmove(begin, payload, (size_t)(end - payload));
    *length = (size_t)(begin - out) + (size_t)(end - payload);
    head.head_length = (u64)(begin - out);
    mc_head_write(&head, out);
    status = mc_head_parse(&head, out, *length, *length);
    return status || !request->verify ? status : verify_models(scratch, &head);
}
