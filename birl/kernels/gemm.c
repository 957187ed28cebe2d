/* y = x W' for bfloat16 with float32 sums, W packed once for many calls (tile.h says how).

   Each element of y is summed over k in one order, whatever M is: a row gives the same bits alone (decoding) and among a
   thousand (training). PyTorch's products do not promise that, and they round the result to bfloat16. */
#include "layers.h"
#include "tile.h"
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* The instructions that compute products; NULL where the kernel does not grant them. */
EXPORT const char *gemm_start(void) {
#if defined(__AMX_BF16__)
    return syscall(SYS_arch_prctl, 0x1023, 18) ? NULL : "AMX"; /* it wants to be asked once for the tile registers */
#elif defined(__AVX512BF16__)
    return "AVX512-BF16";
#else
    return "float32";
#endif
}

static long blocks_of(long K) { return (K + BLOCK - 1) / BLOCK; }

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
void gemm_part(const uint16_t *x, long ldx, const uint16_t *packed, const elem *bias, void *y, long ldy, long M, long N,
               long K, int mode) {
    const long blocks = blocks_of(K), pairs = (N + 31) / 32, stripe = 256;
    const size_t width = mode == ROUND ? sizeof(elem) : sizeof(float);
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
            for (long m = top; m < bottom; m += 32) {
                const long rows = bottom - m < 32 ? bottom - m : 32;
                const uint16_t *a = x + m * ldx;
                long lda = ldx;
                if (rows % 16) {
                    if (pair == first) {
                        if (!rest) rest = aligned_alloc(64, (32 * K * 2 + 63) / 64 * 64);
                        memset(rest, 0, 32 * K * 2);
                        for (long i = 0; i < rows; i++) memcpy(rest + i * K, a + i * ldx, K * 2);
                    }
                    a = rest, lda = K;
                }
                product(a, rows > 16, lda, b0, b1, TILE, blocks, sums, 32, 0);
                finish(sums, (char *)y + (m * ldy + n) * width, ldy, rows, columns, bias ? bias + n : NULL, mode);
            }
        }
    }
    free(rest);
    END_THREAD();
#pragma omp barrier
}

EXPORT void gemm(const uint16_t *x, long ldx, const uint16_t *packed, const elem *bias, void *y, long ldy, long M, long N,
                 long K, int mode) {
#pragma omp parallel
    gemm_part(x, ldx, packed, bias, y, ldy, M, N, K, mode);
}
