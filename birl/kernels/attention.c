/* Attention on tiles: over trees of packed tokens, and over cache pages.

   A query's keys are numbered by position, in pages of 32 from position 0 on, whichever nodes of a tree they come from,
   or from the cache. They are read in blocks of SPAN pages, so that scores and probabilities stay in the second-level
   cache, however long the sequence is; a block with a larger score than all before it scales their sums (online softmax,
   arXiv 1805.02867). Scores and sums are float32; the probabilities that multiply the values are rounded to elem
   before the division by their sum. So a token has the same bits in decode and in training.

   A page has keys packed for q k' and values packed for p v (tile.h): keys as [2 panels][HEAD_DIM / 32 blocks], values
   as [HEAD_DIM / 16 panels], a tile each. */
#include "layers.h"
#include "tile.h"

#define PAGE_SIZE (PAGE * HEAD_DIM)
#define KEY_BLOCKS (HEAD_DIM / BLOCK)
#define MOST 32 /* queries of a product */

enum {
    SPAN = 16, WIDTH = SPAN * PAGE, /* pages of a block, and its keys */
    BACK = 8 * PAGE,                /* keys of a block of the backward pass */
    QUERIES = 3 * MOST              /* of a block of rows, about */
};

static __thread scratch mine;

/* c [n, 32] = a k' for one page of keys, n rows of a in steps of at most 32 (rows up to the next ROWS are written). */
static inline void score_page(const elem *a, long n, const elem *keys, float *c, long ld) {
    for (long i = 0; i < n; i += MOST)
        product(a + i * HEAD_DIM, n - i, HEAD_DIM, keys, keys + KEY_BLOCKS * TILE, TILE, KEY_BLOCKS, c + i * ld, ld, 0);
}

/* o [n, HEAD_DIM] = or += p v for `count` pages of values, one after another in memory; p [n, 32 count]. */
static inline void value_pages(const elem *p, long ldp, long n, const elem *values, long count, float *o, int add) {
    for (long i = 0; i < n; i += MOST)
        for (long d = 0; d < HEAD_DIM; d += 32)
            product(p + i * ldp, n - i, ldp, values + d / PANEL * TILE, values + (d / PANEL + 1) * TILE, PAGE_SIZE, count,
                    o + i * HEAD_DIM + d, HEAD_DIM, add);
}

/* score_page and value_pages for one page of the cache. The processor cannot predict its next page: all of `later` is
   prefetched, into the cache NEAR (tile.h). */
enum { LATER = 2 }; /* distance in pages from the read one to the prefetched one */

static inline void fetch_page(const elem *page) {
    for (long i = 0; i < PAGE_SIZE; i += STEP) __builtin_prefetch(page + i, 0, 2);
}

static inline void score_cached(const elem *a, long n, const elem *keys, const elem *later, float *c, long ld) {
    for (long i = 0; i < n; i += MANY)
        product_ahead_by_two(a + i * HEAD_DIM, n - i, HEAD_DIM, keys, keys + KEY_BLOCKS * TILE, KEY_BLOCKS, (const char *)later,
                             (const char *)(later + PAGE_SIZE / 2), i ? 0 : PAGE_SIZE / 2 * sizeof(elem), c + i * ld, ld, 0);
}

/* score_cached for two pages and at most NARROW rows. */
static inline void score_two(const elem *a, long n, const elem *const *pages, float *c, long ld) {
    product_of_four(a, n, HEAD_DIM, pages[0], pages[1], pages[LATER], pages[LATER + 1], PAGE_SIZE / 2, KEY_BLOCKS, c, ld, 0);
}

static inline void value_cached(const elem *p, long ldp, long n, const elem *values, const elem *later, float *o, int add) {
    if (n <= NARROW && HEAD_DIM % 64 == 0) {
        for (long d = 0; d < HEAD_DIM; d += 64)
            product_of_four(p, n, ldp, values + d / PANEL * TILE, values + (d / PANEL + 2) * TILE, later + d / PANEL * TILE,
                            later + (d / PANEL + 2) * TILE, TILE, 1, o + d, HEAD_DIM, add);
        return;
    }
    for (long i = 0; i < n; i += MANY)
        for (long d = 0; d < HEAD_DIM; d += 32) {
            const long first = d / PANEL * TILE, second = first + TILE;
            product_ahead_by_two(p + i * ldp, n - i, ldp, values + first, values + second, 1, (const char *)(later + first),
                                 (const char *)(later + second), i ? 0 : TILE * sizeof(elem), o + i * HEAD_DIM + d, HEAD_DIM, add);
        }
}

