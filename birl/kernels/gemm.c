/* y = x W' with float32 sums, W packed once for many calls (tile.h describes the layout).

   Each element of y is summed over k in one order, whatever M is: a row has the same bits alone (decode) and among a
   thousand (training). PyTorch's products do not guarantee that, and they round the result. */
#include "layers.h"
#include "tile.h"
#include <unistd.h>
#if defined(__AMX_BF16__) && defined(BF16)
#include <sys/syscall.h>
#endif

enum {
    FEW = 128, /* number of rows up to which few_rows is faster */
    TURN = 64  /* columns that block_of transposes at once: two cache lines of each row, fetched together */
};

/* Name of the instruction set of products (instructions.py); NULL if the kernel does not grant it. */
EXPORT const char *gemm_start(void) {
#if defined(__AMX_BF16__) && defined(BF16)
    return syscall(SYS_arch_prctl, 0x1023, 18) ? NULL : "amx"; /* permission for the tile registers is requested once */
#elif defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#elif defined(__ARM_NEON)
    return "neon";
#else
    return "others";
#endif
}

/* Bytes of weights to keep in the second-level cache while rows are processed. */
static long cached(void) {
    static long bytes; /* the call is slow on a virtual machine */
    if (!bytes) bytes = sysconf(_SC_LEVEL2_CACHE_SIZE) > 0 ? sysconf(_SC_LEVEL2_CACHE_SIZE) / 3 * 2 : 1 << 20;
    return bytes;
}

static long blocks_of(long K) { return (K + BLOCK - 1) / BLOCK; }

/* Pack rows [N, K] of a weight whose first row, or column, is number `done` of the packed matrix; `columns` is its K.
   transposed: the packed matrix is [K, columns], with this weight's rows as columns done, done + 1, ... Otherwise its
   panels are every `turns`th from there on. */
EXPORT void gemm_pack(const elem *w, elem *packed, long N, long K, long done, long columns, int transposed,
                      long turns) {
    const long blocks = blocks_of(columns);
    if (!transposed) {
        const long first = done / PANEL, count = (N + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
        for (long p = 0; p < count; p++)
            for (long k = 0; k < blocks * BLOCK; k += STEP) {
                line lines[16] = {};
                const long width = k > K ? 0 : K - k < STEP ? K - k : STEP;
                for (long n = 0; n < PANEL && p * PANEL + n < N; n++)
                    memcpy(&lines[n], w + (p * PANEL + n) * K + k, width * sizeof(elem));
                transpose16(lines);
                memcpy(packed + (first + p * turns) * blocks * TILE + k * PANEL, lines, sizeof(lines));
            }
    } else {
        const long panels = K / PANEL; /* K is a multiple of 16 here, and `done` of 32 or this is the last part */
        const long end = done + N == columns ? blocks * BLOCK - done : N;
#pragma omp parallel for schedule(static)
        for (long t = 0; t < end; t += STEP)
            for (long p = 0; p < panels; p++) {
                line lines[16];
                lines_of(w, K, t, p * PANEL, N, lines);
                memcpy(packed + p * blocks * TILE + (done + t) * PANEL, lines, sizeof(lines));
            }
    }
}

/* The exponent of a block (tile.h): the smallest with which 127 represents its largest weight, whose bits without sign
   are `most`. */
static int exponent_of(uint32_t most) { return (int)(most >> 23) - 6 + ((most & 0x7fffff) > 0x7e0000); /* 127 / 64 */ }

static uint32_t largest_of(const uint16_t *row, long count) {
    uint32_t most = 0;
    for (long k = 0; k < count; k++) most = (row[k] & 0x7fffu) > most ? row[k] & 0x7fffu : most;
    return most << 16;
}

/* Encode rows [N, K] in int8, placed as in gemm_pack; N a multiple of 16, K of 32. No exponent is more than 60 below
   the largest of its row: the scaled sums of `some` (tile.h) stay finite. */
EXPORT void gemm_encode(const uint16_t *w, int8_t *packed, long N, long K, long done, long turns) {
    const long blocks = blocks_of(K);
#pragma omp parallel for schedule(static)
    for (long n = 0; n < N; n++) {
        const int top = exponent_of(largest_of(w + n * K, K)), least = top > 61 ? top - 60 : 1;
        int8_t *to = packed + (done / PANEL + n / PANEL * turns) * blocks * CODED;
        for (long b = 0; b < blocks; b++, to += CODED) {
            const uint16_t *row = w + n * K + b * BLOCK;
            const int own = exponent_of(largest_of(row, BLOCK)), e = own > least ? own : least;
            union { uint32_t u; float f; } inverse = {(uint32_t)(254 - e) << 23};
            to[n % PANEL] = (int8_t)e;
            for (long k = 0; k < BLOCK; k++) {
                union { uint32_t u; float f; } wide = {(uint32_t)row[k] << 16};
                to[place_of(n % PANEL, k)] = code_of((int)nearbyintf(wide.f * inverse.f));
            }
        }
    }
}

static void finish(const float *sums, void *y, long ldy, long rows, long columns, const elem *bias, int mode) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j += LANES) {
            vec s = *(const vec *)(sums + i * 32 + j);
            if (bias) s += load(bias + j);
            if (mode == ROUND)
                store((elem *)y + i * ldy + j, s);
            else if (mode == KEEP)
                *(vec *)((float *)y + i * ldy + j) = s;
            else
                *(vec *)((float *)y + i * ldy + j) += s;
        }
}

