#include "mc_object.h"

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

int mc_encode(mc_scratch *scratch, const mc_request *request, u8 *out, size_t *length)
{
    mc_head head;
    int status = head_of(request, &head);
    if (status)
        return status;
    head.head_length = MC_PREFIX_BYTES + head.blocks * MC_ENTRY_BYTES;
    const unsigned width = mc_plane_count(&head);
    u8 *entry = out + MC_PREFIX_BYTES, *at = out + head.head_length;
    for (u64 block = 0; block < head.blocks; block++, entry += MC_ENTRY_BYTES) {
        const u8 *raw = request->raw + block * head.block_bytes, *base = NULL;
        size_t raw_bytes = mc_raw_bytes(&head, block);
        if (head.transform == MC_DELTA)
            base = mc_block_base(scratch, &head, &request->base, head.base_start + block * MC_BLOCK_ELEMENTS,
                                 raw_bytes / width);
        size_t encoded = mc_block_encode(scratch, &head, raw, raw_bytes, base, at);
        mc_put32(entry, (u32)encoded);
        mc_put64(entry + 4, mc_xxh3(raw, raw_bytes));
        at += encoded;
    }
    mc_head_write(&head, out);
    *length = (size_t)(at - out);
    return MC_OK;
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
    const unsigned width = mc_plane_count(&head);
    const u8 *at = request->payload, *end = at + request->payload_length;
    u8 *out = request->out, *out_end = out + request->out_length;
    for (u64 i = 0; i < request->count; i++) {
        *block = request->first + i;
        size_t raw_bytes = mc_raw_bytes(&head, *block), length = mc_entry_length(&head, *block);
        if ((size_t)(end - at) < length || (size_t)(out_end - out) < raw_bytes)
            return MC_E_USAGE;
        const u8 *base = NULL;
        if (head.transform == MC_DELTA)
            base = mc_block_base(scratch, &head, &request->base, i * MC_BLOCK_ELEMENTS, raw_bytes / width);
        status = mc_block_decode(scratch, &head, at, length, base, out, raw_bytes);
        if (status)
            return status;
        if (mc_xxh3(out, raw_bytes) != mc_entry_check(&head, *block))
            return MC_E_BLOCK_CHECK;
        at += length;
        out += raw_bytes;
    }
    return at == end && out == out_end ? MC_OK : MC_E_USAGE;
}
