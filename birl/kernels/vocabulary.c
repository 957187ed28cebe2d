/* From logits to log-probs, samples, and gradients; logits are float32 and need not be kept. */

#include "vocabulary.h"

void weigh(const float *logits, long count, float scale, float *peak, float *masses, float *tilt) {
    vec most = splat(-INFINITY), tilts = {};
    long i = 0;
    for (; i + LANES <= count; i += LANES) most = larger(*(const vec *)(logits + i), most);
    float found = largest(most), tilted = 0;
    for (; i < count; i++) found = logits[i] > found ? logits[i] : found;
    *peak = found *= scale;
    const float base = found == -INFINITY ? 0 : found; /* if nothing is possible all masses are 0, or NaN */
    for (long c = 0; c * CELL < count; c++) {
        const long end = (c + 1) * CELL < count ? (c + 1) * CELL : count;
        vec mass = {};
        float rest = 0;
        for (i = c * CELL; i + LANES <= end; i += LANES) {
            const vec d = *(const vec *)(logits + i) * scale - base, e = vexp(d);
            mass += e;
            tilts += e * d;
        }
        for (; i < end; i++) {
            const float d = logits[i] * scale - base, e = expf(d);
            rest += e;
            tilted += e * d;
        }
        masses[c] = sum(mass) + rest;
    }
    if (tilt) *tilt = sum(tilts) + tilted;
}

__attribute__((noinline)) float combine(const float *peaks, float *masses, long V, float *peak) {
    float most = -INFINITY;
    for (long s = 0; s < stretches_of(V); s++) most = peaks[s] > most ? peaks[s] : most;
    double total = 0;
    for (long s = 0; s < stretches_of(V); s++) {
        const float factor = peaks[s] == most ? 1 : expf(peaks[s] - most);
        const long last = (s + 1) * CELLS < cells_of(V) ? (s + 1) * CELLS : cells_of(V);
        double here = 0;
        for (long c = s * CELLS; c < last; c++) here += masses[c] *= factor;
        total += here;
    }
    *peak = most;
    return most + logf(total);
}

float entropy_of(const float *peaks, const float *masses, const float *tilts, long V, float peak) {
    double total = 0, tilted = 0; /* tilted: sum of (scale l - peak) e^(scale l - peak) */
    for (long s = 0; s < stretches_of(V); s++) {
        const long last = (s + 1) * CELLS < cells_of(V) ? (s + 1) * CELLS : cells_of(V);
        const double below = peaks[s] - peak;
        double here = 0;
        for (long c = s * CELLS; c < last; c++) here += masses[c];
        total += here;
        if (here > 0) tilted += exp(below) * tilts[s] + below * here;
    }
    return log(total) - tilted / total;
}

static void weigh_row(const float *logits, long V, float scale, float *peaks, float *masses, float *tilts) {
    for (long s = 0; s < stretches_of(V); s++)
        weigh(logits + s * STRETCH, V - s * STRETCH < STRETCH ? V - s * STRETCH : STRETCH, scale, peaks + s,
              masses + s * CELLS, tilts ? tilts + s : NULL);
}

static long count_of(long c, long V) { return V - c * CELL < CELL ? V - c * CELL : CELL; }

float draw(float *peaks, float *masses, long V, float temperature, float uniform, cell_of cell, void *from, int64_t *token) {
    const float scale = scale_of(temperature);
    float peak;
    const float norm = combine(peaks, masses, V, &peak);
    const float *logits = NULL;
    long c = 0, chosen = -1;
    if (temperature > 0) {
        double total = 0, before = 0;
        for (long i = 0; i < cells_of(V); i++) total += masses[i];
        const double point = uniform * total;
        while (c + 1 < cells_of(V) && before + masses[c] <= point) before += masses[c++];
        while (masses[c] == 0 && c > 0) c--; /* rounding must not select past the last possible cell */
        logits = cell(from, c, count_of(c, V));
        for (long i = 0; i < count_of(c, V); i++) {
            const float e = expf(logits[i] * scale - peak);
            if (e > 0) {
                chosen = i; /* nor past the last possible token */
                before += e;
                if (before > point) break;
            }
        }
    } else
        for (; chosen < 0 && c < cells_of(V); c += chosen < 0) { /* in the first cell with the peak, and e^0 in its mass */
            if (!(peaks[c / CELLS] == peak && masses[c] >= 1)) continue;
            logits = cell(from, c, count_of(c, V));
            for (long i = 0; i < count_of(c, V) && chosen < 0; i++) chosen = logits[i] == peak ? i : -1;
        }
    *token = chosen < 0 ? -1 : c * CELL + chosen;
    return chosen < 0 ? NAN : fmaf(logits[chosen], scale, -norm);
}

