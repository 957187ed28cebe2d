/* Attention in float32 (gemm_attention.c has it in bfloat16): over trees of packed tokens, and over cache pages.

   A query's scores are stored in one row ordered by position, whichever nodes of a tree or pages the keys are in: the
   softmax and the weighted sum then have the same order everywhere. */
#include "layers.h"

enum {
    QUERIES = LANES == 16 ? 4 : 2,      /* query rows whose sums are in registers at once, */
    COLUMNS = HEAD_VECTORS % 4 ? 2 : 4, /* times vectors of a head, */
    ACROSS = PAGE / LANES               /* or of a tile of keys */
};

static __thread scratch mine;

/* scores[i][0..31] = q[i] . k  for n queries and a tile of keys [HEAD_DIM][32]. */
static inline void score_tile(const float *q, long n, const float *keys, float *scores, long stride) {
    for (long i = 0; i < n; i += QUERIES) {
        const long m = n - i < QUERIES ? n - i : QUERIES;
        const float *row[QUERIES];
        for (int j = 0; j < QUERIES; j++) row[j] = q + (i + (j < m ? j : 0)) * HEAD_DIM;
        vec s[QUERIES][ACROSS] = {};
        for (int d = 0; d < HEAD_DIM; d++)
            for (int v = 0; v < ACROSS; v++) {
                vec x = *(const vec *)(keys + d * PAGE + v * LANES);
                for (int j = 0; j < QUERIES; j++) s[j][v] += row[j][d] * x;
            }
        for (int j = 0; j < m; j++)
            for (int v = 0; v < ACROSS; v++) *(vec *)(scores + (i + j) * stride + v * LANES) = s[j][v];
    }
}

/* out[i] += sum_k p[i * across + k * along] rows[k], k in order, for n rows of out and `count` rows [HEAD_DIM]. */
static inline void add_rows(const float *p, long across, long along, long n, const float *rows, long count, float *out) {
    for (long i = 0; i < n; i += QUERIES) {
        const long m = n - i < QUERIES ? n - i : QUERIES;
        const float *factor[QUERIES];
        for (int j = 0; j < QUERIES; j++) factor[j] = p + (i + (j < m ? j : 0)) * across;
        for (int d = 0; d < HEAD_DIM; d += COLUMNS * LANES) {
            vec o[QUERIES][COLUMNS];
            for (int j = 0; j < QUERIES; j++)
                for (int v = 0; v < COLUMNS; v++) o[j][v] = *(const vec *)(out + (i + (j < m ? j : 0)) * HEAD_DIM + d + v * LANES);
            for (long k = 0; k < count; k++)
                for (int v = 0; v < COLUMNS; v++) {
                    vec x = *(const vec *)(rows + k * HEAD_DIM + d + v * LANES);
                    for (int j = 0; j < QUERIES; j++) o[j][v] += factor[j][k * along] * x;
                }
            for (int j = 0; j < m; j++)
                for (int v = 0; v < COLUMNS; v++) *(vec *)(out + (i + j) * HEAD_DIM + d + v * LANES) = o[j][v];
        }
    }
}

/* out[i] += sum_j p[i][j] values[j]  for n queries and `count` values. */
static inline void add_values(const float *p, long stride, long n, const float *values, long count, float *out) {
    add_rows(p, stride, 1, n, values, count, out);
}

/* into[j] += sum_i p[i][j] rows[i]  for `count` keys j and n queries. */
static inline void add_outer(const float *p, long stride, long n, const float *rows, float *into, long count) {
    add_rows(p, 1, stride, count, rows, n, into);
}

/* scores[first..last) become probabilities, the rest of the row up to `end` 0. Returns log sum exp. */
static inline float softmax(float *scores, long first, long last, long end) {
    const long from = first / LANES * LANES;
    for (long j = from; j < first; j++) scores[j] = -INFINITY;
    for (long j = 0; j < from; j++) scores[j] = 0;
    const long to = (last + LANES - 1) / LANES * LANES;
    for (long j = last; j < to; j++) scores[j] = -INFINITY;
    for (long j = to; j < end; j++) scores[j] = 0;
    vec most = splat(-INFINITY), total = {};
    for (long j = from; j < to; j += LANES) most = larger(*(vec *)(scores + j), most);
    const float peak = largest(most);
    for (long j = from; j < to; j += LANES) {
        vec e = vexp(*(vec *)(scores + j) - peak);
        total += e;
        *(vec *)(scores + j) = e;
    }
    const float all = sum(total), scale = 1.f / all;
    for (long j = from; j < to; j += LANES) *(vec *)(scores + j) *= scale;
    return peak + logf(all);
}

