/* Products of bfloat16 tiles with float32 sums, for gemm.c and gemm_attention.c.

   Packed matrices W [N, K], for products x W': panels of 16 rows n; in each, blocks of 32 k; in each, 16 pairs of k; each
   pair holds 16 n x 2 k. That is an AMX tile, and 16 registers for AVX-512's dot products of pairs. K is padded to 32, N
   to 16, with zeros. The order of a sum is fixed: blocks of 32 one after another, so a sum may stop and go on. */
#pragma once
#include "common.h"

#define PANEL 16
#define BLOCK 32
#define TILE (PANEL * BLOCK) /* elements of a packed block */

/* 16 pairs of bfloat16, and 16 such lines a[i][j] -> a[j][i]. */
#ifdef __AVX512F__
typedef uvec line;

/* Pairs of even[i] and odd[i]; 0 in the place of one that is NULL. */
static inline line zipped(const uint16_t *even, const uint16_t *odd) {
    line both = {};
    if (even) both = __builtin_convertvector(*(const hvec *)even, uvec);
    if (odd) both |= __builtin_convertvector(*(const hvec *)odd, uvec) << 16;
    return both;
}

/* By exchanging halves, quarters, eighths and sixteenths of pairs of rows. */
static inline void transpose16(line a[16]) {
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
#else
typedef struct { uint32_t at[16]; } __attribute__((aligned(2), may_alias)) line;

static inline line zipped(const uint16_t *even, const uint16_t *odd) {
    line both = {};
    if (even)
        for (int i = 0; i < 16; i++) both.at[i] = even[i];
    if (odd)
        for (int i = 0; i < 16; i++) both.at[i] |= (uint32_t)odd[i] << 16;
    return both;
}

static inline void transpose16(line a[16]) {
    line turned[16];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) turned[j].at[i] = a[i].at[j];
    memcpy(a, turned, sizeof(turned));
}
#endif

/* Pairs of rows t, t + 1 of x [T, N], columns n to n + 15, for 32 rows: square[pair][n]; 0 behind the last row. */
static inline void pairs_of(const uint16_t *x, long stride, long t, long n, long T, line square[16]) {
    for (long pair = 0; pair < 16; pair++) {
        const long row = t + 2 * pair;
        const uint16_t *from = x + row * stride + n;
        square[pair] = zipped(row < T ? from : NULL, row + 1 < T ? from + stride : NULL);
    }
}

#ifdef __AMX_BF16__

static const struct {
    uint8_t palette, start_row, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TILES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* sums [16 or 32, 32] (rows ld apart) = or += a W', for two panels b0, b1 whose blocks are `step` elements apart, and 16
   rows a, or 32 (`two`), lda elements apart. Two streams of weights are what the processor's own prefetching follows
   best: fetching ahead by instructions was slower. */
static inline void product(const uint16_t *a, int two, long lda, const uint16_t *b0, const uint16_t *b1, long step,
                           long blocks, float *sums, long ld, int add) {
    if (add) {
        _tile_loadd(0, sums, ld * 4);
        _tile_loadd(1, sums + 16, ld * 4);
        if (two) {
            _tile_loadd(2, sums + 16 * ld, ld * 4);
            _tile_loadd(3, sums + 16 * ld + 16, ld * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < blocks; k++) {
        _tile_loadd(4, a + k * BLOCK, lda * 2);
        _tile_loadd(6, b0 + k * step, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b1 + k * step, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, a + 16 * lda + k * BLOCK, lda * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, ld * 4);
    _tile_stored(1, sums + 16, ld * 4);
    if (two) {
        _tile_stored(2, sums + 16 * ld, ld * 4);
        _tile_stored(3, sums + 16 * ld + 16, ld * 4);
    }
}
#define START_THREAD() _tile_loadconfig(&TILES)
#define END_THREAD() _tile_release()

#else

#ifdef __AVX512F__

static inline vec dot2(vec total, uint32_t a, const uint16_t *b) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(a), (__m512bh)_mm512_loadu_si512(b));
#else
    uvec pairs = *(const uvec *)b;
    union { uint32_t u; float f; } low = {a << 16}, high = {a & 0xffff0000};
    total += low.f * (vec)(pairs << 16);
    total += high.f * (vec)(pairs & 0xffff0000);
    return total;
#endif
}

/* Four rows of both panels. */
static inline void quad(const uint16_t *a, long lda, const uint16_t *b0, const uint16_t *b1, long step, long blocks,
                        float *sums, long ld, int add) {
    vec s[4][2] = {};
    if (add)
        for (int i = 0; i < 4; i++) s[i][0] = *(vec *)(sums + i * ld), s[i][1] = *(vec *)(sums + i * ld + 16);
    for (long k = 0; k < blocks; k++)
        for (long pair = 0; pair < BLOCK / 2; pair++)
            for (int i = 0; i < 4; i++) {
                uint32_t both;
                memcpy(&both, a + i * lda + k * BLOCK + 2 * pair, 4);
                s[i][0] = dot2(s[i][0], both, b0 + k * step + pair * BLOCK);
                s[i][1] = dot2(s[i][1], both, b1 + k * step + pair * BLOCK);
            }
    for (int i = 0; i < 4; i++) *(vec *)(sums + i * ld) = s[i][0], *(vec *)(sums + i * ld + 16) = s[i][1];
}

#else

/* Four rows of one panel. Not inlined in twenty places: GCC 12 for ARM breaks down over that. */
static __attribute__((noinline)) void half_quad(const uint16_t *a, long lda, const uint16_t *b, long step, long blocks,
                                                float *sums, long ld, int add) {
    vec s[4][PANEL / LANES];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < PANEL / LANES; j++) s[i][j] = add ? *(const vec *)(sums + i * ld + j * LANES) : (vec){};
    for (long k = 0; k < blocks; k++) {
        uint32_t wide[4][BLOCK] __attribute__((aligned(64))); /* a in float32, read one number for all lanes */
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < BLOCK; j++) wide[i][j] = (uint32_t)a[i * lda + k * BLOCK + j] << 16;
        for (long pair = 0; pair < BLOCK / 2; pair++) {
            vec even[PANEL / LANES], odd[PANEL / LANES];
#pragma GCC unroll 4
            for (int j = 0; j < PANEL / LANES; j++) {
                const uvec both = *(const uvec *)(b + k * step + pair * BLOCK + j * 2 * LANES);
                even[j] = (vec)(both << 16), odd[j] = (vec)(both & 0xffff0000);
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                float first, second;
                memcpy(&first, &wide[i][2 * pair], 4), memcpy(&second, &wide[i][2 * pair + 1], 4);
#pragma GCC unroll 4
                for (int j = 0; j < PANEL / LANES; j++) s[i][j] += first * even[j], s[i][j] += second * odd[j];
            }
        }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < PANEL / LANES; j++) *(vec *)(sums + i * ld + j * LANES) = s[i][j];
}

static inline void quad(const uint16_t *a, long lda, const uint16_t *b0, const uint16_t *b1, long step, long blocks,
                        float *sums, long ld, int add) {
    half_quad(a, lda, b0, step, blocks, sums, ld, add);
    half_quad(a, lda, b1, step, blocks, sums + PANEL, ld, add);
}

#endif

static inline void product(const uint16_t *a, int two, long lda, const uint16_t *b0, const uint16_t *b1, long step,
                           long blocks, float *sums, long ld, int add) {
    for (int i = 0; i < (two ? 32 : 16); i += 4) quad(a + i * lda, lda, b0, b1, step, blocks, sums + i * ld, ld, add);
}
#define START_THREAD()
#define END_THREAD()
#endif