static __thread scratch padding, decodes, totals;

/* Rows of x [rows, K] padded with zeros; NULL if they are whole tiles already. */
static elem *padded(const elem *x, long ldx, long rows, long K) {
    if (rows % ROWS == 0) return NULL;
    elem *copy = take(&padding, 32 * K * sizeof(elem));
    memset(copy + rows * K, 0, (ROWS - rows % ROWS) * K * sizeof(elem));
    for (long i = 0; i < rows; i++) memcpy(copy + i * K, x + i * ldx, K * sizeof(elem));
    return copy;
}

typedef struct { /* one product, and this thread's share of it: pairs of panels, and rows from `top` on */
    const elem *x;
    const char *packed;
    const elem *bias;
    char *y;
    long ldx, ldy, M, N, K, first, last, top;
    int mode, coded, turned; /* coded: packed is int8; turned: x is [K, M] */
} task;

static long bytes_of(const task *t) { return t->coded ? CODED : TILE * sizeof(elem); }

/* The panels of a pair; the last pair may have only one. */
static const char *panel(const task *t, long pair, int second) {
    const long blocks = blocks_of(t->K);
    return t->packed + (pair * 2 + (second && pair * 32 + PANEL < t->N)) * blocks * bytes_of(t);
}

/* Gate and up [rows, 16] side by side, both rounded as if they had been stored. */
static void finish_swiglu(const float *sums, elem *y, long ldy, long rows) {
    for (long i = 0; i < rows; i++) {
        elem both[2 * PANEL];
        for (long j = 0; j < 2 * PANEL; j += LANES) store(both + j, *(const vec *)(sums + i * 32 + j));
        for (long j = 0; j < PANEL; j += LANES) store(y + i * ldy + j, swish(load(both + j), load(both + PANEL + j)));
    }
}

static void put(const task *t, const float *sums, long m, long rows, long pair) {
#if defined(__AVX512BF16__) && defined(BF16)
    if (t->mode == ROUND && !t->bias && t->N - pair * 32 >= 32) { /* whole cache lines */
        elem *y = (elem *)t->y + m * t->ldy + pair * 32;
        for (const float *end = sums + rows * 32; sums < end; sums += 32, y += t->ldy)
            _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + 16), _mm512_loadu_ps(sums)));
        return;
    }
#endif
    if (t->mode == SWIGLU) {
        finish_swiglu(sums, (elem *)t->y + m * t->ldy + pair * 16, t->ldy, rows);
    } else if (t->mode == HALVES) {
        elem *y = (elem *)t->y + m * t->ldy + pair * 16;
        finish(sums, y, t->ldy, rows, 16, NULL, ROUND);
        finish(sums + 16, y + t->N / 2, t->ldy, rows, 16, NULL, ROUND);
    } else {
        const long n = pair * 32, columns = t->N - n < 32 ? t->N - n : 32, size = t->mode == ROUND ? sizeof(elem) : sizeof(float);
        finish(sums, t->y + (m * t->ldy + n) * size, t->ldy, rows, columns, t->bias ? t->bias + n : NULL, t->mode);
    }
}

