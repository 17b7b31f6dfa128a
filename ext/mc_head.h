/* The head of an encoded object: fixed prefix, block table, shared tables. FORMAT.md has the byte tables. */
#ifndef MC_HEAD_H
#define MC_HEAD_H

#include "mc_dtype.h"
#include "mc_planes.h"

#define MC_BYTES 0 /* the transform of blocks that are not split: the other ones are in mc_planes.h */

typedef struct {
    unsigned dtype, base_dtype, transform; /* base_dtype is MC_NO_DTYPE unless transform is MC_DELTA */
    u64 raw_length, base_start;
    u64 block_bytes, blocks; /* raw bytes of every block but the last */
    u64 head_length;
    unsigned packed;   /* the shared models are a zstd frame */
    const u8 *entries; /* MC_ENTRY_BYTES a block */
    const u8 *shared;
    size_t shared_length;
} mc_head;

/* Length of the head, told by its first MC_PREFIX_BYTES. */
int mc_head_length(const u8 *prefix, size_t length, u64 *head_length);

/* Check everything that a head claims, against itself and against the length of the whole encoded object. */
int mc_head_parse(mc_head *head, const u8 *bytes, size_t length, u64 encoded_length);

/* Write the prefix; `bytes` holds the rest of the head already. */
void mc_head_write(const mc_head *head, u8 *bytes);

static inline u32 mc_entry_length(const mc_head *head, u64 block)
{
    return mc_get32(head->entries + block * MC_ENTRY_BYTES);
}

static inline u64 mc_entry_check(const mc_head *head, u64 block)
{
    return mc_get64(head->entries + block * MC_ENTRY_BYTES + 4);
}

/* Raw bytes of a block. */
static inline size_t mc_raw_bytes(const mc_head *head, u64 block)
{
    u64 left = head->raw_length - block * head->block_bytes;
    return (size_t)(left < head->block_bytes ? left : head->block_bytes);
}

/* Width that the planes are made of: 1 when the block is not split. */
static inline unsigned mc_plane_count(const mc_head *head)
{
    return head->transform == MC_BYTES ? 1 : mc_dtype(head->dtype)->width;
}

#endif
