/* Products of tiles with float32 sums, for gemm.c and attention.c.

   Packed matrices W [N, K], for products x W': panels of 16 rows n; in each, blocks of 32 k; in each, lines of 64 bytes:
   16 n x 2 k in bfloat16, 16 n x 1 k in float32. A block in bfloat16 is an AMX tile, and 16 registers for AVX-512's dot
   products of pairs. K is padded to 32, N to 16, with zeros. The order of a sum is fixed: k one after another, or block
   after block on AMX, so a sum may stop and go on.

   In int8 a block is 16 exponents e, one for each n, and the 512 codes. A weight is code x 2^(e - 127), which is exact
   in bfloat16, so a product with codes has the bits of the one with the decoded weights. */
#pragma once
#include "common.h"

#define PANEL 16
#define BLOCK 32
#define TILE (PANEL * BLOCK)  /* elements of a packed block */
#define WORD (4 / (long)sizeof(elem)) /* k of a line */
#define STEP (16 * WORD)      /* k of 16 lines, or elements of a line */
#define LINES (BLOCK / WORD)  /* of a block; that of k is at element 16 k */
#define CODED (PANEL + TILE)  /* bytes of one in int8 */

/* A line is 16 words: pairs of bfloat16, or float32. transpose16 of 16 lines: a[i][j] -> a[j][i]. */
#ifdef __AVX512F__
typedef uvec line;

/* Pairs of even[i] and odd[i], 0 for one that is NULL; in float32 the first alone. */
static inline line zipped(const elem *even, const elem *odd) {
    line both = {};
#ifndef BF16
    return even ? *(const line *)even : both;
#endif
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

static inline line zipped(const elem *even, const elem *odd) {
    line both = {};
#ifndef BF16
    if (even) memcpy(&both, even, sizeof(both));
    return both;
#endif
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

/* Lines of rows t to t + STEP - 1 of x [T, N], columns n to n + 15; 0 after the last row. */
static inline void lines_of(const elem *x, long stride, long t, long n, long T, line lines[16]) {
    for (long i = 0; i < 16; i++) {
        const long row = t + i * WORD;
        const elem *from = x + row * stride + n;
        lines[i] = zipped(row < T ? from : NULL, row + 1 < T ? from + stride : NULL);
    }
}

/* 2^(e - 127) of LANES exponents, or one divided by it. */
static inline vec power_of(const int8_t *exponents, int inverse) {
#ifdef __AVX512F__
    const uvec e = (uvec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)exponents));
#elif defined(__AVX2__)
    const uvec e = (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)exponents));
#else
    const uvec e = __builtin_convertvector(*(const bvec *)exponents, uvec) & 0xff;
#endif
    return (vec)(inverse ? (uvec)(254 - e) << 23 : (uvec)(e << 23));
}

#ifdef __AVX512VBMI__
/* A code is a sign and seven bits, which index its two bytes in bfloat16. Two pairs of k alternate after 4 n. */
static uint8_t levels[2][128]; /* lower bytes, upper bytes */

static __attribute__((constructor)) void fill_levels(void) {
    for (int i = 1; i < 128; i++) {
        union { float f; uint32_t u; } x = {i};
        levels[0][i] = x.u >> 16, levels[1][i] = x.u >> 24;
    }
}

static inline int8_t code_of(int number) { return number < 0 ? -number | 0x80 : number; }

static inline long place_of(long n, long k) { return PANEL + k / 4 * 64 + n / 4 * 16 + k / 2 % 2 * 8 + n % 4 * 2 + k % 2; }

static inline void two_lines_of_codes(const int8_t *block, long pair, uvec out[2]) {
    const __m512i codes = _mm512_loadu_si512(block + PANEL + pair * BLOCK), *at = (const __m512i *)levels;
    const __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(at), codes, _mm512_loadu_si512(at + 1));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(at + 2), codes, _mm512_loadu_si512(at + 3));
    const __m512i top = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xf8); /* high | codes & sign */
    out[0] = (uvec)_mm512_unpacklo_epi8(low, top), out[1] = (uvec)_mm512_unpackhi_epi8(low, top);
}
#else
/* A code is an integer; those of the first k of a pair are before those of the second. */
static inline int8_t code_of(int number) { return number; }

static inline long place_of(long n, long k) { return PANEL + k / 2 * BLOCK + k % 2 * PANEL + n; }

