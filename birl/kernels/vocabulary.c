/* From logits to log-probs, samples, and gradients; logits are float32 and need not be kept. */
#include "common.h"

/* log sum exp(l / temperature) over a row; the one order of summation for the engine and the learner. */
static inline float row_norm(const float *logits, long V, float temperature, float *peak_out) {
    vec most = splat(-INFINITY), total = {};
    long i = 0;
    for (; i + LANES <= V; i += LANES) most = larger(*(const vec *)(logits + i), most);
    float peak = largest(most), rest = 0;
    for (long j = i; j < V; j++) peak = logits[j] > peak ? logits[j] : peak;
    peak /= temperature;
    for (long k = 0; k < i; k += LANES) total += vexp(*(const vec *)(logits + k) / temperature - peak);
    for (long j = i; j < V; j++) rest += expf(logits[j] / temperature - peak);
    *peak_out = peak;
    return peak + logf(sum(total) + rest);
}

/* logp[n] = l[target] / t - norm, norm[n], entropy[n] = norm - sum p l / t.  logits [N, V]. */
EXPORT void logprobs(const float *logits, const int64_t *targets, float temperature, float *logp, float *norm,
                     float *entropy, long N, long V) {
#pragma omp parallel for schedule(static)
    for (long n = 0; n < N; n++) {
        const float *row = logits + n * V;
        float peak;
        norm[n] = row_norm(row, V, temperature, &peak);
        logp[n] = row[targets[n]] / temperature - norm[n];
        vec weighted = {};
        float rest = 0;
        long i = 0;
        for (; i + LANES <= V; i += LANES) {
            vec l = *(const vec *)(row + i) / temperature - norm[n];
            weighted += vexp(l) * l;
        }
        for (; i < V; i++) rest += expf(row[i] / temperature - norm[n]) * (row[i] / temperature - norm[n]);
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
            vec l = *(const vec *)(row + n) / temperature - *(const vec *)(norm + n), factor = {};
            if (grad_logp) factor -= *(const vec *)(grad_logp + n);
            if (grad_entropy) factor -= *(const vec *)(grad_entropy + n) * (l + *(const vec *)(entropy + n));
            store(out + n, vexp(l) * factor * scale);
        }
        for (; n < width; n++) {
            float g = 0;
            if (n < N) {
                const float l = row[n] / temperature - norm[n];
                g = expf(l) * (-(grad_logp ? grad_logp[n] : 0) - (grad_entropy ? grad_entropy[n] * (l + entropy[n]) : 0)) * scale;
            }
            store1(out + n, g);
        }
    }
    for (long n = 0; n < N; n++) {
        const long w = targets[n] - first;
        if (w < 0 || w >= W) continue;
        const float l = logits[w * N + n] / temperature - norm[n], p = expf(l), g = grad_logp ? grad_logp[n] : 0;
        store1(grad + w * width + n, (g - p * (g + (grad_entropy ? grad_entropy[n] * (l + entropy[n]) : 0))) * scale);
    }
}

#define STRETCH 1024

/* One token a row by inverting the cumulative distribution at uniforms[b], and its log-prob. Temperature 0: the first of
   the likeliest, with the log-prob at temperature 1. logits [B, V]; -inf is never chosen. */
EXPORT void sample(const float *logits, const float *temperatures, const float *uniforms, int64_t *tokens, float *logp,
                   long B, long V) {
#pragma omp parallel for schedule(static)
    for (long b = 0; b < B; b++) {
        const float *row = logits + b * V, t = temperatures[b] > 0 ? temperatures[b] : 1.f;
        float peak;
        const float norm = row_norm(row, V, t, &peak);
        long chosen = 0;
        if (temperatures[b] > 0) {
            double total = 0, before = 0;
            const long stretches = (V + STRETCH - 1) / STRETCH;
            float masses[stretches];
            for (long s = 0; s < stretches; s++) {
                const long end = (s + 1) * STRETCH < V ? (s + 1) * STRETCH : V;
                vec mass = {};
                float rest = 0;
                long i = s * STRETCH;
                for (; i + LANES <= end; i += LANES) mass += vexp(*(const vec *)(row + i) / t - peak);
                for (; i < end; i++) rest += expf(row[i] / t - peak);
                total += masses[s] = sum(mass) + rest;
            }
            const double point = uniforms[b] * total;
            long s = 0;
            while (s + 1 < stretches && before + masses[s] <= point) before += masses[s++];
            while (masses[s] == 0 && s > 0) before -= masses[--s];
            const long end = (s + 1) * STRETCH < V ? (s + 1) * STRETCH : V;
            chosen = -1;
            for (long i = s * STRETCH; i < end; i++) {
                const float e = expf(row[i] / t - peak);
                if (e > 0) {
                    chosen = i; /* rounding must not lead past the last possible token */
                    before += e;
                    if (before > point) break;
                }
            }
        } else
            for (long i = 1; i < V; i++) chosen = row[i] > row[chosen] ? i : chosen;
        tokens[b] = chosen;
        logp[b] = row[chosen] / t - norm;
    }
}