static inline void widen(const elem *from, float *to, long n, float scale) {
    for (long i = 0; i < n; i += LANES) *(vec *)(to + i) = load(from + i) * scale;
}

static inline void narrow(const float *from, elem *to, long n) {
    for (long i = 0; i < n; i += LANES) store(to + i, *(const vec *)(from + i));
}

/* n rows of one head -> positions `first` and so on of tiles [HEAD_DIM][32] in float32. */
static void transpose(const elem *rows, long stride, long first, long n, float *out) {
    float row[HEAD_DIM] __attribute__((aligned(64)));
    for (long t = 0; t < n; t++) {
        widen(rows + t * stride, row, HEAD_DIM, 1.f);
        float *tile = out + (first + t) / PAGE * PAGE * HEAD_DIM + (first + t) % PAGE;
        for (int d = 0; d < HEAD_DIM; d++) tile[d * PAGE] = row[d];
    }
}

static void widen_rows(const elem *rows, long stride, long n, float *out) {
    for (long t = 0; t < n; t++) widen(rows + t * stride, out + t * HEAD_DIM, HEAD_DIM, 1.f);
}

/* scores[i][j] = q[i] . k[j]  for n queries and keys 0 to `end`, by position. The last tile after `end` is masked
   later. */
static void score_rows(const float *q, long n, const float *keys, long end, float *scores, long stride) {
    for (long j = 0; j < end; j += PAGE) score_tile(q, n, keys + j * HEAD_DIM, scores + j, stride);
}

static long block_rows(long group) { return group >= 16 ? 1 : 16 / group; }

/* out [T, H * D], lse [T, H].  Heads of one key head are queries of one product. Rows are `stride` elements apart. */
EXPORT void tree_attention(const elem *query, const elem *key, const elem *value, long stride, elem *out, float *lse,
                           const segment *segments, long count, long heads, long kv_heads, float scale, long window) {
    const long group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic)
    for (long task = 0; task < count * kv_heads; task++) {
        const segment s = segments[task / kv_heads];
        const long h = task % kv_heads, step = block_rows(group), width = (pages_of(s.prefix + s.length) + 1) * PAGE;
        float *memory = take(&mine, (2 * width * HEAD_DIM + step * group * (width + 2 * HEAD_DIM)) * sizeof(float));
        float *keys = memory, *values = keys + width * HEAD_DIM, *scores = values + width * HEAD_DIM;
        float *q = scores + step * group * width, *o = q + step * group * HEAD_DIM;
        for (const segment *a = &s;; a = segments + a->parent) { /* up to the root */
            transpose(key + a->start * stride + h * HEAD_DIM, stride, a->prefix, a->length, keys);
            widen_rows(value + a->start * stride + h * HEAD_DIM, stride, a->length, values + a->prefix * HEAD_DIM);
            if (a->parent < 0) break;
        }
        for (long top = 0; top < s.length; top += step) {
            const long rows = s.length - top < step ? s.length - top : step, n = rows * group;
            for (long i = 0; i < rows; i++)
                widen(query + (s.start + top + i) * stride + h * group * HEAD_DIM, q + i * group * HEAD_DIM,
                      group * HEAD_DIM, scale);
            const long end = s.prefix + top + rows;
            score_rows(q, n, keys, end, scores, width);
            for (long i = 0; i < n; i++) {
                const long visible = s.prefix + top + i / group + 1, first = window && visible > window ? visible - window : 0;
                const float l = softmax(scores + i * width, first, visible, end);
                if (lse) lse[(s.start + top + i / group) * heads + h * group + i % group] = l;
            }
            memset(o, 0, n * HEAD_DIM * sizeof(float));
            add_values(scores, width, n, values, end, o);
            for (long i = 0; i < rows; i++)
                narrow(o + i * group * HEAD_DIM, out + ((s.start + top + i) * heads + h * group) * HEAD_DIM, group * HEAD_DIM);
        }
        give(&mine);
    }
}

/* With p = softmax(s), o = p v:  dv = p' do,  dp = do v',  ds = p (dp - do . o),  dq = scale ds k,  dk = scale ds' q.
   grad_query, grad_key, grad_value have the layout of query, key, value. A tree and a key head are one task, so every
   sum has one writer. Tiles are by position: the prefix that a segment shares with the previous one stays in them. */