static inline vec numbers_of(const int8_t *at) {
#ifdef __AVX512F__
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
    return __builtin_convertvector(*(const bvec *)at, vec);
#endif
}

static inline uvec line_of_codes(const int8_t *block, long pair) {
    const int8_t *at = block + PANEL + pair * BLOCK;
    return (uvec)numbers_of(at) >> 16 | (uvec)numbers_of(at + PANEL);
}

static inline void two_lines_of_codes(const int8_t *block, long pair, uvec out[2]) {
    out[0] = line_of_codes(block, pair), out[1] = line_of_codes(block, pair + 1);
}
#endif

/* Decode a block to bfloat16. */
static inline void decode(const int8_t *block, uint16_t *tile) {
    for (long n = 0; n < PANEL; n += LANES) {
        const vec scale = power_of(block + n, 0);
        for (long pair = 0; pair < BLOCK / 2; pair += 2) {
            uvec both[2];
            two_lines_of_codes(block + n, pair, both);
            for (int i = 0; i < 2; i++) {
                const uvec first = (uvec)((vec)(both[i] << 16) * scale) >> 16, second = (uvec)((vec)(both[i] & 0xffff0000) * scale);
                *(uvec *)(tile + (pair + i) * BLOCK + 2 * n) = first | second;
            }
        }
    }
}

#if defined(__AMX_BF16__) && defined(BF16)

static const struct {
    uint8_t palette, start_row, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TILES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* sums [rows, 32] (rows ld apart) = or += a W', for two panels b0, b1 whose blocks are `step` elements apart, and at
   most 32 rows a, lda elements apart, which are read, and their sums written, up to the next multiple of ROWS. Weights
   are read as a stream, so that the rows stay in the first-level cache. The processor's own prefetching works best with
   two streams of weights: prefetch instructions were slower. */
static inline void product(const elem *a, long rows, long lda, const elem *b0, const elem *b1, long step,
                           long blocks, float *sums, long ld, int add) {
    const int two = rows > 16;
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
        _tile_stream_loadd(6, b0 + k * step, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, b1 + k * step, 64);
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

/* Over a few tiles; then `length` bytes from n0 and n1 on are prefetched. */
static inline void product_ahead(const elem *a, long rows, long lda, const elem *b0, const elem *b1, long blocks,
                                 const char *n0, const char *n1, long length, float *sums, long ld, int add) {
    product(a, rows, lda, b0, b1, TILE, blocks, sums, ld, add);
    for (long i = 0; i < length; i += 64) __builtin_prefetch(n0 + i, 0, 2), __builtin_prefetch(n1 + i, 0, 2);
}
#define product_ahead_by_two product_ahead
#define ROWS 16
#define MANY 32                              /* rows of a product */
#define NEARBY 20                            /* blocks of 32 rows that the first-level cache holds */
#define AHEAD 3                              /* tiles of a panel that all rows are multiplied with in turn */
#define FIRST(rows) ((rows) <= 48 ? 16 : 32) /* rows of the first turn */
#define CALLERS(rows) 1                      /* turns that prefetch the next tiles */
#define START_THREAD() _tile_loadconfig(&TILES)
#define END_THREAD() _tile_release()

#else

#ifdef __AVX512F__

#define ROWS 1
#define MANY 8    /* rows that read a weight together */
#define FAR 16384 /* prefetch distance in bytes */

/* total + a w of 16 n: a word of x, and a line. */
static inline vec dot(vec total, uint32_t a, uvec pairs) {
#ifndef BF16
    union { uint32_t u; float f; } x = {a};
    return total + x.f * (vec)pairs;
#elif defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(a), (__m512bh)pairs);
#else
    union { uint32_t u; float f; } low = {a << 16}, high = {a & 0xffff0000};
    total += low.f * (vec)(pairs << 16);
    total += high.f * (vec)(pairs & 0xffff0000);
    return total;
#endif
}

/* Two lines of a tile, or of codes. */
static inline void two_lines_at(const char *tile, long at, int coded, uvec out[2]) {
    if (coded)
        two_lines_of_codes((const int8_t *)tile, at, out);
    else
        out[0] = *(const uvec *)(tile + 64 * at), out[1] = *(const uvec *)(tile + 64 * (at + 1));
}

/* A few rows of both panels; n, coded and lines are constants. With codes a sum is scaled before and after each block,
   which rounds nothing, instead of the weights. Later memory is prefetched from n0 and n1 on: for each block `step`
   bytes of both, `lines` lines at a time. */
static inline __attribute__((always_inline)) void some(const int n, const int coded, const int lines, const elem *a,
                                                       long lda, const char *b0, const char *b1, long bytes, long blocks,
                                                       const char *n0, const char *n1, long step, float *sums, long ld,
                                                       int add) {
    vec s[MANY][2] = {};
    if (add)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) s[i][0] = *(vec *)(sums + i * ld), s[i][1] = *(vec *)(sums + i * ld + 16);
    for (long k = 0; k < blocks; k++, b0 += bytes, b1 += bytes) {
#pragma GCC unroll 8
        for (int i = 0; i < n && coded; i++)
            s[i][0] *= power_of((const int8_t *)b0, 1), s[i][1] *= power_of((const int8_t *)b1, 1);
        const long ahead = (step + LINES / 2 - 1) / (LINES / 2);
        for (long at = 0; at < LINES; at += 2, n0 += ahead, n1 += ahead) {
            uvec w0[2], w1[2];
            two_lines_at(b0, at, coded, w0), two_lines_at(b1, at, coded, w1);
            for (int i = 0; i < lines; i++) __builtin_prefetch(n0 + i * 64, 0, 2), __builtin_prefetch(n1 + i * 64, 0, 2);
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++)
#pragma GCC unroll 8
                for (int i = 0; i < n; i++) {
                    uint32_t both;
                    memcpy(&both, a + i * lda + k * BLOCK + WORD * (at + j), 4);
                    s[i][0] = dot(s[i][0], both, w0[j]);
                    s[i][1] = dot(s[i][1], both, w1[j]);
                }
        }
#pragma GCC unroll 8
        for (int i = 0; i < n && coded; i++)
            s[i][0] *= power_of((const int8_t *)b0, 0), s[i][1] *= power_of((const int8_t *)b1, 0);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) *(vec *)(sums + i * ld) = s[i][0], *(vec *)(sums + i * ld + 16) = s[i][1];
}

