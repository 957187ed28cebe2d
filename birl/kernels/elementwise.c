/* Norms, rotary positions, SwiGLU: one pass over memory each, rows divided among threads (layers.h: `_part`). */
#include "layers.h"

/* h = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps).  x [T, H] float32, h [T, H], rstd [T] (may be NULL). */
void rms_norm_part(const float *x, const elem *weight, elem *h, float *rstd, long T, long H, float eps) {
#pragma omp for schedule(static)
    for (long t = 0; t < T; t++) {
        const float *row = x + t * H;
        vec squares = {};
        for (long i = 0; i < H; i += LANES) {
            vec v = *(const vec *)(row + i);
            squares += v * v;
        }
        float scale = 1.f / sqrtf(sum(squares) / H + eps);
        if (rstd) rstd[t] = scale;
        for (long i = 0; i < H; i += LANES) store(h + t * H + i, *(const vec *)(row + i) * scale * load(weight + i));
    }
}

EXPORT void rms_norm(const float *x, const elem *weight, elem *h, float *rstd, long T, long H, float eps) {
#pragma omp parallel
    rms_norm_part(x, weight, h, rstd, T, H, eps);
}

/* Number of rows of `grad_weight` in the next function. */
EXPORT long team_size(void) { return omp_get_max_threads(); }

/* grad_x += d norm / d x (grad_h), grad_weight [threads, H] += this thread's part; `rounded` (may be NULL) is the new
   grad_x as elem.  grad_x = rstd (g - x rstd^2 mean(g x)), g = grad_h weight. */
EXPORT void rms_norm_backward(const float *x, const elem *weight, const float *rstd, const elem *grad_h, float *grad_x,
                              elem *rounded, float *grad_weight, long T, long H) {
#pragma omp parallel
    {
        float *mine = grad_weight + omp_get_thread_num() * H;
#pragma omp for schedule(static)
        for (long t = 0; t < T; t++) {
            const float *row = x + t * H;
            const elem *grad = grad_h + t * H;
            float r = rstd[t];
            vec products = {};
            for (long i = 0; i < H; i += LANES) products += load(grad + i) * load(weight + i) * *(const vec *)(row + i);
            float mean = sum(products) / H * r * r;
            for (long i = 0; i < H; i += LANES) {
                vec v = *(const vec *)(row + i), g = load(grad + i);
                vec *out = (vec *)(grad_x + t * H + i);
                *out += (g * load(weight + i) - v * mean) * r;
                if (rounded) store(rounded + t * H + i, *out);
                *(vec *)(mine + i) += g * v * r;
            }
        }
    }
}

/* Rotate the first `heads` heads of each row [T, stride] in place; cos and sin [T, HEAD_DIM / 2]. direction -1 is the
   inverse, which is the gradient. */
void rotary_part(elem *rows, const float *cosine, const float *sine, long T, long heads, long stride, float direction) {
    const long half = HEAD_DIM / 2;
#pragma omp for schedule(static)
    for (long t = 0; t < T; t++)
        for (long h = 0; h < heads; h++) {
            elem *head = rows + t * stride + h * HEAD_DIM;
            for (long i = 0; i < half; i += LANES) {
                vec c = *(const vec *)(cosine + t * half + i), s = *(const vec *)(sine + t * half + i) * direction;
                vec a = load(head + i), b = load(head + half + i);
                store(head + i, a * c - b * s);
                store(head + half + i, b * c + a * s);
            }
        }
}

EXPORT void rotary(elem *rows, const float *cosine, const float *sine, long T, long heads, long stride,
                   float direction) {
#pragma omp parallel
    rotary_part(rows, cosine, sine, T, heads, stride, direction);
}

/* y = silu(gate) * up.  gate_up [T, 2 I], y [T, I]. */
EXPORT void swiglu(const elem *gate_up, elem *y, long T, long I) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < T; t++)
        for (long i = 0; i < I; i += LANES) {
            vec g = load(gate_up + t * 2 * I + i), u = load(gate_up + t * 2 * I + I + i);
            store(y + t * I + i, swish(g, u));
        }
}

/* gate_up is overwritten by its gradient, and y (the forward result) is recomputed. */
EXPORT void swiglu_backward(elem *gate_up, const elem *grad_y, elem *y, long T, long I) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < T; t++)
        for (long i = 0; i < I; i += LANES) {
            elem *gate = gate_up + t * 2 * I + i, *up = gate + I;
            vec g = load(gate), u = load(up), d = load(grad_y + t * I + i);
            vec s = sigmoid(g);
            store(y + t * I + i, g * s * u);
            store(up, d * g * s);
            store(gate, d * u * s * (1.f + g * (1.f - s)));
        }
}
