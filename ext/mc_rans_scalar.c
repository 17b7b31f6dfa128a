#include "mc_kernels.h"

int mc_rans_decode_scalar(u8 *out, size_t n, const u8 *contexts, unsigned table, const mc_model *model,
                          const mc_decoder *decoder, mc_reader *reader)
{
    const u32 *slots = decoder->slots + ((size_t)table << model->bits);
    unsigned nonzero = 0;
    for (size_t i = 0; i < n; i += MC_LANES) {
        unsigned lanes = n - i < MC_LANES ? (unsigned)(n - i) : MC_LANES;
        const u8 *row = model->map + MC_STATIC_CONTEXTS * mc_activity(nonzero);
        int status =
            mc_rans_decode_group(out + i, lanes, contexts ? contexts + i : NULL, row, model->bits, slots, reader);
        if (status)
            return status;
        nonzero = mc_count_nonzero(out + i, lanes);
    }
    return MC_OK;
}

void mc_rans_encode_scalar(const u8 *symbols, size_t n, const u8 *tables, unsigned table, unsigned bits,
                           const mc_encoder *encoder, mc_writer *writer)
{
    for (size_t end = n; end > 0;) {
        unsigned lanes = end % MC_LANES ? (unsigned)(end % MC_LANES) : MC_LANES;
        end -= lanes;
        mc_rans_encode_group(symbols + end, lanes, tables ? tables + end : NULL, table, bits, encoder, writer);
    }
}
