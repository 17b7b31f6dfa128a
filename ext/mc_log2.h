/* A fast logarithm, good to 0.0002: it steers choices of the encoder and is no part of the format. */
#ifndef MC_LOG2_H
#define MC_LOG2_H

#include "mc_base.h"

static inline float mc_log2(float x)
{
    u32 word;
    memcpy(&word, &x, 4);
    float exponent = (float)((int)(word >> 23) - 127);
    word = (word & 0x7fffff) | 0x3f800000;
    float m;
    memcpy(&m, &word, 4);
    return exponent + (((-0.0803073f * m + 0.63822994f) * m - 2.10761265f) * m + 4.05983795f) * m - 2.51014793f;
}

#endif
