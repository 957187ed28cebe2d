/* All layers of a decoder in one call: with a few dozen rows, calling from Python would cost as much as the products. */
#include "layers.h"

typedef struct { /* of one layer; packed weights as for gemm.c, biases may be NULL */
    const elem *norm1, *qkv, *qkv_bias, *output, *norm2, *gate_up, *down; /* halves of gate_up alternate */
    elem *keys, *values; /* its cache */
} layer;

/* x [T, H] float32 goes through `count` layers in place. `room` has T (2 H' + qkv + I) elements, H' the larger of H and
   the queries' width. `apart`: every row is of a different sequence, so none reads what another one writes. `codes`:
   CODES if the weights are in int8, else 0. */
EXPORT void paged_stack(const layer *layers, long count, float *x, const float *cosine, const float *sine,
                        const int32_t *pages, const int32_t *places, const int32_t *table, long table_width,
                        const int32_t *lengths, const int32_t *starts, const int32_t *shared, long groups, int apart,
                        int codes, elem *room, long T, long H, long I, long heads, long kv_heads, float eps, float scale) {
    const long width = heads * HEAD_DIM, stride = (heads + 2 * kv_heads) * HEAD_DIM, wide = H > width ? H : width;
    elem *h = room, *attended = h + T * wide, *qkv = attended + T * wide, *inner = qkv + T * stride;
#pragma omp parallel
    {
        for (const layer *l = layers; l < layers + count; l++) open_pages(l->values, pages, places, T, kv_heads);
        for (const layer *l = layers; l < layers + count; l++) {
            rms_norm_part(x, l->norm1, h, NULL, T, H, eps);
            gemm_part(h, H, l->qkv, l->qkv_bias, qkv, stride, T, stride, H, ROUND | codes);
            rotary_part(qkv, cosine, sine, T, heads + kv_heads, stride, 1.f);
            const elem *key = qkv + width, *value = key + kv_heads * HEAD_DIM;
            if (!apart) cache_write_part(key, value, stride, l->keys, l->values, pages, places, T, kv_heads);
            paged_attention_part(qkv, apart ? key : NULL, stride, attended, l->keys, l->values, table, table_width, lengths,
                                 starts, shared, groups, heads, kv_heads, scale, 0);
            gemm_part(attended, width, l->output, NULL, x, H, T, H, width, ADD | codes);
            rms_norm_part(x, l->norm2, h, NULL, T, H, eps);
            gemm_part(h, H, l->gate_up, NULL, inner, I, T, 2 * I, H, SWIGLU | codes);
            gemm_part(inner, I, l->down, NULL, x, H, T, H, I, ADD | codes);
        }
    }
}
