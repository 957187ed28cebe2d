/* y = x W' for bfloat16 with float32 sums, W packed once for many calls.

   Each element of y is summed over k in one order, whatever M is: a row gives the same bits alone (decoding) and among a
   thousand (training). PyTorch's products do not promise that, and they round the result to bfloat16.

   Packed layout: panels of 16 columns n; in each, blocks of 32 k; in each, 16 pairs of k; each pair holds 16 n x 2 k.
   That is an AMX tile, and 16 registers for AVX-512's dot products of pairs. K is padded to 32, N to 16, with zeros. */
#include "common.h"

#define PANEL 16
#define BLOCK 32
#define TILE (PANEL * BLOCK) /* elements of a packed block */

enum { ROUND, KEEP, ADD }; /* y is elem; y is float32; y is float32 and added to */

static long blocks_of(long K) { return (K + BLOCK - 1) / BLOCK; }

/* a[i][j] -> a[j][i], by exchanging halves, quarters, eighths and sixteenths of pairs of rows. */
static inline void transpose16(uvec a[16]) {
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int s = 1; s < 16; s *= 2) {
        const ivec odd = (lane & s) != 0;
        const ivec first = (odd & ((lane ^ s) + 16)) | (~odd & lane), second = (odd & (lane + 16)) | (~odd & (lane ^ s));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (!(i & s)) {
                uvec x = a[i], y = a[i | s];
                a[i] = __builtin_shuffle(x, y, first);
                a[i | s] = __builtin_shuffle(x, y, second);
            }
    }
}

/* Pairs of rows t, t + 1 of x [T, N], columns n to n + 15, for 32 rows: square[pair][n]; 0 behind the last row. */
static inline void pairs_of(const uint16_t *x, long stride, long t, long n, long T, uvec square[16]) {
    for (long pair = 0; pair < 16; pair++) {
        const long row = t + 2 * pair;
        const uint16_t *from = x + row * stride + n;
        square[pair] = (uvec){};
        if (row < T) square[pair] = __builtin_convertvector(*(const hvec *)from, uvec);
        if (row + 1 < T) square[pair] |= __builtin_convertvector(*(const hvec *)(from + stride), uvec) << 16;
    }
}

/* x [T, N] -> y [N, width], zeros behind the first T columns; width is a multiple of 32. */
EXPORT void gemm_transpose(const uint16_t *x, long stride, uint16_t *y, long T, long N, long width) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < width; t += 32)
        for (long n = 0; n < N; n += 16) {
            uvec square[16];
            pairs_of(x, stride, t, n, T, square);
            transpose16(square);
            for (long i = 0; i < 16; i++) *(uvec *)(y + (n + i) * width + t) = square[i];
        }
}

/* Rows [N, K] of a weight whose first row, or column, is number `done` of the packed matrix; `columns` is its K.
   transposed: the packed matrix is [K, columns], with this weight's rows as columns done, done + 1, ... */
