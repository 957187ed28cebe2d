/* From logits to log-probs, samples, and gradients; logits are float32 and need not be kept. */
#include "common.h"

#define STRETCH 1024

static long stretches_of(long V) { return (V + STRETCH - 1) / STRETCH; }

/* log sum exp(scale l) over a row, scale = 1 / temperature, and the sum of e^(scale l - peak) of each stretch of it. One
   function, not inlined, for the engine and the learner: the same order of summation, the same roundings. */
static __attribute__((noinline)) float row_norm(const float *logits, long V, float scale, float *masses, float *peak_out) {
    vec most = splat(-INFINITY);
    long i = 0;
    for (; i + LANES <= V; i += LANES) most = larger(*(const vec *)(logits + i), most);
    float peak = largest(most);
    for (; i < V; i++) peak = logits[i] > peak ? logits[i] : peak;
    peak *= scale;
    double total = 0;
    for (long s = 0; s < stretches_of(V); s++) {
        const long end = (s + 1) * STRETCH < V ? (s + 1) * STRETCH : V;
        vec mass[2] = {};
        float rest = 0;
        for (i = s * STRETCH; i + 2 * LANES <= end; i += 2 * LANES)
            for (int half = 0; half < 2; half++) mass[half] += vexp(*(const vec *)(logits + i + half * LANES) * scale - peak);
        for (; i < end; i++) rest += expf(logits[i] * scale - peak);
        total += masses[s] = sum(mass[0] + mass[1]) + rest;
    }
    *peak_out = peak;
    return peak + logf(total);
}

/* logp[n] = l[target] / t - norm, norm[n], entropy[n] = norm - sum p l / t.  logits [N, V]. */
EXPORT void logprobs(const float *logits, const int64_t *targets, float temperature, float *logp, float *norm,
                     float *entropy, long N, long V) {
    const float scale = 1.f / temperature;
#pragma omp parallel for schedule(static)
    for (long n = 0; n < N; n++) {
        const float *row = logits + n * V;
        float peak, masses[stretches_of(V)];
        norm[n] = row_norm(row, V, scale, masses, &peak);
        logp[n] = fmaf(row[targets[n]], scale, -norm[n]);
        vec weighted = {};
        float rest = 0;
        long i = 0;
        for (; i + LANES <= V; i += LANES) {
            vec l = *(const vec *)(row + i) * scale - norm[n];
            weighted += vexp(l) * l;
        }
        for (; i < V; i++) rest += expf(row[i] * scale - norm[n]) * (row[i] * scale - norm[n]);
        entropy[n] = -(sum(weighted) + rest);
    }
}

/* Gradient of sum(grad_logp logp + grad_entropy entropy) by the logits of the words from `first` on:
   (grad_logp (onehot - p) - grad_entropy p (log p + entropy)) / t.  Words are rows: logits [W, N] -> grad [W, width],
   zeros behind column N; products with it then need no transposition. */
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

/* One token a row by inverting the cumulative distribution at uniforms[b], and its log-prob. Temperature 0: the first of
   the likeliest, with the log-prob at temperature 1. logits [B, V]; -inf is never chosen. */
EXPORT void sample(const float *logits, const float *temperatures, const float *uniforms, int64_t *tokens, float *logp,
                   long B, long V) {
#pragma omp parallel for schedule(static)
    for (long b = 0; b < B; b++) {
        const float *row = logits + b * V, scale = temperatures[b] > 0 ? 1.f / temperatures[b] : 1.f;
        const long stretches = stretches_of(V);
        float peak, masses[stretches];
        const float norm = row_norm(row, V, scale, masses, &peak);
        long chosen = 0;
        if (temperatures[b] > 0) {
            double total = 0, before = 0;
            for (long s = 0; s < stretches; s++) total += masses[s];
            const double point = uniforms[b] * total;
            long s = 0;
            while (s + 1 < stretches && before + masses[s] <= point) before += masses[s++];
            while (masses[s] == 0 && s > 0) before -= masses[--s];
            const long end = (s + 1) * STRETCH < V ? (s + 1) * STRETCH : V;
            chosen = -1;
            for (long i = s * STRETCH; i < end; i++) {
                const float e = expf(row[i] * scale - peak);
                if (e > 0) {
                    chosen = i; /* rounding must not lead past the last possible token */
                    before += e;
                    if (before > point) break;
                }
            }
        } else
            for (long i = 1; i < V; i++) chosen = row[i] > row[chosen] ? i : chosen;
        tokens[b] = chosen;
        logp[b] = chosen < 0 ? NAN : fmaf(row[chosen], scale, -norm); /* of logits that are NaN nothing is chosen */
    }
}
