#include "mc_rans.h"

void mc_decoder_build(mc_decoder *decoder, const mc_model *model)
{
    u32 *slot = decoder->slots;
    for (unsigned table = 0; table < model->tables; table++)
        for (u32 symbol = 0; symbol < 256; symbol++) {
            u32 frequency = model->frequency[table][symbol];
            u32 entry = symbol | frequency << 8;
            for (u32 place = 0; place < frequency; place++)
                *slot++ = entry | place << 20;
        }
}

void mc_encoder_build(mc_encoder *encoder, const mc_model *model)
{
    const u32 total = (u32)1 << model->bits;
    for (unsigned table = 0; table < model->tables; table++) {
        u32 start = 0;
        for (u32 symbol = 0; symbol < 256; symbol++) {
            u32 frequency = model->frequency[table][symbol], shift = 0, bias = start, reciprocal;
            u32 index = table << 8 | symbol;
            if (frequency < 2) {
                /* x * (2^32 - 1) >> 32 is x - 1; the bias makes up for it. */
                reciprocal = ~(u32)0;
                bias += total - 1;
            } else {
                while (frequency > (u32)1 << shift)
                    shift++;
                reciprocal = (u32)((((u64)1 << (shift + 31)) + frequency - 1) / frequency);
                shift--;
            }
            encoder->reciprocal[index] = reciprocal;
            encoder->step[index] = (total - frequency) | bias << 12 | shift << 25;
            start += frequency;
        }
    }
}
