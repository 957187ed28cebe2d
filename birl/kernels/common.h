/* Types and vector functions shared by the kernels. Compiled once for each (element type, head size).

   elem is the type of weights and activations in memory: bfloat16 or float32. Everything is computed in float32, and
   the order of every sum depends only on the row itself: not on the batch, the threads, or how keys are stored. So the
   engine and the learner get the same bits. */
#pragma once
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__) /* numbers in a register: GCC keeps larger vectors in memory instead of several registers */
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define HEAD_VECTORS (HEAD_DIM / LANES)
#define EXPORT __attribute__((visibility("default")))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#ifdef BF16
typedef uint16_t elem;
#else
typedef float elem;
#endif

static inline vec splat(float x) { return (vec){} + x; }

static inline vec load_bf16(const uint16_t *p) {
    uvec wide = __builtin_convertvector(*(const hvec *)p, uvec) << 16;
    return (vec)wide;
}

/* Round to nearest, ties to even; NaN stays NaN. */
static inline void store_bf16(uint16_t *p, vec x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec nan = (uvec)(x != x);
    rounded = (rounded & ~nan) | (0x7fc0 & nan);
    *(hvec *)p = __builtin_convertvector(rounded, hvec);
#endif
}

#ifdef BF16
static inline vec load(const elem *p) { return load_bf16(p); }
static inline void store(elem *p, vec x) { store_bf16(p, x); }
#else
static inline vec load(const elem *p) { return *(const vec *)p; }
static inline void store(elem *p, vec x) { *(vec *)p = x; }
#endif

static inline void store1(elem *p, float x) {
    elem row[LANES];
    store(row, splat(x));
    *p = row[0];
}

static inline vec choose(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

/* b where one of both is NaN, as x86 defines it. */
static inline vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

static inline vec partner(vec x, int distance) { /* lane i gets lane i ^ distance */
#if LANES == 16
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7};
#else
    const ivec lane = {0, 1, 2, 3};
#endif
    return __builtin_shuffle(x, lane ^ distance);
}

static inline float sum(vec x) {
#pragma GCC unroll 4
    for (int s = LANES / 2; s; s /= 2) x += partner(x, s);
    return x[0];
}

static inline float largest(vec x) {
#pragma GCC unroll 4
    for (int s = LANES / 2; s; s /= 2) x = larger(partner(x, s), x);
    return x[0];
}

/* e^x to about one unit in the last place (Cephes' expf): 2^n times a polynomial. 0 below -60: relative to the largest
   term, 1, that does not change any sum, and products with it would be subnormal, which costs 100 cycles each. */
static inline vec vexp(vec x) {
    const float magic = 12582912.f; /* 1.5 * 2^23: adding it rounds to an integer */
#ifdef __AVX512F__
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-60.f), _CMP_NLT_UQ);
    x = (vec)_mm512_min_ps(_mm512_set1_ps(88.f), (__m512)x); /* NaN stays */
#else
    ivec tiny = x < -60.f;
    x = choose(tiny, splat(-60.f), choose(x > 88.f, splat(88.f), x));
#endif
    vec shifted = x * 1.44269504f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.f;
#ifdef __AVX512F__
    return (vec)_mm512_maskz_scalef_ps(counts, (__m512)y, (__m512)n);
#else
    ivec exponent = ((ivec)shifted - 0x4b400000) << 23;
    return choose(tiny, splat(0.f), (vec)((ivec)y + exponent));
#endif
}

/* 1 / x to about one unit in the last place: a division takes as long as the rest of a sigmoid. */
static inline vec reciprocal(vec x) {
#ifdef __AVX512F__
    const vec guess = (vec)_mm512_rcp14_ps((__m512)x);
    return guess * (2.f - x * guess);
#else
    return 1.f / x;
#endif
}

static inline vec sigmoid(vec x) { return reciprocal(1.f + vexp(-x)); }

static inline vec swish(vec gate, vec up) { return gate * sigmoid(gate) * up; }
