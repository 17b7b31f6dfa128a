/* One zstd frame for one plane or one block of bytes. */
#ifndef MC_ZSTD_H
#define MC_ZSTD_H

#include "mc_scratch.h"

typedef enum { MC_ZSTD_FAST, MC_ZSTD_HUFFMAN, MC_ZSTD_BYTES } mc_zstd_kind;

/* Compress into scratch->packed. Returns the length, or 0 when it does not get below `limit` bytes. */
size_t mc_zstd_pack(mc_scratch *scratch, mc_zstd_kind kind, const u8 *data, size_t length, size_t limit);

/* Decode a frame to at most `room` bytes; returns the length, or 0 when it cannot be decoded. */
size_t mc_zstd_unpack_some(mc_scratch *scratch, u8 *out, size_t room, const u8 *frame, size_t frame_length);

/* Decode exactly `length` bytes. */
int mc_zstd_unpack(mc_scratch *scratch, u8 *out, size_t length, const u8 *frame, size_t frame_length);

#endif