/* A query's softmax, block after block: the largest score so far, and the sums of e^(score - peak) by lane. */
typedef struct { vec total; float peak; } softmax;

/* Scores [end] of one query and a block -> p = e^(scale s - peak), rounded, 0 outside first..last. A new peak scales the
   sums so far, those in o [HEAD_DIM] too. */
static inline void soften(float *s, long first, long last, long end, float scale, elem *p, softmax *state, float *o) {
    first = first > 0 ? first : 0, last = last < end ? last : end;
    if (first >= last) first = last = 0;
    const long from = first / LANES * LANES, to = (last + LANES - 1) / LANES * LANES;
    for (long j = from; j < first; j++) s[j] = -INFINITY;
    for (long j = last; j < to; j++) s[j] = -INFINITY;
    vec most[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    for (long j = from; j < to; j += LANES) most[j / LANES % 4] = larger(*(vec *)(s + j), most[j / LANES % 4]);
    const float block = largest(larger(larger(most[0], most[1]), larger(most[2], most[3]))) * scale;
    const float before = state->peak, peak = block > before ? block : before;
    vec total = state->total;
    if (peak > before) {
        const vec factor = vexp(splat(before - peak));
        for (long d = 0; d < HEAD_DIM; d += LANES) *(vec *)(o + d) *= factor;
        total *= factor;
    }
    for (long j = 0; j < from; j += LANES) store(p + j, (vec){});
    for (long j = from; j < to; j += LANES) {
        vec e = vexp(*(vec *)(s + j) * scale - peak);
        total += e;
        store(p + j, e);
    }
    for (long j = to; j < end; j += LANES) store(p + j, (vec){});
    *state = (softmax){total, peak};
}

/* out [HEAD_DIM] = o / total. Returns log sum exp. */
static inline float divided(const softmax *state, const float *o, elem *out) {
    const float all = sum(state->total), inverse = 1.f / all;
    for (long d = 0; d < HEAD_DIM; d += LANES) store(out + d, *(const vec *)(o + d) * inverse);
    return state->peak + logf(all);
}

/* The end of the block of pages from `at` on. */
static inline long bound(long at, long pages) { return pages < at + SPAN ? pages : at + SPAN; }

/* Addresses of 32 positions of a sequence: rows of one head, NULL after the last. */
typedef struct { const elem *row[PAGE]; } places;

static places find(const elem *base, long stride, const segment *segments, long at, long page) {
    places found;
    const segment *s = segments + at;
    const long end = s->prefix + s->length;
    for (long i = PAGE - 1; i >= 0; i--) {
        const long j = page * PAGE + i;
        while (j < s->prefix) s = segments + s->parent;
        found.row[i] = j < end ? base + (s->start + j - s->prefix) * stride : NULL;
    }
    return found;
}

/* Pack 32 rows [HEAD_DIM] as the right side of x rows': panels of 16 rows. */
static void pack_keys(const places *from, elem *page) {
    for (long panel = 0; panel < 2; panel++)
        for (long d = 0; d < HEAD_DIM; d += STEP) {
            line lines[16] = {};
            for (long i = 0; i < 16; i++)
                if (from->row[panel * 16 + i]) memcpy(&lines[i], from->row[panel * 16 + i] + d, sizeof(line));
            transpose16(lines);
            memcpy(page + panel * KEY_BLOCKS * TILE + d * PANEL, lines, sizeof(lines));
        }
}

/* Pack 32 rows [HEAD_DIM] as the right side of p rows: panels of 16 columns. */
static void pack_values(const places *from, elem *page) {
    for (long panel = 0; panel < HEAD_DIM / PANEL; panel++)
        for (long i = 0; i < PAGE; i += WORD) {
            const elem *even = from->row[i], *odd = from->row[i + WORD - 1];
            *(line *)(page + panel * TILE + i * PANEL) = zipped(even ? even + panel * PANEL : NULL, odd ? odd + panel * PANEL : NULL);
        }
}

/* One tree of a task, and the sizes of its buffers. */
typedef struct {
    long from, to; /* its segments */
    long width;    /* all positions of the longest sequence, whole pages */
    long step;     /* rows whose queries are computed at once */
    long most;     /* queries of such a block, whole tiles */
} tree;

static tree find_tree(const segment *segments, long count, long number, long group) {
    tree t = {.step = group > QUERIES ? 1 : group > QUERIES / PAGE ? QUERIES / group : PAGE};
    t.most = (t.step * group + MOST - 1) / MOST * MOST;
    while (segments[t.from].tree != number) t.from++;
    for (t.to = t.from; t.to < count && segments[t.to].tree == number; t.to++) {
        const long width = pages_of(segments[t.to].prefix + segments[t.to].length) * PAGE;
        t.width = width > t.width ? width : t.width;
    }
    return t;
}

/* out [T, H * D], lse [T, H].  Heads of one key head are queries of one product. Rows are `stride` elements apart. */
EXPORT void tree_attention(const elem *query, const elem *key, const elem *value, long stride, elem *out, float *lse,
                           const segment *segments, long count, long heads, long kv_heads, float scale, long window) {
    const long group = heads / kv_heads, trees = count ? segments[count - 1].tree + 1 : 0;
#pragma omp parallel
    {
        START_THREAD();
#pragma omp for schedule(dynamic)
        for (long task = 0; task < trees * kv_heads; task++) {
            const tree t = find_tree(segments, count, task / kv_heads, group);
            const long h = task % kv_heads, from = t.from, to = t.to, width = t.width, step = t.step, most = t.most;
            char *memory = take(&mine, 2 * width * HEAD_DIM * sizeof(elem) + most * (HEAD_DIM + WIDTH) * (sizeof(elem) + sizeof(float)));
            float *scores = (float *)memory, *o = scores + most * WIDTH;
            elem *keys = (elem *)(o + most * HEAD_DIM), *values = keys + width * HEAD_DIM;
            elem *q = values + width * HEAD_DIM, *p = q + most * HEAD_DIM;
            memset(q, 0, most * HEAD_DIM * sizeof(elem));
            memset(p, 0, most * WIDTH * sizeof(elem));
            const elem *k_base = key + h * HEAD_DIM, *v_base = value + h * HEAD_DIM;
            for (long number = from; number < to; number++) {
                const segment *s = segments + number;
                if (!s->length) continue;
                for (long page = s->prefix / PAGE; page < pages_of(s->prefix + s->length); page++) { /* the others stay */
                    const places k = find(k_base, stride, segments, number, page), v = find(v_base, stride, segments, number, page);
                    pack_keys(&k, keys + page * PAGE_SIZE);
                    pack_values(&v, values + page * PAGE_SIZE);
                }
                for (long top = 0; top < s->length; top += step) {
                    const long rows = s->length - top < step ? s->length - top : step, n = rows * group;
                    const long pages = pages_of(s->prefix + top + rows);
                    for (long i = 0; i < rows; i++)
                        memcpy(q + i * group * HEAD_DIM, query + (s->start + top + i) * stride + h * group * HEAD_DIM,
                               group * HEAD_DIM * sizeof(elem));
                    softmax state[most];
                    for (long i = 0; i < n; i++) state[i] = (softmax){{}, -INFINITY};
                    for (long at = 0; at < pages; at += SPAN) {
                        const long count = bound(at, pages) - at;
                        for (long page = 0; page < count; page++)
                            score_page(q, n, keys + (at + page) * PAGE_SIZE, scores + page * PAGE, WIDTH);
                        for (long i = 0; i < n; i++) {
                            const long visible = s->prefix + top + i / group + 1 - at * PAGE, first = window ? visible - window : 0;
                            soften(scores + i * WIDTH, first, visible, count * PAGE, scale, p + i * WIDTH, state + i, o + i * HEAD_DIM);
                        }
                        value_pages(p, WIDTH, n, values + at * PAGE_SIZE, count, o, at > 0);
                    }
                    for (long i = 0; i < n; i++) {
                        const long place = (s->start + top + i / group) * heads + h * group + i % group;
                        const float l = divided(state + i, o + i * HEAD_DIM, out + place * HEAD_DIM);
                        if (lse) lse[place] = l;
                    }
                }
            }
            give(&mine);
        }
        END_THREAD();
    }
}

/* p [n queries, 32 keys] (rows BACK apart) -> [32 keys, n queries] (rows n apart), n a multiple of 32. */
static void turn(const elem *p, long n, elem *out) {
    for (long part = 0; part < n; part += STEP)
        for (long half = 0; half < 2; half++) {
            line lines[16];
            lines_of(p + part * BACK, BACK, 0, half * 16, STEP, lines);
            transpose16(lines);
            for (long i = 0; i < 16; i++) *(line *)(out + (half * 16 + i) * n + part) = lines[i];
        }
}

/* With p = softmax(scale q k'), o = p v:  dv = p' do,  dp = do v',  ds = scale p (dp - do . o),  dq = ds k,  dk = ds'
   q. grad_query, grad_key, grad_value have the layout of query, key, value. A tree and a key head are one task, so
   every sum has one writer. Segments are processed from the last to the first, so that children come before their
   parent; sums by key are kept by position, so that those of a common prefix are kept between segments. */
EXPORT void tree_attention_backward(const elem *query, const elem *key, const elem *value, long stride, const elem *out,
                                    const float *lse, const elem *grad_out, elem *grad_query, elem *grad_key,
                                    elem *grad_value, const segment *segments, long count, long heads, long kv_heads,
                                    float scale, long window) {
    const long group = heads / kv_heads, trees = count ? segments[count - 1].tree + 1 : 0;
#pragma omp parallel
    {
        START_THREAD();
#pragma omp for schedule(dynamic)
        for (long task = 0; task < trees * kv_heads; task++) {
            const tree t = find_tree(segments, count, task / kv_heads, group);
            const long h = task % kv_heads, from = t.from, to = t.to, width = t.width, step = t.step, most = t.most;
            char *memory = take(&mine, width * HEAD_DIM * (3 * sizeof(elem) + 2 * sizeof(float)) + most * BACK * (2 * sizeof(elem) + 2 * sizeof(float)) +
                                most * HEAD_DIM * (4 * sizeof(elem) + sizeof(float)) + most * PAGE * sizeof(elem));
            float *dk = (float *)memory, *dv = dk + width * HEAD_DIM, *scores = dv + width * HEAD_DIM;
            float *dp = scores + most * BACK, *dq = dp + most * BACK;
            elem *keys = (elem *)(dq + most * HEAD_DIM), *keys_as_values = keys + width * HEAD_DIM;
            elem *values_as_keys = keys_as_values + width * HEAD_DIM, *p = values_as_keys + width * HEAD_DIM;
            elem *ds = p + most * BACK, *q = ds + most * BACK, *go = q + most * HEAD_DIM;
            elem *q_packed = go + most * HEAD_DIM, *go_packed = q_packed + most * HEAD_DIM, *turned = go_packed + most * HEAD_DIM;
            memset(q, 0, 2 * most * HEAD_DIM * sizeof(elem));
            memset(dk, 0, 2 * width * HEAD_DIM * sizeof(float));
            const elem *k_base = key + h * HEAD_DIM, *v_base = value + h * HEAD_DIM;
            long ready = 0; /* positions whose keys and values are packed */
            for (long number = to - 1; number >= from; number--) {
                const segment *s = segments + number;
                const long common = number + 1 < to ? s[1].prefix : 0; /* with the segment processed before */
                ready = ready < common ? ready : common;
                if (number + 1 < to && s[1].parent != number) { /* that was another branch, whose sums are complete */
                    memset(dk + common * HEAD_DIM, 0, (width - common) * HEAD_DIM * sizeof(float));
                    memset(dv + common * HEAD_DIM, 0, (width - common) * HEAD_DIM * sizeof(float));
                }
                if (!s->length) continue;
                for (long page = ready / PAGE; page < pages_of(s->prefix + s->length); page++) {
                    const places k = find(k_base, stride, segments, number, page), v = find(v_base, stride, segments, number, page);
                    pack_keys(&k, keys + page * PAGE_SIZE);
                    pack_values(&k, keys_as_values + page * PAGE_SIZE);
                    pack_keys(&v, values_as_keys + page * PAGE_SIZE);
                }
                ready = s->prefix + s->length;
                for (long top = 0; top < s->length; top += step) {
                    const long rows = s->length - top < step ? s->length - top : step, n = rows * group;
                    const long pages = pages_of(s->prefix + top + rows), padded = (n + MOST - 1) / MOST * MOST;
                    float delta[n];
                    for (long i = 0; i < rows; i++) {
                        const long row = s->start + top + i;
                        memcpy(q + i * group * HEAD_DIM, query + row * stride + h * group * HEAD_DIM, group * HEAD_DIM * sizeof(elem));
                        memcpy(go + i * group * HEAD_DIM, grad_out + (row * heads + h * group) * HEAD_DIM, group * HEAD_DIM * sizeof(elem));
                    }
                    memset(q + n * HEAD_DIM, 0, (padded - n) * HEAD_DIM * sizeof(elem));
                    memset(go + n * HEAD_DIM, 0, (padded - n) * HEAD_DIM * sizeof(elem));
                    memset(p + n * BACK, 0, (padded - n) * BACK * sizeof(elem));
                    memset(ds + n * BACK, 0, (padded - n) * BACK * sizeof(elem));
                    for (long part = 0; part < padded; part += MOST) {
                        places by_query, by_grad;
                        for (long i = 0; i < MOST; i++) by_query.row[i] = q + (part + i) * HEAD_DIM, by_grad.row[i] = go + (part + i) * HEAD_DIM;
                        pack_values(&by_query, q_packed + part * HEAD_DIM);
                        pack_values(&by_grad, go_packed + part * HEAD_DIM);
                    }
                    for (long i = 0; i < n; i++) {
                        const elem *own = out + ((s->start + top + i / group) * heads + h * group + i % group) * HEAD_DIM;
                        vec dots = {};
                        for (long d = 0; d < HEAD_DIM; d += LANES) dots += load(go + i * HEAD_DIM + d) * load(own + d);
                        delta[i] = sum(dots);
                    }
                    for (long begin = 0; begin < pages * PAGE; begin += BACK) {
                        const long end = pages * PAGE - begin < BACK ? pages * PAGE - begin : BACK, at = begin * HEAD_DIM;
                        for (long j = 0; j < end; j += PAGE) {
                            score_page(q, n, keys + at + j * HEAD_DIM, scores + j, BACK);
                            score_page(go, n, values_as_keys + at + j * HEAD_DIM, dp + j, BACK);
                        }
                        for (long i = 0; i < n; i++) {
                            const long visible = s->prefix + top + i / group + 1 - begin, first = window ? visible - window : 0;
                            const float l = lse[(s->start + top + i / group) * heads + h * group + i % group];
                            float *pr = scores + i * BACK, *dr = dp + i * BACK;
                            for (long j = 0; j < first && j < end; j++) pr[j] = -INFINITY;
                            for (long j = visible > 0 ? visible : 0; j < end; j++) pr[j] = -INFINITY, dr[j] = 0;
                            for (long j = 0; j < end; j += LANES) {
                                vec e = vexp(*(vec *)(pr + j) * scale - l);
                                store(p + i * BACK + j, e);
                                store(ds + i * BACK + j, e * (*(vec *)(dr + j) - delta[i]) * scale);
                            }
                        }
                        for (long j = 0; j < end; j += PAGE) {
                            turn(p + j, padded, turned);
                            value_pages(turned, padded, PAGE, go_packed, padded / MOST, dv + at + j * HEAD_DIM, 1);
                            turn(ds + j, padded, turned);
                            value_pages(turned, padded, PAGE, q_packed, padded / MOST, dk + at + j * HEAD_DIM, 1);
                        }
                        value_pages(ds, BACK, n, keys_as_values + at, end / PAGE, dq, begin > 0);
                    }
                    for (long i = 0; i < n; i++)
                        for (long d = 0; d < HEAD_DIM; d += LANES)
                            store(grad_query + (s->start + top + i / group) * stride + (h * group + i % group) * HEAD_DIM + d,
                                  *(vec *)(dq + i * HEAD_DIM + d));
                }
                for (long i = 0; i < s->length; i++)
                    for (long d = 0; d < HEAD_DIM; d += LANES) {
                        const long to_row = (s->start + i) * stride + h * HEAD_DIM + d, from_row = (s->prefix + i) * HEAD_DIM + d;
                        store(grad_key + to_row, *(vec *)(dk + from_row));
                        store(grad_value + to_row, *(vec *)(dv + from_row));
                    }
            }
            give(&mine);
        }
        END_THREAD();
    }
}

/* Cache of one layer: keys and values [pages, kv_heads, 32 * HEAD_DIM]. Position j of sequence b is in page table[b][j
   / 32]. Before a page's first position is written, its values are set to 0: old values must not be NaN, even times 0.
   */
void open_pages(elem *values, const int32_t *pages, const int32_t *places, long T, long kv_heads) {
#pragma omp for schedule(static)
    for (long t = 0; t < T; t++)
        if (!places[t]) memset(values + pages[t] * kv_heads * PAGE_SIZE, 0, kv_heads * PAGE_SIZE * sizeof(elem));
}

/* Write one position of one head to position j of a page. */
static inline void write_key(const elem *key, long j, elem *keys) {
    elem *to_keys = keys + j / 16 * KEY_BLOCKS * TILE + j % 16 * WORD;
    for (long d = 0; d < HEAD_DIM; d += WORD) memcpy(to_keys + d * PANEL, key + d, 4);
}

static inline void write_value(const elem *value, long j, elem *values) {
    elem *to_values = values + j / WORD * STEP + j % WORD;
    for (long d = 0; d < HEAD_DIM; d++) to_values[d / PANEL * TILE + d % PANEL * WORD] = value[d];
}

/* Write rows t of key and value [T, stride] to position places[t] of page pages[t]. */
void cache_write_part(const elem *key, const elem *value, long stride, elem *keys, elem *values, const int32_t *pages,
                      const int32_t *places, long T, long kv_heads) {
#pragma omp for schedule(static)
    for (long t = 0; t < T; t++)
        for (long h = 0; h < kv_heads; h++) {
            const long row = t * stride + h * HEAD_DIM, page = (pages[t] * kv_heads + h) * PAGE_SIZE;
            write_key(key + row, places[t], keys + page);
            write_value(value + row, places[t], values + page);
        }
}

EXPORT void cache_write(const elem *key, const elem *value, long stride, elem *keys, elem *values, const int32_t *pages,
                        const int32_t *places, long T, long kv_heads) {
#pragma omp parallel
    {
        open_pages(values, pages, places, T, kv_heads);
        cache_write_part(key, value, stride, keys, values, pages, places, T, kv_heads);
    }
}

/* One query row for each of B sequences of lengths[b] positions. Sequences starts[g]..starts[g + 1] have their first
   shared[g] pages in common, which are read once for all of them. All positions are in the cache, except with `fresh`
   [B, stride]: keys, then values, of the last ones, which are written to pages that no other group reads just before
   these pages are read. */
void paged_attention_part(const elem *query, const elem *fresh, long stride, elem *out, elem *keys, elem *values,
                          const int32_t *table, long table_width, const int32_t *lengths, const int32_t *starts,
                          const int32_t *shared, long groups, long heads, long kv_heads, float scale, long window) {
    const long group = heads / kv_heads, step = kv_heads * PAGE_SIZE;
    START_THREAD();
#pragma omp for schedule(dynamic)
    for (long task = 0; task < groups * kv_heads; task++) {
        const long g = task / kv_heads, h = task % kv_heads, begin = starts[g], count = starts[g + 1] - begin;
        const long common = count > 1 ? shared[g] : 0; /* pages of a single sequence are all its own */
        const long n = count * group, most = (n + MOST + group) / MOST * MOST + MOST;
        const int32_t *pages = table + begin * table_width, *length = lengths + begin;
        elem *k = keys + h * PAGE_SIZE, *v = values + h * PAGE_SIZE;
        long longest = 0;
        for (long i = 0; i < count; i++) longest = length[i] > longest ? length[i] : longest;
        const long all = pages_of(longest), alone = (group + MOST - 1) / MOST * MOST;
        char *memory = take(&mine, (most * (HEAD_DIM + WIDTH) + alone * HEAD_DIM) * sizeof(float) +
                                       most * (HEAD_DIM + WIDTH) * sizeof(elem) + (2 * count * all + LATER) * sizeof(elem *));
        float *scores = (float *)memory, *o = scores + most * WIDTH, *one = o + most * HEAD_DIM;
        elem *q = (elem *)(one + alone * HEAD_DIM), *p = q + most * HEAD_DIM;
        const elem **next = (const elem **)(p + most * WIDTH), **last = next; /* pages in the order of reading */
        softmax state[n];
        for (long j = 0; j < n; j++) state[j] = (softmax){{}, -INFINITY};
        for (long i = 0; i < count; i++)
            memcpy(q + i * group * HEAD_DIM, query + (begin + i) * stride + h * group * HEAD_DIM, group * HEAD_DIM * sizeof(elem));
        memset(q + n * HEAD_DIM, 0, (most - n) * HEAD_DIM * sizeof(elem));
        for (long at = 0; at < all; at += SPAN)
            for (const elem *base = k;; base = v) {
                for (long page = at; page < bound(at, common); page++) *last++ = base + pages[page] * step;
                for (long i = 0; i < count; i++)
                    for (long page = common > at ? common : at; page < bound(at, pages_of(length[i])); page++)
                        *last++ = base + pages[i * table_width + page] * step;
                if (base == v) break;
            }
        for (long i = 0; i < LATER; i++) last[i] = last[-1];
        for (long i = 0; i < LATER; i++) fetch_page(next[i]);
        for (long at = 0; at < all; at += SPAN) {
            const long own = common > at ? common : at; /* the first page that is not common */
            const elem **block = next; /* its pages of keys, then as many of values */
            for (long page = at; page < bound(at, common); page++, next++)
                score_cached(q, n, *next, next[LATER], scores + (page - at) * PAGE, WIDTH);
            for (long i = 0; i < count; i++)
                for (long page = own, end = bound(at, pages_of(length[i])), some; page < end; page += some, next += some) {
                    some = group <= NARROW && page + 1 < end ? 2 : 1;
                    const elem *rows = q + i * group * HEAD_DIM;
                    float *c = scores + i * group * WIDTH + (page - at) * PAGE;
                    if (fresh && page + some == pages_of(length[i]))
                        write_key(fresh + (begin + i) * stride + h * HEAD_DIM, (length[i] - 1) % PAGE, (elem *)next[some - 1]);
                    if (some == 2)
                        score_two(rows, group, next, c, WIDTH);
                    else
                        score_cached(rows, group, *next, next[LATER], c, WIDTH);
                }
            const long both = NARROW ? next - block : 0;
            for (long j = 0, ahead = 0; j < n; j++) {
                while (ahead < both * (j + 1) / n) fetch_page(next[ahead++]); /* values, while exponentials are computed */
                const long end = length[j / group] - at * PAGE, first = window ? end - window : 0;
                const long width = (bound(at, pages_of(length[j / group])) - at) * PAGE;
                soften(scores + j * WIDTH, first, end, width, scale, p + j * WIDTH, state + j, o + j * HEAD_DIM);
            }
            for (long page = at; page < bound(at, common); page++, next++)
                value_cached(p + (page - at) * PAGE, WIDTH, n, *next, next[LATER], o, page > 0);
            for (long i = 0; i < count; i++) {
                memcpy(one, o + i * group * HEAD_DIM, group * HEAD_DIM * sizeof(float));
                for (long page = own; page < bound(at, pages_of(length[i])); page++, next++) {
                    if (fresh && page == pages_of(length[i]) - 1)
                        write_value(fresh + (begin + i) * stride + (kv_heads + h) * HEAD_DIM, (length[i] - 1) % PAGE, (elem *)*next);
                    value_cached(p + i * group * WIDTH + (page - at) * PAGE, WIDTH, group, *next, next[LATER], one, page > 0);
                }
                memcpy(o + i * group * HEAD_DIM, one, group * HEAD_DIM * sizeof(float));
            }
        }
        for (long j = 0; j < n; j++)
            divided(state + j, o + j * HEAD_DIM, out + ((begin + j / group) * heads + h * group + j % group) * HEAD_DIM);
        give(&mine);
    }
    END_THREAD();
}

EXPORT void paged_attention(const elem *query, long stride, elem *out, elem *keys, elem *values,
                            const int32_t *table, long table_width, const int32_t *lengths, const int32_t *starts,
                            const int32_t *shared, long groups, long heads, long kv_heads, float scale, long window) {
#pragma omp parallel
    paged_attention_part(query, NULL, stride, out, keys, values, table, table_width, lengths, starts, shared, groups,
                         heads, kv_heads, scale, window);
}