/* `CALL(n)` with n = rows as a constant, at most MANY. */
#define BY_ROWS(rows, CALL)                                                                                                    \
    switch (rows) {                                                                                                            \
    case 1: CALL(1); break;                                                                                                    \
    case 2: CALL(2); break;                                                                                                    \
    case 3: CALL(3); break;                                                                                                    \
    case 4: CALL(4); break;                                                                                                    \
    case 5: CALL(5); break;                                                                                                    \
    case 6: CALL(6); break;                                                                                                    \
    case 7: CALL(7); break;                                                                                                    \
    default: CALL(8);                                                                                                          \
    }

static inline __attribute__((always_inline)) void few(const int coded, const int lines, const elem *a, long rows, long lda,
                                                      const char *b0, const char *b1, long bytes, long blocks, const char *n0,
                                                      const char *n1, long step, float *sums, long ld, int add) {
#define SOME(n) some(n, coded, lines, a, lda, b0, b1, bytes, blocks, n0, n1, step, sums, ld, add)
    BY_ROWS(rows, SOME)
#undef SOME
}

/* A few rows of one panel; n is a constant. Panels are consecutive. The processor prefetches that itself for one or two
   rows; from three on, which compute longer, it is prefetched by instructions. */
static inline __attribute__((always_inline)) void single(const int n, const elem *a, long lda, const char *b, long blocks,
                                                         float *sums, long ld) {
    vec s[MANY] = {};
    for (long k = 0; k < blocks; k++, b += TILE * sizeof(elem))
        for (long at = 0; at < LINES; at += 2) {
            uvec w[2];
            two_lines_at(b, at, 0, w);
            const char *later = b + FAR + 64 * at;
            if (n > 2) __builtin_prefetch(later, 0, 2), __builtin_prefetch(later + 64, 0, 2);
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++)
#pragma GCC unroll 8
                for (int i = 0; i < n; i++) {
                    uint32_t both;
                    memcpy(&both, a + i * lda + k * BLOCK + WORD * (at + j), 4);
                    s[i] = dot(s[i], both, w[j]);
                }
        }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) *(vec *)(sums + i * ld) = s[i];
}