EXPORT void tree_attention_backward(const elem *query, const elem *key, const elem *value, long stride, const elem *out,
                                    const float *lse, const elem *grad_out, elem *grad_query, elem *grad_key,
                                    elem *grad_value, const segment *segments, long count, long heads, long kv_heads,
                                    float scale, long window) {
    const long group = heads / kv_heads, trees = count ? segments[count - 1].tree + 1 : 0;
#pragma omp parallel for schedule(dynamic)
    for (long task = 0; task < trees * kv_heads; task++) {
        const long h = task % kv_heads, step = block_rows(group);
        long from = 0;
        while (segments[from].tree != task / kv_heads) from++;
        long to = from, length = 0, most = 0;
        for (; to < count && segments[to].tree == segments[from].tree; to++) {
            length += segments[to].length;
            most = segments[to].prefix + segments[to].length > most ? segments[to].prefix + segments[to].length : most;
        }
        const segment root = segments[from];
        const long width = (pages_of(most) + 1) * PAGE, n_max = step * group;
        /* of the tree: keys by row, gradients of keys and values; of a sequence: tiles; of a block: rows of scores */
        float *memory = take(&mine, (3 * (length + 4) * HEAD_DIM + 2 * width * HEAD_DIM + n_max * (2 * width + 4 * HEAD_DIM)) * sizeof(float));
        float *k_rows = memory, *dk = k_rows + (length + 4) * HEAD_DIM, *dv = dk + (length + 4) * HEAD_DIM;
        float *keys = dv + (length + 4) * HEAD_DIM, *values = keys + width * HEAD_DIM;
        float *p = values + width * HEAD_DIM, *dp = p + n_max * width;
        float *q = dp + n_max * width, *go = q + n_max * HEAD_DIM, *dq = go + n_max * HEAD_DIM, *o = dq + n_max * HEAD_DIM;
        widen_rows(key + root.start * stride + h * HEAD_DIM, stride, length, k_rows);
        memset(dk, 0, 2 * (length + 4) * HEAD_DIM * sizeof(float));
        for (long at = from; at < to; at++) {
            const segment s = segments[at];
            transpose(key + s.start * stride + h * HEAD_DIM, stride, s.prefix, s.length, keys);
            transpose(value + s.start * stride + h * HEAD_DIM, stride, s.prefix, s.length, values);
            for (long top = 0; top < s.length; top += step) {
                const long rows = s.length - top < step ? s.length - top : step, n = rows * group, end = s.prefix + top + rows;
                for (long i = 0; i < rows; i++) {
                    const long row = s.start + top + i;
                    widen(query + row * stride + h * group * HEAD_DIM, q + i * group * HEAD_DIM, group * HEAD_DIM, scale);
                    widen(grad_out + (row * heads + h * group) * HEAD_DIM, go + i * group * HEAD_DIM, group * HEAD_DIM, 1.f);
                    widen(out + (row * heads + h * group) * HEAD_DIM, o + i * group * HEAD_DIM, group * HEAD_DIM, 1.f);
                }
                score_rows(q, n, keys, end, p, width);
                score_rows(go, n, values, end, dp, width);
                for (long i = 0; i < n; i++) {
                    const long visible = s.prefix + top + i / group + 1, first = window && visible > window ? visible - window : 0;
                    const float l = lse[(s.start + top + i / group) * heads + h * group + i % group];
                    vec dots = {};
                    for (int v = 0; v < HEAD_DIM; v += LANES) dots += *(vec *)(go + i * HEAD_DIM + v) * *(vec *)(o + i * HEAD_DIM + v);
                    const float delta = sum(dots);
                    float *pr = p + i * width, *dr = dp + i * width;
                    for (long j = 0; j < end; j += LANES) {
                        vec e = vexp(*(vec *)(pr + j) - l);
                        *(vec *)(pr + j) = e;
                        *(vec *)(dr + j) = e * (*(vec *)(dr + j) - delta);
                    }
                    for (long j = 0; j < first; j++) pr[j] = dr[j] = 0;
                    for (long j = visible; j < end; j++) pr[j] = dr[j] = 0;
                }
                memset(dq, 0, n * HEAD_DIM * sizeof(float));
                for (const segment *a = &s;; a = segments + a->parent) {
                    const long seen = a == &s ? top + rows : a->length, offset = (a->start - root.start) * HEAD_DIM;
                    add_values(dp + a->prefix, width, n, k_rows + offset, seen, dq);
                    add_outer(p + a->prefix, width, n, go, dv + offset, seen);
                    add_outer(dp + a->prefix, width, n, q, dk + offset, seen);
                    if (a->parent < 0) break;
                }
                for (long i = 0; i < n * HEAD_DIM; i += LANES) *(vec *)(dq + i) *= scale;
                for (long i = 0; i < rows; i++)
                    narrow(dq + i * group * HEAD_DIM, grad_query + (s.start + top + i) * stride + h * group * HEAD_DIM, group * HEAD_DIM);
            }
        }
        for (long t = 0; t < length; t++) {
            narrow(dk + t * HEAD_DIM, grad_key + (root.start + t) * stride + h * HEAD_DIM, HEAD_DIM);
            narrow(dv + t * HEAD_DIM, grad_value + (root.start + t) * stride + h * HEAD_DIM, HEAD_DIM);
        }
        give(&mine);
    }
}