/* With few rows reading the weights takes longer than computing. All rows are multiplied with a few tiles, which stay
   in the first-level cache meanwhile. The next tiles are prefetched after the first rows, or in equal parts, so that
   memory works during computation. Sums are kept in memory, which changes no bit. */
static void few_rows(const task *t) {
    const long blocks = blocks_of(t->K), bytes = bytes_of(t), head = FIRST(t->M), callers = CALLERS(t->M);
    const long tail = t->M <= head ? t->M : (t->M - head - 1) % MANY + 1;
    elem *rest = padded(t->x + (t->M - tail) * t->ldx, t->ldx, tail, t->K);
    elem made[2][AHEAD * TILE] __attribute__((aligned(64))); /* codes are decoded first: several products read them */
    float sums[FEW * 32] __attribute__((aligned(64)));
    for (long pair = t->first; pair < t->last; pair++) {
        const char *b0 = panel(t, pair, 0), *b1 = panel(t, pair, 1);
#if MANY < 16
        if (t->M <= MANY) {
            product_of_few(rest ? rest : t->x, t->M, rest ? t->K : t->ldx, b0, b1, t->coded, blocks, sums, 32);
            put(t, sums, 0, t->M, pair);
            continue;
        }
#endif
        for (long k = 0; k < blocks; k += AHEAD) {
            const long count = blocks - k < AHEAD ? blocks - k : AHEAD;
            const long next = k + AHEAD < blocks ? k + AHEAD : 2 * blocks; /* of this pair, or the first of the next */
            const elem *w0 = (const elem *)(b0 + k * bytes), *w1 = (const elem *)(b1 + k * bytes);
            for (long i = 0; i < count && t->coded; i++) {
                decode((const int8_t *)(b0 + (k + i) * bytes), (uint16_t *)made[0] + i * TILE);
                decode((const int8_t *)(b1 + (k + i) * bytes), (uint16_t *)made[1] + i * TILE);
                w0 = made[0], w1 = made[1];
            }
            for (long m = 0, turn = 0, step = head; m < t->M; m += step, step = MANY, turn++) {
                const int partial = m + step > t->M && rest;
                const long rows = t->M - m < step ? t->M - m : step, lda = partial ? t->K : t->ldx;
                const long share = turn < callers ? AHEAD * bytes / callers : 0, from = next * bytes + turn * share;
                const elem *a = (partial ? rest : t->x + m * t->ldx) + k * BLOCK;
                product_ahead(a, rows, lda, w0, w1, count, b0 + from, b1 + from, share, sums + m * 32, 32, k > 0);
            }
        }
        put(t, sums, 0, t->M, pair);
    }
    give(&padding);
}

/* Up to 32 rows of x from m on, whole tiles, *lda elements apart. */
static const elem *block_of(const task *t, long m, long rows, long *lda) {
    *lda = t->turned || rows % ROWS ? blocks_of(t->K) * BLOCK : t->ldx;
    if (!t->turned) return rows % ROWS ? padded(t->x + m * t->ldx, t->ldx, rows, t->K) : t->x + m * t->ldx;
    elem *copy = take(&padding, TURN * *lda * sizeof(elem));
    const long done = (m - t->top) % TURN, columns = t->M - m < TURN ? t->M - m : TURN;
    for (long k = 0; k < *lda && !done; k += STEP)
        for (long n = 0; n < columns; n += 16) {
            line lines[16];
            lines_of(t->x, t->ldx, k, m + n, t->K, lines);
            transpose16(lines);
            for (long i = 0; i < 16; i++) *(line *)(copy + (n + i) * *lda + k) = lines[i];
        }
    return copy + done * *lda;
}

/* With many rows, computing takes longer. Some columns of weights stay in the second-level cache for one block of rows
   after another: weights are read once, and a row of the result is written from left to right. Rows that are too long
   for the first-level cache are multiplied in parts. */
