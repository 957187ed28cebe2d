/* From hidden states to the next tokens: the products of the head and sampling in one pass. The logits of all tokens,
   which do not fit into the second-level cache, are never stored; the few that decide are recomputed. */
#include "layers.h"
#include "vocabulary.h"

static const long STRIPE = 128; /* rows whose logits of a stretch are stored at once: 512 KB */

static __thread scratch mine;

typedef struct {
    const elem *x, *packed;
    const elem *bias;
    long ldx, K;
} head;

/* Logits [rows, count] of tokens first, first + 1, ...; `first` is a multiple of 32. */
static void logits_of(const head *h, long row, long rows, long first, long count, float *logits, long ld) {
    const long padded = (h->K + 31) / 32 * 32;
    gemm_alone(h->x + row * h->ldx, h->ldx, h->packed + first * padded, h->bias ? h->bias + first : NULL, logits, ld, rows,
               count, h->K);
}

typedef struct { const head *its; long row; float *logits; } again;

static const float *computed(void *from, long c, long count) {
    const again *a = from;
    logits_of(a->its, a->row, 1, c * CELL, count, a->logits, CELL);
    return a->logits;
}

/* `sample` (vocabulary.c) of the logits x W' + bias, x [B, K], with the same bits. `masses` [B, cells] and `peaks` [B,
   stretches] are scratch. */
EXPORT void head_sample(const elem *x, long ldx, const elem *packed, const elem *bias, const float *temperatures,
                        const float *uniforms, int64_t *tokens, float *logp, float *peaks, float *masses, long B, long V,
                        long K) {
    const head h = {x, packed, bias, ldx, K};
    const long stretches = stretches_of(V), cells = cells_of(V);
#pragma omp parallel
    {
        float *logits = take(&mine, (B < STRIPE ? B : STRIPE) * STRETCH * sizeof(float));
        gemm_begin();
#pragma omp for schedule(static)
        for (long s = 0; s < stretches; s++) {
            const long first = s * STRETCH, count = V - first < STRETCH ? V - first : STRETCH;
            for (long top = 0; top < B; top += STRIPE) {
                const long rows = B - top < STRIPE ? B - top : STRIPE;
                logits_of(&h, top, rows, first, count, logits, STRETCH);
                for (long b = 0; b < rows; b++) {
                    weigh(logits + b * STRETCH, count, scale_of(temperatures[top + b]), peaks + (top + b) * stretches + s,
                          masses + (top + b) * cells + s * CELLS, NULL);
                }
            }
        }
#pragma omp for schedule(static)
        for (long b = 0; b < B; b++)
            logp[b] = draw(peaks + b * stretches, masses + b * cells, V, temperatures[b], uniforms[b], computed,
                           &(again){&h, b, logits}, tokens + b);
        gemm_end();
        give(&mine);
    }
}

/* `logprobs` (vocabulary.c) of these logits, with the same bits. `masses` [B, cells], `peaks` and `tilts` [B,
   stretches] are scratch. */
EXPORT void head_logprobs(const elem *x, long ldx, const elem *packed, const elem *bias, const int64_t *targets,
                          float temperature, float *logp, float *norm, float *entropy, float *peaks, float *masses,
                          float *tilts, long B, long V, long K) {
    const head h = {x, packed, bias, ldx, K};
    const long stretches = stretches_of(V), cells = cells_of(V);
    const float scale = 1.f / temperature;
#pragma omp parallel
    {
        float *logits = take(&mine, (B < STRIPE ? B : STRIPE) * STRETCH * sizeof(float));
        gemm_begin();
#pragma omp for schedule(static)
        for (long s = 0; s < stretches; s++) {
            const long first = s * STRETCH, count = V - first < STRETCH ? V - first : STRETCH;
            for (long top = 0; top < B; top += STRIPE) {
                const long rows = B - top < STRIPE ? B - top : STRIPE;
                logits_of(&h, top, rows, first, count, logits, STRETCH);
                for (long b = 0; b < rows; b++) {
                    const long row = top + b, target = targets[row] - first;
                    weigh(logits + b * STRETCH, count, scale, peaks + row * stretches + s, masses + row * cells + s * CELLS,
                          tilts + row * stretches + s);
                    if (target >= 0 && target < count) logp[row] = logits[b * STRETCH + target];
                }
            }
        }
#pragma omp for schedule(static)
        for (long b = 0; b < B; b++) {
            float peak;
            norm[b] = combine(peaks + b * stretches, masses + b * cells, V, &peak);
            logp[b] = fmaf(logp[b], scale, -norm[b]);
            entropy[b] = entropy_of(peaks + b * stretches, masses + b * cells, tilts + b * stretches, V, peak);
        }
        gemm_end();
        give(&mine);
    }
}
