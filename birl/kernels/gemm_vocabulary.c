/* From hidden states to the next tokens: the products of the head and the draw in one pass. What does not fit into the
   second-level cache, the logits of all words, is never there; the few that decide are computed again. */
#include "layers.h"
#include "vocabulary.h"

static const long STRIPE = 128; /* rows whose logits of a stretch are there at once: 512 KB */

typedef struct {
    const uint16_t *x, *packed;
    const elem *bias;
    long ldx, K;
} head;

/* Logits [rows, count] of words first, first + 1, ...; `first` is a multiple of 32. */
static void logits_of(const head *h, long row, long rows, long first, long count, float *logits, long ld) {
    const long padded = (h->K + 31) / 32 * 32;
    gemm_alone(h->x + row * h->ldx, h->ldx, h->packed + first * padded, h->bias ? h->bias + first : NULL, logits, ld, rows,
               count, h->K);
}

/* The first of the likeliest words: in the first stretch with the largest peak, in a cell with e^0 in its mass. */
static long likeliest(const head *h, long row, long V, const float *peaks, const float *masses, float peak, float *cell) {
    for (long c = 0; c < cells_of(V); c++) {
        if (!(peaks[c / CELLS] == peak && masses[c] >= 1)) continue;
        const long count = V - c * CELL < CELL ? V - c * CELL : CELL;
        logits_of(h, row, 1, c * CELL, count, cell, CELL);
        for (long i = 0; i < count; i++)
            if (cell[i] == peak) return c * CELL + i;
    }
    return -1;
}

/* What `sample` (vocabulary.c) gives for the logits x W' + bias, x [B, K], with the same bits. `masses` [B, cells] and
   `peaks` [B, stretches] are scratch. */
EXPORT void head_sample(const uint16_t *x, long ldx, const uint16_t *packed, const elem *bias, const float *temperatures,
                        const float *uniforms, int64_t *tokens, float *logp, float *peaks, float *masses, long B, long V,
                        long K) {
    const head h = {x, packed, bias, ldx, K};
    const long stretches = stretches_of(V), cells = cells_of(V);
#pragma omp parallel
    {
        float *logits = take((B < STRIPE ? B : STRIPE) * STRETCH * sizeof(float));
        gemm_begin();
#pragma omp for schedule(static)
        for (long s = 0; s < stretches; s++) {
            const long first = s * STRETCH, count = V - first < STRETCH ? V - first : STRETCH;
            for (long top = 0; top < B; top += STRIPE) {
                const long rows = B - top < STRIPE ? B - top : STRIPE;
                logits_of(&h, top, rows, first, count, logits, STRETCH);
                for (long b = 0; b < rows; b++) {
                    const float t = temperatures[top + b], scale = t > 0 ? 1.f / t : 1.f;
                    weigh(logits + b * STRETCH, count, scale, peaks + (top + b) * stretches + s,
                          masses + (top + b) * cells + s * CELLS);
                }
            }
        }
#pragma omp for schedule(static)
        for (long b = 0; b < B; b++) {
            const float scale = temperatures[b] > 0 ? 1.f / temperatures[b] : 1.f;
            float *weights = masses + b * cells, peak;
            const float norm = combine(peaks + b * stretches, weights, V, &peak);
            long chosen = -1, first = 0;
            if (temperatures[b] > 0) {
                double before, point;
                first = cell_at(weights, V, uniforms[b], &before, &point) * CELL;
                const long count = V - first < CELL ? V - first : CELL;
                logits_of(&h, b, 1, first, count, logits, CELL);
                chosen = word_at(logits, count, scale, peak, before, point);
            } else if ((chosen = likeliest(&h, b, V, peaks + b * stretches, weights, peak, logits)) >= 0) {
                first = chosen / CELL * CELL;
                chosen -= first;
            }
            tokens[b] = chosen < 0 ? -1 : first + chosen;
            logp[b] = chosen < 0 ? NAN : fmaf(logits[chosen], scale, -norm);
        }
        gemm_end();
        free(logits);
    }
}
