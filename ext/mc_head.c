#define XXH_INLINE_ALL
#include <xxhash.h>

#include "mc_head.h"

static const u8 magic[4] = {'M', 'C', 'E', 1};

enum { DTYPE = 4, BASE_DTYPE = 5, TRANSFORM = 6, PACKED = 7, RAW_LENGTH = 8, BASE_START = 16, HEAD_LENGTH = 24, CHECK = 28 };

/* Of all bytes of the head but the checksum itself. */
static u32 check_of(const u8 *bytes, size_t length)
{
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, bytes, CHECK);
    XXH3_64bits_update(&state, bytes + MC_PREFIX_BYTES, length - MC_PREFIX_BYTES);
    return (u32)XXH3_64bits_digest(&state);
}

static int parse_prefix(mc_head *head, const u8 *bytes, size_t length)
{
    if (length < MC_PREFIX_BYTES)
        return MC_E_SHORT_HEAD;
    if (memcmp(bytes, magic, sizeof magic) || bytes[PACKED] > 1)
        return MC_E_MAGIC;
    head->dtype = bytes[DTYPE];
    head->base_dtype = bytes[BASE_DTYPE];
    head->transform = bytes[TRANSFORM];
    head->packed = bytes[PACKED];
    head->raw_length = mc_get64(bytes + RAW_LENGTH);
    head->base_start = mc_get64(bytes + BASE_START);
    head->head_length = mc_get32(bytes + HEAD_LENGTH);
    if (head->dtype >= MC_DTYPES)
        return MC_E_DTYPE;
    if (head->transform > MC_DELTA || (head->transform != MC_BYTES && !mc_dtype(head->dtype)->width))
        return MC_E_TRANSFORM;
    if (head->transform == MC_DELTA
            ? head->base_dtype >= MC_DTYPES || !mc_dtype_pair(head->dtype, head->base_dtype)
            : head->base_dtype != MC_NO_DTYPE)
        return MC_E_DTYPE;
    if (head->raw_length > MC_MAX_RAW || head->base_start > MC_MAX_RAW)
        return MC_E_RAW_LENGTH;
    head->block_bytes = mc_block_bytes(head->dtype);
    head->blocks = (head->raw_length + head->block_bytes - 1) / head->block_bytes;
    u64 least = MC_PREFIX_BYTES + head->blocks * MC_ENTRY_BYTES;
    if (head->head_length < least || head->head_length > least + MC_SHARED_BYTES)
        return MC_E_HEAD_LENGTH;
    return MC_OK;
}

int mc_head_length(const u8 *prefix, size_t length, u64 *head_length)
{
    mc_head head;
    int status = parse_prefix(&head, prefix, length);
    *head_length = status ? 0 : head.head_length;
    return status;
}

int mc_head_parse(mc_head *head, const u8 *bytes, size_t length, u64 encoded_length)
{
    int status = parse_prefix(head, bytes, length);
    if (status)
        return status;
    if (length < head->head_length)
        return MC_E_SHORT_HEAD;
    if (check_of(bytes, head->head_length) != mc_get32(bytes + CHECK))
        return MC_E_HEAD_CHECK;
    head->entries = bytes + MC_PREFIX_BYTES;
    head->shared = head->entries + head->blocks * MC_ENTRY_BYTES;
    head->shared_length = (size_t)(bytes + head->head_length - head->shared);
    u64 total = head->head_length;
    for (u64 block = 0; block < head->blocks; block++)
        total += mc_entry_length(head, block);
    return total == encoded_length ? MC_OK : MC_E_BLOCK_LENGTHS;
}

void mc_head_write(const mc_head *head, u8 *bytes)
{
    memcpy(bytes, magic, sizeof magic);
    bytes[DTYPE] = (u8)head->dtype;
    bytes[BASE_DTYPE] = (u8)head->base_dtype;
    bytes[TRANSFORM] = (u8)head->transform;
    bytes[PACKED] = (u8)head->packed;
    mc_put64(bytes + RAW_LENGTH, head->raw_length);
    mc_put64(bytes + BASE_START, head->base_start);
    mc_put32(bytes + HEAD_LENGTH, (u32)head->head_length);
    mc_put32(bytes + CHECK, check_of(bytes, (size_t)head->head_length));
}
