/* What the codec knows of an element type: the width it works on and where the exponent is. */
#ifndef MC_DTYPE_H
#define MC_DTYPE_H

#include "mc_base.h"

#define MC_DTYPES 24
#define MC_NO_DTYPE 255

/* Float formats between which a base can be cast; MC_NOT_FLOAT stands for everything else. */
typedef enum { MC_NOT_FLOAT, MC_F64, MC_F32, MC_BF16, MC_F16, MC_E4M3, MC_E5M2 } mc_format;

typedef struct {
    u8 width;          /* bytes of the integer that the codec works on; 0 for plain bytes */
    u8 format;         /* mc_format */
    u8 exponent_shift; /* bits below the exponent */
    u16 exponent_mask; /* 0 when there is no exponent */
} mc_dtype_info;

/* `code` must be below MC_DTYPES. */
const mc_dtype_info *mc_dtype(unsigned code);

/* Raw bytes of a block of this type (every block but the last). */
size_t mc_block_bytes(unsigned code);

/* Can elements of `base` predict elements of `code`: castable floats, or the same width? */
int mc_dtype_pair(unsigned code, unsigned base);

#endif