EXPORT void gemm_pack(const uint16_t *w, uint16_t *packed, long N, long K, long done, long columns, int transposed) {
    const long blocks = blocks_of(columns);
    if (!transposed) {
        const long first = done / PANEL, last = (done + N + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
        for (long p = first; p < last; p++)
            for (long b = 0; b < blocks; b++) {
                uint16_t *tile = packed + (p * blocks + b) * TILE;
                uvec square[PANEL] = {}; /* n, pair of k */
                const long width = K - b * BLOCK < BLOCK ? K - b * BLOCK : BLOCK;
                for (long n = 0; n < PANEL && p * PANEL + n - done < N; n++)
                    memcpy(&square[n], w + (p * PANEL + n - done) * K + b * BLOCK, width * sizeof(uint16_t));
                transpose16(square);
                for (long pair = 0; pair < PANEL; pair++) *(uvec *)(tile + pair * BLOCK) = square[pair];
            }
    } else {
        const long panels = K / PANEL; /* K is a multiple of 16 here, and `done` of 32 or this is the last part */
        const long end = done + N == columns ? blocks * BLOCK - done : N;
#pragma omp parallel for schedule(static)
        for (long t = 0; t < end; t += BLOCK)
            for (long p = 0; p < panels; p++) {
                uvec square[16];
                pairs_of(w, K, t, p * PANEL, N, square);
                uint16_t *tile = packed + (p * blocks + (done + t) / BLOCK) * TILE;
                for (long pair = 0; pair < 16; pair++) *(uvec *)(tile + pair * BLOCK) = square[pair];
            }
    }
}

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

static const struct {
    uint8_t palette, start_row, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TILES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

EXPORT const char *gemm_start(void) { /* the kernel wants to be asked once for the tile registers */
    return syscall(SYS_arch_prctl, 0x1023, 18) ? NULL : "AMX";
}

static inline void fetch(const uint16_t *tile) { /* what comes next from memory, into the second-level cache */
    for (int i = 0; i < 16; i++) _mm_prefetch((const char *)tile + i * 64, _MM_HINT_T1);
}

/* sums [32, 32] = x[rows] W[two panels]'.  a0, a1: two times 16 rows; next: panels to fetch meanwhile, or NULL. */
static void product(const uint16_t *a0, const uint16_t *a1, long lda, const uint16_t *b0, const uint16_t *b1,
                    long blocks, const uint16_t *next, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (a1) {
        for (long k = 0; k < blocks; k++) {
            _tile_loadd(4, a0 + k * BLOCK, lda * 2);
            _tile_loadd(6, b0 + k * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b1 + k * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a1 + k * BLOCK, lda * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            if (next) fetch(next + 2 * k * TILE), fetch(next + (2 * k + 1) * TILE);
        }
        _tile_stored(2, sums + 16 * 32, 128);
        _tile_stored(3, sums + 16 * 32 + 16, 128);
    } else {
        for (long k = 0; k < blocks; k++) {
            _tile_loadd(4, a0 + k * BLOCK, lda * 2);
            _tile_loadd(6, b0 + k * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b1 + k * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (next) fetch(next + 2 * k * TILE), fetch(next + (2 * k + 1) * TILE);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
}
#define START_THREAD() _tile_loadconfig(&TILES)
#define END_THREAD() _tile_release()

#else

#ifdef __AVX512BF16__
EXPORT const char *gemm_start(void) { return "AVX512-BF16"; }
static inline vec dot2(vec total, uint32_t a, const uint16_t *b) {
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(a), (__m512bh)_mm512_loadu_si512(b));
}
#else
EXPORT const char *gemm_start(void) { return "float32"; }
static inline vec dot2(vec total, uint32_t a, const uint16_t *b) {
    uvec pairs = *(const uvec *)b;
    union { uint32_t u; float f; } low = {a << 16}, high = {a & 0xffff0000};
    total += low.f * (vec)(pairs << 16);
    total += high.f * (vec)(pairs & 0xffff0000);
    return total;
}
#endif

static inline void quad(const uint16_t *a, long lda, const uint16_t *b0, const uint16_t *b1, long blocks, float *sums) {
    vec s[4][2] = {};
    for (long pair = 0; pair < blocks * BLOCK / 2; pair++)
        for (int i = 0; i < 4; i++) {
            uint32_t two;
            memcpy(&two, a + i * lda + 2 * pair, 4);
            s[i][0] = dot2(s[i][0], two, b0 + pair * BLOCK);
            s[i][1] = dot2(s[i][1], two, b1 + pair * BLOCK);
        }
    for (int i = 0; i < 4; i++) *(vec *)(sums + i * 32) = s[i][0], *(vec *)(sums + i * 32 + 16) = s[i][1];
}

static void product(const uint16_t *a0, const uint16_t *a1, long lda, const uint16_t *b0, const uint16_t *b1,
                    long blocks, const uint16_t *next, float *sums) {
    (void)next;
    for (int i = 0; i < 16; i += 4) quad(a0 + i * lda, lda, b0, b1, blocks, sums + i * 32);
    if (a1)
        for (int i = 0; i < 16; i += 4) quad(a1 + i * lda, lda, b0, b1, blocks, sums + (16 + i) * 32);
}
#define START_THREAD()
#define END_THREAD()
#endif

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

/* y [M, N] (rows ldy apart) = x [M, K] W', see the enum for what `mode` does with it. K must be a multiple of 32, N of
   16. Threads share out the columns; rows go by in blocks that fit into the second-level cache. */
EXPORT void gemm(const uint16_t *x, long ldx, const uint16_t *packed, const elem *bias, void *y, long ldy, long M, long N,
                 long K, int mode) {
    const long blocks = blocks_of(K), pairs = (N + 31) / 32, stripe = 256;
    const size_t width = mode == ROUND ? sizeof(elem) : sizeof(float);
#pragma omp parallel
    {
        START_THREAD();
        float sums[32 * 32] __attribute__((aligned(64)));
        uint16_t *rest = NULL; /* the last rows, filled up to 16 */
        const long threads = omp_get_num_threads(), me = omp_get_thread_num();
        const long first = pairs * me / threads, last = pairs * (me + 1) / threads;
        for (long top = 0; top < M; top += stripe) {
            const long bottom = top + stripe < M ? top + stripe : M;
            for (long pair = first; pair < last; pair++) {
                const long n = pair * 32, columns = N - n < 32 ? N - n : 32;
                const uint16_t *b0 = packed + n / PANEL * blocks * TILE;
                const uint16_t *b1 = columns > PANEL ? b0 + blocks * TILE : b0;
                const uint16_t *next = pair + 1 < last && (pair + 2) * 32 <= N ? b0 + 2 * blocks * TILE : NULL;
                for (long m = top; m < bottom; m += 32) {
                    const long rows = bottom - m < 32 ? bottom - m : 32;
                    const uint16_t *a0 = x + m * ldx, *a1 = rows > 16 ? a0 + 16 * ldx : NULL;
                    long lda = ldx;
                    if (rows % 16) {
                        if (pair == first) {
                            if (!rest) rest = aligned_alloc(64, (32 * K * 2 + 63) / 64 * 64);
                            memset(rest, 0, 32 * K * 2);
                            for (long i = 0; i < rows; i++) memcpy(rest + i * K, a0 + i * ldx, K * 2);
                        }
                        a0 = rest, a1 = rows > 16 ? rest + 16 * K : NULL, lda = K;
                    }
                    product(a0, a1, lda, b0, b1, blocks, m == top ? next : NULL, sums);
                    finish(sums, (char *)y + (m * ldy + n) * width, ldy, rows, columns, bias ? bias + n : NULL, mode);
                }
            }
        }
        free(rest);
        END_THREAD();
    }
}
