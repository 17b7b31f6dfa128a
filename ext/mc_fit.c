/*
 * From counted symbols to a model: contexts with like distributions are put together, by k-means on coding cost
 * from a start that orders contexts by the size of their symbols, then by merging neighbours while that saves bytes.
 */
#include "mc_log2.h"
#include "mc_model.h"

#define ROUNDS 2
#define FEW_SYMBOLS (1 << 18) /* that do not pay for many tables */

void mc_normalise(u16 frequency[256], const u32 counts[256], u32 total, unsigned bits)
{
    const int sum = 1 << bits;
    int left = sum, most = 0;
    for (int symbol = 0; symbol < 256; symbol++) {
        u32 value = (u32)(((u64)counts[symbol] * (u64)sum + total / 2) / total);
        if (counts[symbol] && value == 0)
            value = 1;
        if (value > (u32)sum - 1)
            value = (u32)sum - 1;
        frequency[symbol] = (u16)value;
        left -= (int)value;
        if (counts[symbol] > counts[most])
            most = symbol;
    }
    if (left > 0 && frequency[most] + left < sum) {
        frequency[most] = (u16)(frequency[most] + left);
    } else if (left > 0) {
        frequency[most ^ 1] = (u16)left; /* the only symbol: a neighbour that never occurs gets the last slot */
    }
    while (left < 0) {
        /* Take slots from where they are missed least: the loss is count / frequency for each. */
        int cheapest = -1;
        float least = 0;
        for (int symbol = 0; symbol < 256; symbol++)
            if (frequency[symbol] > 1) {
                float loss = (float)counts[symbol] / (float)(frequency[symbol] - 1);
                if (cheapest < 0 || loss < least) {
                    cheapest = symbol;
                    least = loss;
                }
            }
        int take = frequency[cheapest] / 16 + 1;
        take = take > -left ? -left : take;
        take = take > frequency[cheapest] - 1 ? frequency[cheapest] - 1 : take;
        frequency[cheapest] = (u16)(frequency[cheapest] - take);
        left += take;
    }
}

static u32 total_of(const u32 counts[256])
{
    u32 total = 0;
    for (int symbol = 0; symbol < 256; symbol++)
        total += counts[symbol];
    return total;
}

/* Bits that the counted symbols take with the best table, without the table. */
static float entropy(const u32 counts[256])
{
    float bits = 0;
    u32 total = 0;
    for (int symbol = 0; symbol < 256; symbol++) {
        float count = (float)counts[symbol];
        total += counts[symbol];
        bits -= count * mc_log2(count + 1e-9f);
    }
    return total ? bits + (float)total * mc_log2((float)total) : 0;
}

/* About what a table takes when stored, in bits. */
static float table_cost(const u32 counts[256])
{
    int symbols = 0;
    for (int symbol = 0; symbol < 256; symbol++)
        symbols += counts[symbol] != 0;
    return 8.0f + 11.0f * (float)symbols;
}

typedef struct {
    unsigned tables;
    u32 counts[MC_TABLES][256];
    float cost[MC_TABLES][256]; /* bits of a symbol */
    u8 map[MC_CONTEXTS];
    unsigned order[MC_CONTEXTS]; /* contexts that occur, by rising mean size of their symbols */
    unsigned used;
} clusters;

static float mean_size(const u32 counts[256], u32 total)
{
    u64 sum = 0;
    for (unsigned symbol = 1; symbol < 256; symbol++)
        sum += (u64)counts[symbol] * (32u - (unsigned)__builtin_clz(symbol));
    return (float)sum / (float)total;
}

/* Order the contexts that occur and cut that order into ranges of about equal weight. */
static void start_clusters(clusters *c, const mc_counts counts, unsigned contexts)
{
    float size[MC_CONTEXTS], weight[MC_CONTEXTS], sum = 0, passed = 0;
    u64 symbols = 0;
    c->used = 0;
    for (unsigned context = 0; context < contexts; context++) {
        u32 total = total_of(counts[context]);
        if (!total)
            continue;
        size[context] = mean_size(counts[context], total);
        weight[context] = mc_log2((float)total + 1.0f);
        sum += weight[context];
        symbols += total;
        unsigned place = c->used++;
        for (; place > 0 && size[c->order[place - 1]] > size[context]; place--)
            c->order[place] = c->order[place - 1];
        c->order[place] = context;
    }
    unsigned tables = symbols < FEW_SYMBOLS ? MC_TABLES / 2 : MC_TABLES;
    c->tables = tables < c->used ? tables : c->used;
    for (unsigned i = 0; i < c->used; i++) {
        unsigned table = (unsigned)(passed / sum * (float)c->tables);
        c->map[c->order[i]] = (u8)(table < c->tables ? table : c->tables - 1);
        passed += weight[c->order[i]];
    }
}

static void add_up(clusters *c, const mc_counts counts)
{
    memset(c->counts, 0, sizeof c->counts);
    for (unsigned i = 0; i < c->used; i++) {
        u32 *sum = c->counts[c->map[c->order[i]]];
        for (int symbol = 0; symbol < 256; symbol++)
            sum[symbol] += counts[c->order[i]][symbol];
    }
}