static void many_rows(const task *t) {
    /* columns of a turned x are transposed anew for each part: weights from the third-level cache take less time */
    const long room = t->turned && MANY < 16 ? 8 * cached() : cached();
    const long blocks = blocks_of(t->K), mine = t->last - t->first, most = room / (2 * blocks * TILE * (long)sizeof(elem)) + 1;
    const long parts = (mine + most - 1) / most;
    elem *made = t->coded ? take(&decodes, 2 * (mine < most ? mine : most) * blocks * TILE * 2) : NULL;
    const long turns = t->turned ? 1 : (blocks + NEARBY - 1) / NEARBY, near = (blocks + turns - 1) / turns;
    float one[32 * 32] __attribute__((aligned(64))), *sums = turns > 1 ? take(&totals, most * sizeof(one)) : one;
    for (long part = 0; part < parts; part++) {
        const long begin = t->first + mine * part / parts, end = t->first + mine * (part + 1) / parts;
        for (long i = 0; made && i < 2 * (end - begin) * blocks; i++)
            decode((const int8_t *)panel(t, begin + i / (2 * blocks), i / blocks % 2) + i % blocks * CODED,
                   (uint16_t *)made + i * TILE);
        for (long m = t->top; m < t->M; m += 32) {
            const long rows = t->M - m < 32 ? t->M - m : 32;
            long lda;
            const elem *a = block_of(t, m, rows, &lda);
            for (long k = 0; k < blocks; k += near) {
                const long count = blocks - k < near ? blocks - k : near;
                for (long pair = begin; pair < end; pair++) {
                    const elem *own = made + 2 * (pair - begin) * blocks * TILE;
                    const elem *b0 = made ? own : (const elem *)panel(t, pair, 0);
                    const elem *b1 = made ? own + blocks * TILE : (const elem *)panel(t, pair, 1);
                    float *to = sums + (near < blocks ? pair - begin : 0) * 32 * 32;
                    product(a + k * BLOCK, rows, lda, b0 + k * TILE, b1 + k * TILE, TILE, count, to, 32, k > 0);
                    if (k + count == blocks) put(t, to, m, rows, pair);
                }
            }
        }
    }
    give(&totals);
    give(&decodes);
    give(&padding);
}

static void compute(const task *t) {
    if (t->M <= FEW)
        few_rows(t);
    else
        many_rows(t);
}

/* y [M, N] (rows ldy apart) = x [M, K] W'; `mode`: see its enum. K must be a multiple of 32, N of 16. Threads divide
   the columns. */
void gemm_part(const elem *x, long ldx, const void *packed, const elem *bias, void *y, long ldy, long M, long N,
               long K, int mode) {
    const long pairs = (N + 31) / 32, threads = omp_get_num_threads(), me = omp_get_thread_num();
    START_THREAD();
    const long first = pairs * me / threads, last = pairs * (me + 1) / threads;
    compute(&(task){x, packed, bias, y, ldx, ldy, M, N, K, first, last, 0, mode & ~CODES, mode & CODES, 0});
    END_THREAD();
#pragma omp barrier
}

void gemm_begin(void) { START_THREAD(); }

void gemm_end(void) { END_THREAD(); }

void gemm_alone(const elem *x, long ldx, const elem *packed, const elem *bias, float *y, long ldy, long M, long N,
                long K) {
    compute(&(task){x, (const char *)packed, bias, (char *)y, ldx, ldy, M, N, K, 0, (N + 31) / 32, 0, KEEP, 0, 0});
}

EXPORT void gemm(const elem *x, long ldx, const void *packed, const elem *bias, void *y, long ldy, long M, long N,
                 long K, int mode) {
#pragma omp parallel
    gemm_part(x, ldx, packed, bias, y, ldy, M, N, K, mode);
}

/* y [M, N] float32 = or += grad' x, the gradient of a weight: grad [T, M] (rows `stride` apart), x [T, N] packed
   transposed. M must be a multiple of 16. Threads divide the rows of y, and transpose the columns of grad as needed. */
EXPORT void gemm_outer(const elem *grad, long stride, const elem *packed, float *y, long ldy, long M, long N, long T,
                       int mode) {
#pragma omp parallel
    {
        const long blocks = (M + 31) / 32, threads = omp_get_num_threads(), me = omp_get_thread_num();
        const long top = blocks * me / threads * 32, end = blocks * (me + 1) / threads * 32, bottom = end < M ? end : M;
        START_THREAD();
        many_rows(&(task){grad, (const char *)packed, NULL, (char *)y, stride, ldy, bottom, N, T, 0, (N + 31) / 32, top, mode, 0, 1});
        END_THREAD();
    }
}