/* Cache of one layer: keys [pages, kv_heads, HEAD_DIM, 32], values [pages, kv_heads, 32, HEAD_DIM]. Position j of
   sequence b is in page table[b][j / 32]. */

/* Write rows t of key and value [T, stride] to position places[t] of page pages[t]. */
EXPORT void cache_write(const elem *key, const elem *value, long stride, elem *keys, elem *values, const int32_t *pages,
                        const int32_t *places, long T, long kv_heads) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < T; t++)
        for (long h = 0; h < kv_heads; h++) {
            const elem *k = key + t * stride + h * HEAD_DIM, *v = value + t * stride + h * HEAD_DIM;
            elem *tile = keys + (pages[t] * kv_heads + h) * PAGE * HEAD_DIM + places[t];
            for (int d = 0; d < HEAD_DIM; d++) tile[d * PAGE] = k[d];
            memcpy(values + ((pages[t] * kv_heads + h) * PAGE + places[t]) * HEAD_DIM, v, HEAD_DIM * sizeof(elem));
        }
}

/* One query row for each of B sequences of lengths[b] positions, all in the cache. Sequences starts[g]..starts[g + 1]
   have their first shared[g] pages in common, which are read once for all of them. */
EXPORT void paged_attention(const elem *query, long stride, elem *out, const elem *keys, const elem *values,
                            const int32_t *table, long table_width, const int32_t *lengths, const int32_t *starts,
                            const int32_t *shared, long groups, long heads, long kv_heads, float scale, long window) {
    const long group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic)
    for (long task = 0; task < groups * kv_heads; task++) {
        const long g = task / kv_heads, h = task % kv_heads, first = starts[g], count = starts[g + 1] - first;
        const long common = shared[g];
        long longest = 0;
        for (long b = first; b < first + count; b++) longest = lengths[b] > longest ? lengths[b] : longest;
        const long width = (pages_of(longest) + 1) * PAGE;
        float *memory = take(&mine, (PAGE * HEAD_DIM + count * group * (width + 2 * HEAD_DIM)) * sizeof(float));
        float *tile = memory, *scores = tile + PAGE * HEAD_DIM, *q = scores + count * group * width;
        float *o = q + count * group * HEAD_DIM;
        memset(o, 0, count * group * HEAD_DIM * sizeof(float));
        for (long i = 0; i < count; i++)
            widen(query + (first + i) * stride + h * group * HEAD_DIM, q + i * group * HEAD_DIM, group * HEAD_DIM, scale);
        for (long page = 0; page < common; page++) {
            widen(keys + (table[first * table_width + page] * kv_heads + h) * PAGE * HEAD_DIM, tile, PAGE * HEAD_DIM, 1.f);
            score_tile(q, count * group, tile, scores + page * PAGE, width);
        }
        for (long i = 0; i < count; i++) {
            const long length = lengths[first + i], visible = window && length > window ? length - window : 0;
            float *rows = scores + i * group * width;
            for (long page = common; page < pages_of(length); page++) {
                widen(keys + (table[(first + i) * table_width + page] * kv_heads + h) * PAGE * HEAD_DIM, tile, PAGE * HEAD_DIM, 1.f);
                score_tile(q + i * group * HEAD_DIM, group, tile, rows + page * PAGE, width);
            }
            for (long j = 0; j < group; j++) softmax(rows + j * width, visible, length, pages_of(length) * PAGE);
        }
        for (long page = 0; page < common; page++) {
            const long valid = longest - page * PAGE < PAGE ? longest - page * PAGE : PAGE;
            widen(values + (table[first * table_width + page] * kv_heads + h) * PAGE * HEAD_DIM, tile, valid * HEAD_DIM, 1.f);
            add_values(scores + page * PAGE, width, count * group, tile, valid, o);
        }
        for (long i = 0; i < count; i++) {
            const long length = lengths[first + i];
            for (long page = common; page < pages_of(length); page++) {
                const long valid = length - page * PAGE < PAGE ? length - page * PAGE : PAGE;
                widen(values + (table[(first + i) * table_width + page] * kv_heads + h) * PAGE * HEAD_DIM, tile, valid * HEAD_DIM, 1.f);
                add_values(scores + i * group * width + page * PAGE, width, group, tile, valid, o + i * group * HEAD_DIM);
            }
            narrow(o + i * group * HEAD_DIM, out + ((first + i) * heads + h * group) * HEAD_DIM, group * HEAD_DIM);
        }
        give(&mine);
    }
}
