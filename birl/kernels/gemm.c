/* y = x W' for bfloat16 with float32 sums, W packed once for many calls (tile.h says how).

   Each element of y is summed over k in one order, whatever M is: a row gives the same bits alone (decoding) and among a
   thousand (training). PyTorch's products do not promise that, and they round the result to bfloat16. */
#include "layers.h"
#include "tile.h"
#include <unistd.h>
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#endif

enum {
    FEW = 128, /* rows of which few_rows is faster */
    AHEAD = 3, /* tiles of a panel that its rows take turns over */
    TURN = 64  /* columns that block_of turns at once: two lines of each row, which the processor fetches together */
};

/* The instructions of products (instructions.py); NULL where the kernel does not grant them. */
EXPORT const char *gemm_start(void) {
#if defined(__AMX_BF16__)
    return syscall(SYS_arch_prctl, 0x1023, 18) ? NULL : "amx"; /* it wants to be asked once for the tile registers */
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

/* Bytes of weights that stay in the second-level cache while rows go by. */
static long cached(void) {
    static long bytes; /* asking takes long on a virtual machine */
    if (!bytes) bytes = sysconf(_SC_LEVEL2_CACHE_SIZE) > 0 ? sysconf(_SC_LEVEL2_CACHE_SIZE) / 3 * 2 : 1 << 20;
    return bytes;
}

static long blocks_of(long K) { return (K + BLOCK - 1) / BLOCK; }

/* Rows [N, K] of a weight whose first row, or column, is number `done` of the packed matrix; `columns` is its K.
   transposed: the packed matrix is [K, columns], with this weight's rows as columns done, done + 1, ... Otherwise its
   panels are every `turns`th from there on. */
EXPORT void gemm_pack(const uint16_t *w, uint16_t *packed, long N, long K, long done, long columns, int transposed,
                      long turns) {
    const long blocks = blocks_of(columns);
    if (!transposed) {
        const long first = done / PANEL, count = (N + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
        for (long p = 0; p < count; p++)
            for (long b = 0; b < blocks; b++) {
                uint16_t *tile = packed + ((first + p * turns) * blocks + b) * TILE;
                line square[PANEL] = {}; /* n, pair of k */
                const long width = K - b * BLOCK < BLOCK ? K - b * BLOCK : BLOCK;
                for (long n = 0; n < PANEL && p * PANEL + n < N; n++)
                    memcpy(&square[n], w + (p * PANEL + n) * K + b * BLOCK, width * sizeof(uint16_t));
                transpose16(square);
                for (long pair = 0; pair < PANEL; pair++) *(line *)(tile + pair * BLOCK) = square[pair];
            }
    } else {
        const long panels = K / PANEL; /* K is a multiple of 16 here, and `done` of 32 or this is the last part */
        const long end = done + N == columns ? blocks * BLOCK - done : N;
#pragma omp parallel for schedule(static)
        for (long t = 0; t < end; t += BLOCK)
            for (long p = 0; p < panels; p++) {
                line square[16];
                pairs_of(w, K, t, p * PANEL, N, square);
                uint16_t *tile = packed + (p * blocks + (done + t) / BLOCK) * TILE;
                for (long pair = 0; pair < 16; pair++) *(line *)(tile + pair * BLOCK) = square[pair];
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

static __thread scratch padding;

/* Rows of x [rows, K] with zeros behind them, up to 32; NULL where they fill tiles of 16 anyway. */
static uint16_t *padded(const uint16_t *x, long ldx, long rows, long K) {
    if (rows % 16 == 0) return NULL;
    uint16_t *copy = take(&padding, 32 * K * 2);
    memset(copy, 0, 32 * K * 2);
    for (long i = 0; i < rows; i++) memcpy(copy + i * K, x + i * ldx, K * 2);
    return copy;
}

typedef struct { /* of one product, and what of it is this thread's: pairs of panels, and rows from `top` on */
    const uint16_t *x, *packed;
    const elem *bias;
    char *y;
    long ldx, ldy, M, N, K, first, last, top;
    int mode, turned; /* turned: x is [K, M] */
} task;

/* Gate and up [rows, 16] side by side, both rounded as if they had been stored. */
static void finish_swiglu(const float *sums, elem *y, long ldy, long rows) {
    for (long i = 0; i < rows; i++) {
        elem both[2 * PANEL];
        for (long j = 0; j < 2 * PANEL; j += LANES) store(both + j, *(const vec *)(sums + i * 32 + j));
        for (long j = 0; j < PANEL; j += LANES) store(y + i * ldy + j, swish(load(both + j), load(both + PANEL + j)));
    }
}

static void put(const task *t, const float *sums, long m, long rows, long pair) {
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

/* With few rows reading the weights takes longer than computing. All rows take turns over a few tiles of them, which stay
   in the first-level cache meanwhile; when the first rows are through, the next tiles are called for, so that memory works
   while the other rows are computed. Sums wait in memory, which changes no bit. */
static void few_rows(const task *t) {
    const long blocks = blocks_of(t->K), head = t->M <= 48 ? 16 : 32;
    const long tail = t->M <= head ? t->M : (t->M - head - 1) % 32 + 1;
    uint16_t *rest = padded(t->x + (t->M - tail) * t->ldx, t->ldx, tail, t->K);
    float sums[FEW * 32] __attribute__((aligned(64)));
    for (long pair = t->first; pair < t->last; pair++) {
        const uint16_t *b0 = t->packed + pair * 2 * blocks * TILE;
        const uint16_t *b1 = pair * 32 + PANEL < t->N ? b0 + blocks * TILE : b0;
        for (long k = 0; k < blocks; k += AHEAD) {
            const long count = blocks - k < AHEAD ? blocks - k : AHEAD;
            for (long m = 0, step = head; m < t->M; m += step, step = 32) {
                const int partial = m + step > t->M && rest, two = partial ? tail > 16 : step > 16 && m + 16 < t->M;
                const uint16_t *a = partial ? rest : t->x + m * t->ldx;
                product(a + k * BLOCK, two, partial ? t->K : t->ldx, b0 + k * TILE, b1 + k * TILE, TILE, count,
                        sums + m * 32, 32, k > 0);
                if (m) continue;
                const long next = k + AHEAD < blocks ? k + AHEAD : 2 * blocks; /* of this pair, or the first of the next */
                for (long i = 0; i < AHEAD * TILE; i += 32) {
                    __builtin_prefetch(b0 + next * TILE + i, 0, 2);
                    __builtin_prefetch(b1 + next * TILE + i, 0, 2);
                }
            }
        }
        put(t, sums, 0, t->M, pair);
    }
    give(&padding);
}

/* Up to 32 rows of x from m on, whole tiles, *lda elements apart. */
static const uint16_t *block_of(const task *t, long m, long rows, long *lda) {
    *lda = t->turned || rows % 16 ? blocks_of(t->K) * BLOCK : t->ldx;
    if (!t->turned) return rows % 16 ? padded(t->x + m * t->ldx, t->ldx, rows, t->K) : t->x + m * t->ldx;
    uint16_t *copy = take(&padding, TURN * *lda * 2);
    const long done = (m - t->top) % TURN, columns = t->M - m < TURN ? t->M - m : TURN;
    for (long k = 0; k < *lda && !done; k += BLOCK)
        for (long n = 0; n < columns; n += 16) {
            line square[16];
            pairs_of(t->x, t->ldx, k, m + n, t->K, square);
            transpose16(square);
            for (long i = 0; i < 16; i++) *(line *)(copy + (n + i) * *lda + k) = square[i];
        }
    return copy + done * *lda;
}

/* With many, computing takes longer. Some columns of weights stay in the second-level cache, for one block of rows after
   another: weights are read once, and a row of the result is written from left to right. */
static void many_rows(const task *t) {
    const long blocks = blocks_of(t->K), mine = t->last - t->first, most = cached() / (2 * blocks * TILE * 2) + 1;
    const long parts = (mine + most - 1) / most;
    float sums[32 * 32] __attribute__((aligned(64)));
    for (long part = 0; part < parts; part++)
        for (long m = t->top; m < t->M; m += 32) {
            const long rows = t->M - m < 32 ? t->M - m : 32;
            long lda;
            const uint16_t *a = block_of(t, m, rows, &lda);
            for (long pair = t->first + mine * part / parts; pair < t->first + mine * (part + 1) / parts; pair++) {
                const uint16_t *b0 = t->packed + pair * 2 * blocks * TILE;
                const uint16_t *b1 = pair * 32 + PANEL < t->N ? b0 + blocks * TILE : b0;
                product(a, rows > 16, lda, b0, b1, TILE, blocks, sums, 32, 0);
                put(t, sums, m, rows, pair);
            }
        }
    give(&padding);
}

static void compute(const task *t) {
    if (t->M <= FEW)
        few_rows(t);
    else
        many_rows(t);
}

/* y [M, N] (rows ldy apart) = x [M, K] W', see the enum for what `mode` does with it. K must be a multiple of 32, N of
   16. Threads share out the columns. */
void gemm_part(const uint16_t *x, long ldx, const uint16_t *packed, const elem *bias, void *y, long ldy, long M, long N,
               long K, int mode) {
    const long pairs = (N + 31) / 32, threads = omp_get_num_threads(), me = omp_get_thread_num();
    START_THREAD();
    compute(&(task){x, packed, bias, y, ldx, ldy, M, N, K, pairs * me / threads, pairs * (me + 1) / threads, 0, mode, 0});
    END_THREAD();
#pragma omp barrier
}

void gemm_begin(void) { START_THREAD(); }

void gemm_end(void) { END_THREAD(); }

void gemm_alone(const uint16_t *x, long ldx, const uint16_t *packed, const elem *bias, float *y, long ldy, long M, long N,
                long K) {
    compute(&(task){x, packed, bias, (char *)y, ldx, ldy, M, N, K, 0, (N + 31) / 32, 0, KEEP, 0});
}

EXPORT void gemm(const uint16_t *x, long ldx, const uint16_t *packed, const elem *bias, void *y, long ldy, long M, long N,
                 long K, int mode) {
#pragma omp parallel
    gemm_part(x, ldx, packed, bias, y, ldy, M, N, K, mode);
}

/* y [M, N] float32 = or += grad' x, the gradient of a weight: grad [T, M] (rows `stride` apart), x [T, N] packed transposed.
   M must be a multiple of 16. Threads share out the rows of y, and turn the columns of grad as they come to them. */
EXPORT void gemm_outer(const uint16_t *grad, long stride, const uint16_t *packed, float *y, long ldy, long M, long N, long T,
                       int mode) {
#pragma omp parallel
    {
        const long blocks = (M + 31) / 32, threads = omp_get_num_threads(), me = omp_get_thread_num();
        const long top = blocks * me / threads * 32, end = blocks * (me + 1) / threads * 32, bottom = end < M ? end : M;
        START_THREAD();
        many_rows(&(task){grad, packed, NULL, (char *)y, stride, ldy, bottom, N, T, 0, (N + 31) / 32, top, mode, 1});
        END_THREAD();
    }
}