static void move_contexts(clusters *c, const mc_counts counts)
{
    for (unsigned table = 0; table < c->tables; table++) {
        float all = mc_log2((float)total_of(c->counts[table]) + 1.0f);
        for (int symbol = 0; symbol < 256; symbol++)
            c->cost[table][symbol] = all - mc_log2((float)c->counts[table][symbol] + 0.02f);
    }
    for (unsigned i = 0; i < c->used; i++) {
        const u32 *mine = counts[c->order[i]];
        float count[256], least = 0;
        for (int symbol = 0; symbol < 256; symbol++)
            count[symbol] = (float)mine[symbol];
        for (unsigned table = 0; table < c->tables; table++) {
            float part[8] = {0};
            for (int symbol = 0; symbol < 256; symbol += 8)
                for (int k = 0; k < 8; k++)
                    part[k] += count[symbol + k] * c->cost[table][symbol + k];
            float bits = part[0] + part[1] + part[2] + part[3] + part[4] + part[5] + part[6] + part[7];
            if (table == 0 || bits < least) {
                least = bits;
                c->map[c->order[i]] = (u8)table;
            }
        }
    }
}

/* Cost of two tables less the cost of one for both, in bits. */
static float merge_gain(const u32 a[256], const u32 b[256])
{
    u32 both[256];
    for (int symbol = 0; symbol < 256; symbol++)
        both[symbol] = a[symbol] + b[symbol];
    return entropy(a) + table_cost(a) + entropy(b) + table_cost(b) - entropy(both) - table_cost(both);
}

static void merge_tables(clusters *c)
{
    float gain[MC_TABLES];
    for (unsigned table = 0; table + 1 < c->tables; table++)
        gain[table] = merge_gain(c->counts[table], c->counts[table + 1]);
    while (c->tables > 1) {
        unsigned best = 0;
        for (unsigned table = 1; table + 1 < c->tables; table++)
            if (gain[table] > gain[best])
                best = table;
        if (gain[best] < 0)
            return;
        for (int symbol = 0; symbol < 256; symbol++)
            c->counts[best][symbol] += c->counts[best + 1][symbol];
        for (unsigned i = 0; i < c->used; i++)
            c->map[c->order[i]] = (u8)(c->map[c->order[i]] - (c->map[c->order[i]] > best));
        c->tables--;
        memmove(c->counts[best + 1], c->counts[best + 2], (c->tables - best - 1) * sizeof c->counts[0]);
        memmove(gain + best, gain + best + 1, (c->tables - best) * sizeof gain[0]);
        if (best > 0)
            gain[best - 1] = merge_gain(c->counts[best - 1], c->counts[best]);
        if (best + 1 < c->tables)
            gain[best] = merge_gain(c->counts[best], c->counts[best + 1]);
    }
}

/* Bytes of the model and of what it codes. */
static double finish(mc_model *model, const clusters *c, unsigned bits)
{
    double cost = 0;
    model->tables = c->tables;
    model->bits = bits;
    memcpy(model->map, c->map, sizeof model->map);
    for (unsigned table = 0; table < c->tables; table++) {
        const u32 *counts = c->counts[table];
        u16 *frequency = model->frequency[table];
        mc_normalise(frequency, counts, total_of(counts), bits);
        float sum = 0;
        for (int symbol = 0; symbol < 256; symbol++)
            if (counts[symbol])
                sum += (float)counts[symbol] * ((float)bits - mc_log2((float)frequency[symbol]));
        cost += sum;
    }
    u8 room[MC_MODEL_BYTES];
    return cost / 8 + (double)(mc_model_write(model, room) - room);
}

/* Leave no table without contexts: the stored form has no empty tables. */
static void drop_empty(clusters *c)
{
    u8 renumber[MC_TABLES], kept = 0;
    for (unsigned table = 0; table < c->tables; table++) {
        renumber[table] = kept;
        if (total_of(c->counts[table])) {
            memmove(c->counts[kept], c->counts[table], sizeof c->counts[0]);
            kept++;
        }
    }
    for (unsigned i = 0; i < c->used; i++)
        c->map[c->order[i]] = renumber[c->map[c->order[i]]];
    c->tables = kept;
}

/* Contexts that never occur get the table of one that is nearly the same, so that the map depends on little. */
static void fill_map(clusters *c)
{
    u8 occurs[MC_CONTEXTS] = {0};
    for (unsigned i = 0; i < c->used; i++)
        occurs[c->order[i]] = 1;
    for (unsigned context = 1; context < MC_CONTEXTS; context++) {
        if (occurs[context])
            continue;
        unsigned like = context & 0x30 ? context & ~0x30u : context & 0xc0 ? context & ~0xc0u : context - 1;
        c->map[context] = c->map[like];
    }
}

double mc_model_fit(mc_model *model, const mc_counts counts, unsigned contexts)
{
    clusters c;
    memset(c.map, 0, sizeof c.map);
    start_clusters(&c, counts, contexts);
    if (!c.used) {
        model->tables = 0;
        return 1;
    }
    for (int round = 0; round < ROUNDS && c.tables > 1; round++) {
        add_up(&c, counts);
        move_contexts(&c, counts);
    }
    add_up(&c, counts);
    drop_empty(&c);
    merge_tables(&c);
    fill_map(&c);
    double cost = finish(model, &c, MC_BITS_MAX);
    if (c.tables > 1) {
        /* Smaller tables stay in the cache, which is worth a little. */
        mc_model small;
        double small_cost = finish(&small, &c, MC_BITS_MAX - 1);
        if (small_cost < 1.002 * cost) {
            *model = small;
            return small_cost;
        }
    }
    return cost;
}