/* logp[n] = l[target] / t - norm, norm[n], entropy[n] = -sum p log p.  logits [N, V]. */
EXPORT void logprobs(const float *logits, const int64_t *targets, float temperature, float *logp, float *norm,
                     float *entropy, long N, long V) {
    const float scale = 1.f / temperature;
#pragma omp parallel for schedule(static)
    for (long n = 0; n < N; n++) {
        const float *row = logits + n * V;
        float peak, peaks[stretches_of(V)], masses[cells_of(V)], tilts[stretches_of(V)];
        weigh_row(row, V, scale, peaks, masses, tilts);
        norm[n] = combine(peaks, masses, V, &peak);
        logp[n] = fmaf(row[targets[n]], scale, -norm[n]);
        entropy[n] = entropy_of(peaks, masses, tilts, V, peak);
    }
}

/* Gradient of sum(grad_logp logp + grad_entropy entropy) with respect to the logits of the tokens from `first` on:
   (grad_logp (onehot - p) - grad_entropy p (log p + entropy)) / t.  Tokens are rows: logits [W, N] -> grad [W, width],
   zeros after column N; products with it then need no transposition. */
EXPORT void logprobs_backward(const float *logits, const int64_t *targets, float temperature, const float *norm,
                              const float *entropy, const float *grad_logp, const float *grad_entropy, elem *grad,
                              long first, long W, long N, long width) {
    const float scale = 1.f / temperature;
#pragma omp parallel for schedule(static)
    for (long w = 0; w < W; w++) {
        const float *row = logits + w * N;
        elem *out = grad + w * width;
        long n = 0;
        for (; n + LANES <= N; n += LANES) {
            vec l = *(const vec *)(row + n) * scale - *(const vec *)(norm + n), factor = {};
            if (grad_logp) factor -= *(const vec *)(grad_logp + n);
            if (grad_entropy) factor -= *(const vec *)(grad_entropy + n) * (l + *(const vec *)(entropy + n));
            store(out + n, vexp(l) * factor * scale);
        }
        for (; n < width; n++) {
            float g = 0;
            if (n < N) {
                const float l = row[n] * scale - norm[n];
                g = expf(l) * (-(grad_logp ? grad_logp[n] : 0) - (grad_entropy ? grad_entropy[n] * (l + entropy[n]) : 0)) * scale;
            }
            store1(out + n, g);
        }
    }
    for (long n = 0; n < N; n++) {
        const long w = targets[n] - first;
        if (w < 0 || w >= W) continue;
        const float l = logits[w * N + n] * scale - norm[n], p = expf(l), g = grad_logp ? grad_logp[n] : 0;
        store1(grad + w * width + n, (g - p * (g + (grad_entropy ? grad_entropy[n] * (l + entropy[n]) : 0))) * scale);
    }
}

static const float *in_memory(void *row, long c, long count) { return (const float *)row + c * CELL; }

/* `draw` for each row of logits [B, V]; temperature 0 gives the log-prob at temperature 1. -inf is never chosen. */
EXPORT void sample(const float *logits, const float *temperatures, const float *uniforms, int64_t *tokens, float *logp,
                   long B, long V) {
#pragma omp parallel for schedule(static)
    for (long b = 0; b < B; b++) {
        float *row = (float *)logits + b * V, peaks[stretches_of(V)], masses[cells_of(V)];
        weigh_row(row, V, scale_of(temperatures[b]), peaks, masses, NULL);
        logp[b] = draw(peaks, masses, V, temperatures[b], uniforms[b], in_memory, row, tokens + b);
    }
}