#define NARROW 4 /* rows up to which product_of_four is faster than two panels: it has more independent sums */
#ifdef __AVX512VP2INTERSECT__
#define NEAR 3 /* first-level cache: 0.9 times as long on Zen 5, but 1.8 times on Zen 4, which lacks that instruction */
#else
#define NEAR 2
#endif

/* sums [n, 64] = or += a W' for panels w0, w0 + apart, w1, w1 + apart; n <= NARROW is a constant. Each of their lines
   prefetches the one at the same place of n0 or n1. */
static inline __attribute__((always_inline)) void four(const int n, const elem *a, long lda, const elem *w0,
                                                       const elem *w1, const elem *n0, const elem *n1,
                                                       long apart, long blocks, float *sums, long ld, int add) {
    vec s[NARROW][4] = {};
    if (add)
#pragma GCC unroll 4
        for (int i = 0; i < n; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) s[i][j] = *(vec *)(sums + i * ld + j * PANEL);
    for (long at = 0; at < blocks * TILE; at += STEP) {
        const elem *from[4] = {w0 + at, w0 + apart + at, w1 + at, w1 + apart + at};
        const elem *later[4] = {n0 + at, n0 + apart + at, n1 + at, n1 + apart + at};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) __builtin_prefetch(later[j], 0, NEAR);
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) {
            uint32_t both;
            memcpy(&both, a + i * lda + at / PANEL, 4);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) s[i][j] = dot(s[i][j], both, *(const uvec *)from[j]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < n; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) *(vec *)(sums + i * ld + j * PANEL) = s[i][j];
}

static __attribute__((noinline, unused)) void product_of_four(const elem *a, long rows, long lda, const elem *w0,
                                                              const elem *w1, const elem *n0, const elem *n1,
                                                              long apart, long blocks, float *sums, long ld, int add) {
#define FOUR(n) four(n < NARROW ? n : NARROW, a, lda, w0, w1, n0, n1, apart, blocks, sums, ld, add)
    BY_ROWS(rows, FOUR)
#undef FOUR
}

static __attribute__((noinline)) void one(const elem *a, long rows, long lda, const char *b, long blocks, float *sums, long ld) {
#define SINGLE(n) single(n, a, lda, b, blocks, sums, ld)
    BY_ROWS(rows, SINGLE)
#undef SINGLE
}

#else

/* Four rows of one panel. */
static inline __attribute__((always_inline)) void half(const int coded, const elem *a, long lda, const char *b, long bytes,
                                                       long blocks, const char *next, long step, float *sums, long ld, int add) {
    vec s[4][PANEL / LANES];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < PANEL / LANES; j++) s[i][j] = add ? *(const vec *)(sums + i * ld + j * LANES) : (vec){};
    for (long k = 0; k < blocks; k++, b += bytes, next += step) {
#ifdef BF16
        uint32_t wide[4][BLOCK] __attribute__((aligned(64))); /* a in float32, each number is broadcast to all lanes */
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < BLOCK; j++) wide[i][j] = (uint32_t)a[i * lda + k * BLOCK + j] << 16;
#endif
        for (int j = 0; j < PANEL / LANES && coded; j++) { /* instead of the weights, which rounds nothing */
            const vec inverse = power_of((const int8_t *)b + j * LANES, 1);
            for (int i = 0; i < 4; i++) s[i][j] *= inverse;
        }
        for (long i = 0; i < step; i += 64) __builtin_prefetch(next + i, 0, 2);
#ifndef BF16
        for (long j = 0; j < BLOCK; j++) {
            const vec *w = (const vec *)(b + 64 * j);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
                for (int v = 0; v < PANEL / LANES; v++) s[i][v] += a[i * lda + k * BLOCK + j] * w[v];
        }
#else
        for (long pair = 0; pair < BLOCK / 2; pair++) {
            vec even[PANEL / LANES], odd[PANEL / LANES];
#pragma GCC unroll 4
            for (int j = 0; j < PANEL / LANES; j++) {
                if (coded) {
                    const int8_t *at = (const int8_t *)b + PANEL + pair * BLOCK + j * LANES;
                    even[j] = numbers_of(at), odd[j] = numbers_of(at + PANEL);
                } else {
                    const uvec both = *(const uvec *)(b + 2 * (pair * BLOCK + j * 2 * LANES));
                    even[j] = (vec)(both << 16), odd[j] = (vec)(both & 0xffff0000);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                float first, second;
                memcpy(&first, &wide[i][2 * pair], 4), memcpy(&second, &wide[i][2 * pair + 1], 4);
#pragma GCC unroll 4
                for (int j = 0; j < PANEL / LANES; j++) s[i][j] += first * even[j], s[i][j] += second * odd[j];
            }
        }
        for (int j = 0; j < PANEL / LANES && coded; j++) {
            const vec scale = power_of((const int8_t *)b + j * LANES, 0);
            for (int i = 0; i < 4; i++) s[i][j] *= scale;
        }
#endif
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < PANEL / LANES; j++) *(vec *)(sums + i * ld + j * LANES) = s[i][j];
}

