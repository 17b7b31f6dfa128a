#define ZSTD_STATIC_LINKING_ONLY /* for the literal compression mode */
#include <zstd.h>

#include "mc_zstd.h"

static void set(ZSTD_CCtx *context, ZSTD_cParameter parameter, int value)
{
    /* A library without one of the parameters packs a little less well; its frames are as valid. */
    (void)ZSTD_CCtx_setParameter(context, parameter, value);
}

size_t mc_zstd_pack(mc_scratch *scratch, mc_zstd_kind kind, const u8 *data, size_t length, size_t limit)
{
    ZSTD_CCtx *context = scratch->compressor;
    ZSTD_CCtx_reset(context, ZSTD_reset_session_and_parameters);
    set(context, ZSTD_c_compressionLevel, kind == MC_ZSTD_BYTES ? 3 : 1);
    set(context, ZSTD_c_contentSizeFlag, 0);
    if (kind == MC_ZSTD_HUFFMAN) {
        /* A match finder that finds nothing leaves all bytes to the Huffman coder. */
        set(context, ZSTD_c_strategy, ZSTD_fast);
        set(context, ZSTD_c_targetLength, 1 << 17);
        set(context, ZSTD_c_minMatch, 7);
        set(context, ZSTD_c_hashLog, 6);
        set(context, ZSTD_c_literalCompressionMode, ZSTD_ps_enable);
    }
    size_t room = limit < sizeof scratch->packed ? limit : sizeof scratch->packed;
    size_t packed = ZSTD_compress2(context, scratch->packed, room, data, length);
    return ZSTD_isError(packed) || packed >= limit ? 0 : packed;
}

int mc_zstd_unpack(mc_scratch *scratch, u8 *out, size_t length, const u8 *frame, size_t frame_length)
{
    return mc_zstd_unpack_some(scratch, out, length, frame, frame_length) == length ? MC_OK : MC_E_ZSTD;
}

size_t mc_zstd_unpack_some(mc_scratch *scratch, u8 *out, size_t room, const u8 *frame, size_t frame_length)
{
    size_t done = ZSTD_decompressDCtx(scratch->decompressor, out, room, frame, frame_length);
    return ZSTD_isError(done) ? 0 : done;
}
