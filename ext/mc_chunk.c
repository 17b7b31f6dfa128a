#include "mc_chunk.h"

/* The gear table is the first 256 outputs of splitmix64 from the seed 0: store format. */
static u64 splitmix64(u64 *state)
{
    u64 z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The highest bits of the hash depend on the last 64 bytes. */
static u64 top_bits(int bits) { return ~(u64)0 << (64 - bits); }

void mc_chunker_init(mc_chunker *chunker, u64 minimum, u64 average, u64 maximum)
{
    u64 state = 0;
    for (int i = 0; i < 256; i++)
        chunker->gear[i] = splitmix64(&state);
    int bits = 63 - __builtin_clzll(average);
    chunker->minimum = minimum;
    chunker->average = average;
    chunker->maximum = maximum;
    chunker->strict = top_bits(bits + 2);
    chunker->loose = top_bits(bits - 2);
    chunker->hash = 0;
    chunker->length = 0;
    chunker->complete = 0;
}

/* Roll over data[from..to); returns the position after a border, or 0. */
static size_t find(mc_chunker *chunker, const u8 *data, size_t from, size_t to, u64 mask)
{
    u64 hash = chunker->hash;
    for (size_t i = from; i < to; i++) {
        hash = (hash << 1) + chunker->gear[data[i]];
        if (!(hash & mask)) {
            chunker->hash = hash;
            return i + 1;
        }
    }
    chunker->hash = hash;
    return 0;
}

static u64 least(u64 a, u64 b) { return a < b ? a : b; }

size_t mc_chunker_push(mc_chunker *chunker, const u8 *data, size_t length, int *border)
{
    if (chunker->complete)
        chunker->hash = chunker->length = 0;
    const u64 before = chunker->length;
    const u64 end = least(before + length, chunker->maximum);
    /* Bytes below the minimum are not even hashed. */
    u64 at = least(before > chunker->minimum ? before : chunker->minimum, end);
    size_t found = 0;
    u64 middle = least(chunker->average, end);
    if (at < middle) {
        found = find(chunker, data, (size_t)(at - before), (size_t)(middle - before), chunker->strict);
        at = middle;
    }
    if (!found && at < end)
        found = find(chunker, data, (size_t)(at - before), (size_t)(end - before), chunker->loose);
    size_t taken = found ? found : (size_t)(end - before);
    chunker->length = before + taken;
    *border = chunker->complete = found || chunker->length == chunker->maximum;
    return taken;
}
