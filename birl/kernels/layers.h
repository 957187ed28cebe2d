/* Shared by the kernels of a layer: sequences, and the functions that gemm_stack.c calls, declared for it and for the
   files that define them. */
#pragma once
#include "common.h"
#include <stdio.h>

#define PAGE 32 /* positions of a tile of keys, or of a cache page */

/* Output of gemm: y is elem; y is float32; y is float32 and added to. For a weight with alternating halves (gemm_pack):
   y is elem, with its halves side by side; or y has half as many columns, silu(first half) * second half. */
enum { ROUND, KEEP, ADD, HALVES, SWIGLU, CODES = 8 }; /* with CODES the weight is in int8 (tile.h) */

/* Consecutive rows that attend to `prefix` rows and, causally, to themselves. */
typedef struct { int64_t start, length, parent, prefix, tree; } segment;

static inline long pages_of(long n) { return (n + PAGE - 1) / PAGE; }

/* Scratch memory of a thread, kept for its next call: concurrent mallocs of threads wait for each other, and one
   attention of a decode step needs 24. Make it `static __thread`. */
typedef struct { void *at; size_t bytes; } scratch;

static const size_t KEPT = 4 << 20; /* larger blocks are freed at once */

static inline void *take(scratch *s, size_t bytes) { /* aligned, and padded for vector reads beyond the end */
    if (bytes <= s->bytes) return s->at;
    free(s->at);
    *s = (scratch){NULL, bytes};
    if (!posix_memalign(&s->at, 64, bytes + 4096)) return s->at;
    fprintf(stderr, "birl: a kernel found no memory for %zu bytes\n", bytes); /* threads of a team cannot raise */
    abort();
}

static inline void give(scratch *s) {
    if (s->bytes <= KEPT) return;
    free(s->at);
    *s = (scratch){};
}

/* A `_part` is called by all threads of a team and does this thread's share; when it returns, all shares are done. */
void rms_norm_part(const float *x, const elem *weight, elem *h, float *rstd, long T, long H, float eps);
void rotary_part(elem *rows, const float *cosine, const float *sine, long T, long heads, long stride, float direction);
void gemm_part(const elem *x, long ldx, const void *packed, const elem *bias, void *y, long ldy, long M, long N,
               long K, int mode);
void gemm_begin(void); /* before the first gemm_alone of a thread */
void gemm_end(void);   /* and after the last */
void gemm_alone(const elem *x, long ldx, const elem *packed, const elem *bias, float *y, long ldy, long M, long N,
                long K); /* all of it by this thread, kept in float32 */
void open_pages(elem *values, const int32_t *pages, const int32_t *places, long T, long kv_heads);
void cache_write_part(const elem *key, const elem *value, long stride, elem *keys, elem *values, const int32_t *pages,
                      const int32_t *places, long T, long kv_heads);
void paged_attention_part(const elem *query, const elem *fresh, long stride, elem *out, elem *keys, elem *values,
                          const int32_t *table, long table_width, const int32_t *lengths, const int32_t *starts,
                          const int32_t *shared, long groups, long heads, long kv_heads, float scale, long window);
