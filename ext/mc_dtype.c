#include "mc_dtype.h"

/* In the order of the codes of types.DType; complex numbers are two of their parts. */
static const mc_dtype_info table[MC_DTYPES] = {
    {0, MC_NOT_FLOAT, 0, 0}, /* BYTES */
    {1, MC_NOT_FLOAT, 0, 0}, /* BOOL */
    {1, MC_NOT_FLOAT, 0, 0}, /* U8 */
    {1, MC_NOT_FLOAT, 0, 0}, /* I8 */
    {2, MC_NOT_FLOAT, 0, 0}, /* U16 */
    {2, MC_NOT_FLOAT, 0, 0}, /* I16 */
    {4, MC_NOT_FLOAT, 0, 0}, /* U32 */
    {4, MC_NOT_FLOAT, 0, 0}, /* I32 */
    {8, MC_NOT_FLOAT, 0, 0}, /* U64 */
    {8, MC_NOT_FLOAT, 0, 0}, /* I64 */
    {2, MC_F16, 10, 0x1f},   /* F16 */
    {2, MC_BF16, 7, 0xff},   /* BF16 */
    {4, MC_F32, 23, 0xff},   /* F32 */
    {8, MC_F64, 52, 0x7ff},  /* F64 */
    {1, MC_E4M3, 3, 0xf},    /* F8_E4M3 */
    {1, MC_E5M2, 2, 0x1f},   /* F8_E5M2 */
    {1, MC_NOT_FLOAT, 0, 0}, /* F8_E8M0 */
    {1, MC_NOT_FLOAT, 3, 0xf},  /* F8_E4M3FNUZ */
    {1, MC_NOT_FLOAT, 2, 0x1f}, /* F8_E5M2FNUZ */
    {1, MC_NOT_FLOAT, 0, 0}, /* F4 */
    {1, MC_NOT_FLOAT, 0, 0}, /* F6_E2M3 */
    {1, MC_NOT_FLOAT, 0, 0}, /* F6_E3M2 */
    {4, MC_F32, 23, 0xff},   /* C64 */
    {8, MC_F64, 52, 0x7ff},  /* C128 */
};

const mc_dtype_info *mc_dtype(unsigned code) { return &table[code]; }

size_t mc_block_bytes(unsigned code)
{
    u8 width = table[code].width;
    return width ? MC_BLOCK_ELEMENTS * width : MC_BLOCK_BYTES;
}

int mc_dtype_pair(unsigned code, unsigned base)
{
    const mc_dtype_info *a = &table[code], *b = &table[base];
    if (!a->width || !b->width)
        return 0;
    return a->width == b->width || (a->format != MC_NOT_FLOAT && b->format != MC_NOT_FLOAT);
}
