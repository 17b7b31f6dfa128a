#include "mc_block.h"
#include "mc_cast.h"

const u8 *mc_block_base(mc_scratch *scratch, const mc_head *head, const mc_base_bytes *base, u64 skipped, size_t n)
{
    const mc_dtype_info *to = mc_dtype(head->dtype), *from = mc_dtype(head->base_dtype);
    u64 start = skipped * from->width;
    u64 held = start < base->length ? (base->length - start) / from->width : 0;
    size_t usable = held < n ? (size_t)held : n;
    int same = from->format == to->format || from->format == MC_NOT_FLOAT || to->format == MC_NOT_FLOAT;
    if (same && usable == n)
        return base->data + start;
    if (usable && same)
        memcpy(scratch->base, base->data + start, usable * to->width);
    else if (usable)
        mc_cast(scratch->base, to->format, base->data + start, from->format, usable);
    memset(scratch->base + usable * to->width, 0, (n - usable) * to->width);
    return scratch->base;
}