/* Not inlined in twenty places: GCC 12 for ARM fails on that. */
static __attribute__((noinline)) void half_plain(const elem *a, long lda, const char *b, long bytes, long blocks,
                                                 const char *next, long step, float *sums, long ld, int add) {
    half(0, a, lda, b, bytes, blocks, next, step, sums, ld, add);
}

static __attribute__((noinline, unused)) void half_coded(const elem *a, long lda, const char *b, long bytes, long blocks,
                                                         const char *next, long step, float *sums, long ld, int add) {
    half(1, a, lda, b, bytes, blocks, next, step, sums, ld, add);
}

#define ROWS 4
#define MANY 4

static inline void few(const int coded, const int lines, const elem *a, long rows, long lda, const char *b0,
                       const char *b1, long bytes, long blocks, const char *n0, const char *n1, long step, float *sums,
                       long ld, int add) {
    (coded ? half_coded : half_plain)(a, lda, b0, bytes, blocks, n0, step, sums, ld, add);
    (coded ? half_coded : half_plain)(a, lda, b1, bytes, blocks, n1, step, sums + PANEL, ld, add);
}

static inline void one(const elem *a, long rows, long lda, const char *b, long blocks, float *sums, long ld) {
    half_plain(a, lda, b, TILE * sizeof(elem), blocks, b + 2 * blocks * TILE * sizeof(elem), TILE * sizeof(elem), sums, ld,
               0); /* two panels later */
}

#endif

static inline void product(const elem *a, long rows, long lda, const elem *b0, const elem *b1, long step,
                           long blocks, float *sums, long ld, int add) {
    const char *w0 = (const char *)b0, *w1 = (const char *)b1;
    for (long i = 0; i < rows && i < 32; i += MANY)
        few(0, 0, a + i * lda, rows - i, lda, w0, w1, step * sizeof(elem), blocks, w0, w1, 0, sums + i * ld, ld, add);
}

/* For at most MANY rows over a few tiles. Meanwhile `length` bytes from n0 and n1 on are prefetched, one or two lines
   of both for two lines of weights. Not inlined: GCC's register allocation there costs up to 5 %. */
#define AHEAD_BY(name, lines)                                                                                               \
    static __attribute__((noinline, unused)) void name(const elem *a, long rows, long lda, const elem *b0,              \
                                                       const elem *b1, long blocks, const char *n0, const char *n1,         \
                                                       long length, float *sums, long ld, int add) {                        \
        few(0, lines, a, rows, lda, (const char *)b0, (const char *)b1, TILE * sizeof(elem), blocks, n0, n1, length / blocks, sums, \
            ld, add);                                                                                                       \
    }
AHEAD_BY(product_ahead, 1)
AHEAD_BY(product_ahead_by_two, 2)
#define AHEAD 6
#define NEARBY (1L << 40)
#define FIRST(rows) MANY
#define CALLERS(rows) (((rows) + MANY - 1) / MANY)

/* product_ahead for at most MANY rows, which read each weight once: one panel after the other, as memory is fastest for
   one stream. Codes take both at once, as they compute longer. */
static inline void product_of_few(const elem *a, long rows, long lda, const char *b0, const char *b1, int coded,
                                  long blocks, float *sums, long ld) {
    const long far = 2 * blocks * CODED;
    if (coded) {
        few(1, 2, a, rows, lda, b0, b1, CODED, blocks, b0 + far, b1 + far, CODED, sums, ld, 0);
    } else {
        one(a, rows, lda, b0, blocks, sums, ld);
        one(a, rows, lda, b1, blocks, sums + PANEL, ld);
    }
}
#define START_THREAD()
#define END_THREAD()
#endif

#ifndef NARROW
#define NARROW 0
#define product_of_four(...) /* is called for no row */
#endif
