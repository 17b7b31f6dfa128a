#include "mc_model.h"

/*
 * A map is stored without the parts of the context that it does not depend on: `shape` has a bit for each that it does.
 * This gives the context that each stored entry stands for, and how many entries there are.
 */
static unsigned stored_contexts(unsigned shape, u8 stored[MC_CONTEXTS])
{
    unsigned count = 0;
    for (unsigned context = 0; context < MC_CONTEXTS; context++)
        if ((shape & MC_BY_EXPONENT || !(context & 15)) && (shape & MC_BY_ABOVE || !(context & 0x30)) &&
            (shape & MC_BY_ACTIVITY || !(context & 0xc0)))
            stored[count++] = (u8)context;
    return count;
}

static unsigned kept_bits(unsigned shape)
{
    return (shape & MC_BY_EXPONENT ? 15 : 0) | (shape & MC_BY_ABOVE ? 0x30 : 0) | (shape & MC_BY_ACTIVITY ? 0xc0 : 0);
}

static unsigned shape_of(const u8 map[MC_CONTEXTS])
{
    unsigned shape = 0;
    for (unsigned context = 0; context < MC_CONTEXTS; context++) {
        if (map[context] != map[context & ~15u])
            shape |= MC_BY_EXPONENT;
        if (map[context] != map[context & ~0x30u])
            shape |= MC_BY_ABOVE;
        if (map[context] != map[context & ~0xc0u])
            shape |= MC_BY_ACTIVITY;
    }
    return shape;
}

static int read_map(mc_model *model, const u8 **at, const u8 *end)
{
    u8 stored[MC_CONTEXTS], value[MC_CONTEXTS] = {0};
    if (*at == end || **at > 7)
        return MC_E_TABLE;
    unsigned shape = *(*at)++, count = stored_contexts(shape, stored);
    if ((size_t)(end - *at) < (count + 1) / 2)
        return MC_E_TABLE;
    for (unsigned i = 0; i < count; i++) {
        unsigned table = (*at)[i / 2] >> 4 * (i % 2) & 15;
        if (table >= model->tables)
            return MC_E_TABLE;
        value[stored[i]] = (u8)table;
    }
    *at += (count + 1) / 2;
    for (unsigned context = 0; context < MC_CONTEXTS; context++)
        model->map[context] = value[context & kept_bits(shape)];
    model->shape = shape;
    return MC_OK;
}

static u8 *write_map(const mc_model *model, u8 *at)
{
    u8 stored[MC_CONTEXTS];
    unsigned shape = shape_of(model->map), count = stored_contexts(shape, stored);
    *at++ = (u8)shape;
    memset(at, 0, (count + 1) / 2);
    for (unsigned i = 0; i < count; i++)
        at[i / 2] |= (u8)(model->map[stored[i]] << 4 * (i % 2));
    return at + (count + 1) / 2;
}

/*
 * A table is the number of its symbols less one, then for each symbol a byte `gap << 4 | size`. The gap counts the
 * symbols skipped; 15 puts it into a byte of its own. Sizes 0-9 are frequency - 1; 10-14 are the upper bits of
 * frequency - 11, with the lower 8 in a byte that follows; 15 puts the frequency into two bytes.
 */
static int read_table(u16 frequency[256], unsigned bits, const u8 **position, const u8 *end)
{
    const u8 *at = *position;
    memset(frequency, 0, 256 * sizeof *frequency);
    if (at == end)
        return MC_E_TABLE;
    unsigned symbols = *at++ + 1u, next = 0, sum = 0;
    for (unsigned i = 0; i < symbols; i++) {
        if (at == end || (end - at < 4 && end - at < 1 + (*at >> 4 == 15) + ((*at & 15) > 9) + ((*at & 15) == 15)))
            return MC_E_TABLE;
        unsigned gap = *at >> 4, size = *at & 15, value = size + 1;
        at++;
        if (gap == 15)
            gap = *at++;
        if (size == 15) {
            value = mc_get16(at);
            at += 2;
        } else if (size > 9) {
            value = ((size - 10) << 8 | *at++) + 11;
        }
        next += gap;
        if (next > 255 || value == 0 || value >= 1u << bits)
            return MC_E_TABLE;
        frequency[next++] = (u16)value;
        sum += value;
    }
    *position = at;
    return sum == 1u << bits ? MC_OK : MC_E_TABLE;
}

static u8 *write_table(const u16 frequency[256], u8 *at)
{
    u8 *symbols = at++;
    unsigned count = 0, next = 0;
    for (unsigned symbol = 0; symbol < 256; symbol++) {
        unsigned value = frequency[symbol], gap = symbol - next;
        if (!value)
            continue;
        unsigned size = value <= 10 ? value - 1 : value - 11 < 5 << 8 ? 10 + ((value - 11) >> 8) : 15;
        *at++ = (u8)((gap < 15 ? gap : 15) << 4 | size);
        if (gap >= 15)
            *at++ = (u8)gap;
        if (size == 15) {
            mc_put16(at, (u16)value);
            at += 2;
        } else if (size > 9) {
            *at++ = (u8)(value - 11);
        }
        count++;
        next = symbol + 1;
    }
    *symbols = (u8)(count - 1);
    return at;
}

int mc_model_read(mc_model *model, const u8 **at, const u8 *end)
{
    if (*at == end || **at > MC_TABLES)
        return MC_E_TABLE;
    model->tables = *(*at)++;
    model->bits = model->shape = 0;
    memset(model->map, 0, sizeof model->map);
    if (!model->tables)
        return MC_OK;
    if (*at == end || **at < MC_BITS_MIN || **at > MC_BITS_MAX)
        return MC_E_TABLE;
    model->bits = *(*at)++;
    int status = model->tables > 1 ? read_map(model, at, end) : MC_OK;
    for (unsigned table = 0; table < model->tables && !status; table++)
        status = read_table(model->frequency[table], model->bits, at, end);
    return status;
}

u8 *mc_model_write(const mc_model *model, u8 *at)
{
    *at++ = (u8)model->tables;
    if (!model->tables)
        return at;
    *at++ = (u8)model->bits;
    if (model->tables > 1)
        at = write_map(model, at);
    for (unsigned table = 0; table < model->tables; table++)
        at = write_table(model->frequency[table], at);
    return at;
}

int mc_models_read(mc_models *models, unsigned width, const u8 *at, size_t length)
{
    const u8 *end = at + length;
    if (length < 2)
        return MC_E_TABLE;
    models->exponent_top = mc_get16(at);
    at += 2;
    for (unsigned k = width; k-- > 0;) {
        int status = mc_model_read(&models->plane[k], &at, end);
        if (status)
            return status;
    }
    return at == end ? MC_OK : MC_E_TABLE;
}

u8 *mc_models_write(const mc_models *models, unsigned width, u8 *at)
{
    mc_put16(at, (u16)models->exponent_top);
    at += 2;
    for (unsigned k = width; k-- > 0;)
        at = mc_model_write(&models->plane[k], at);
    return at;
}

static int model_equal(const mc_model *a, const mc_model *b)
{
    if (a->tables != b->tables || !a->tables)
        return a->tables == b->tables;
    return a->bits == b->bits && a->shape == b->shape && !memcmp(a->map, b->map, sizeof a->map) &&
           !memcmp(a->frequency, b->frequency, a->tables * sizeof a->frequency[0]);
}

int mc_models_equal(const mc_models *a, const mc_models *b, unsigned width)
{
    int equal = a->exponent_top == b->exponent_top;
    for (unsigned k = 0; k < width && equal; k++)
        equal = model_equal(&a->plane[k], &b->plane[k]);
    return equal;
}
