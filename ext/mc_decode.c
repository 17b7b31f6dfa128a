#include "mc_object.h"
#include "mc_zstd.h"

int mc_read_models(mc_scratch *scratch, const mc_head *head, const u8 *shared, size_t length, mc_models *models)
{
    if (head->transform == MC_BYTES)
        return length ? MC_E_TABLE : MC_OK;
    if (head->packed) {
        length = mc_zstd_unpack_some(scratch, scratch->shared, sizeof scratch->shared, shared, length);
        shared = scratch->shared;
    }
    int status = mc_models_read(models, mc_plane_count(head), shared, length);
    if (status)
        return status;
    /* Kernels count on it: they hold the exponents of narrow types, this one too, in a byte. */
    const unsigned most = head->transform == MC_DELTA ? mc_dtype(head->dtype)->exponent_mask : 0;
    return models->exponent_top > most ? MC_E_EXPONENT : MC_OK;
}

int mc_read_shared(mc_scratch *scratch, const mc_head *head, const u8 *shared, size_t length)
{
    int status = mc_read_models(scratch, head, shared, length, &scratch->models);
    if (status || head->transform == MC_BYTES)
        return status;
    for (unsigned k = 0; k < mc_plane_count(head); k++)
        mc_decoder_build(&scratch->decoders[k], &scratch->models.plane[k]);
    return MC_OK;
}

/* Decode one block; the base begins `skipped` elements before the block's own range. */
static int decode_block(mc_scratch *scratch, const mc_head *head, u64 block, const u8 *encoded, const mc_base_bytes *base,
                        u64 skipped, u8 *out)
{
    const u8 *elements = NULL;
    if (head->transform == MC_DELTA)
        elements = mc_block_base(scratch, head, base, skipped, mc_raw_bytes(head, block) / mc_plane_count(head));
    return mc_block_decode(scratch, head, block, encoded, mc_entry_length(head, block), elements, out);
}

int mc_decode(mc_scratch *scratch, const mc_decode_request *request, u64 *block)
{
    mc_head head;
    *block = request->first;
    int status = mc_head_parse(&head, request->head, request->head_length, request->encoded_length);
    if (status)
        return status;
    if (request->first > head.blocks || request->count > head.blocks - request->first)
        return MC_E_RANGE;
    if ((status = mc_read_shared(scratch, &head, head.shared, head.shared_length)))
        return status;
    const u8 *at = request->payload, *end = at + request->payload_length;
    u8 *out = request->out, *out_end = out + request->out_length;
    for (u64 i = 0; i < request->count; i++) {
        *block = request->first + i;
        size_t raw_bytes = mc_raw_bytes(&head, *block), length = mc_entry_length(&head, *block);
        if ((size_t)(end - at) < length || (!request->outs && (size_t)(out_end - out) < raw_bytes))
            return MC_E_USAGE;
        u8 *into = request->outs ? request->outs[i] : out;
        if ((status = decode_block(scratch, &head, *block, at, &request->base, i * MC_BLOCK_ELEMENTS, into)))
            return status;
        if (mc_xxh3(into, raw_bytes) != mc_entry_check(&head, *block))
            return MC_E_BLOCK_CHECK;
        at += length;
        if (!request->outs)
            out += raw_bytes;
    }
    return at == end && out == out_end ? MC_OK : MC_E_USAGE;
}
