/* The distribution over the vocabulary, for logits in memory (vocabulary.c) and for logits that are computed a stretch
   at a time (gemm_vocabulary.c). Sums are over cells, in stretches with a peak each: so a stretch can be dropped before
   the next is computed. Functions of one file, not inlined, for the engine and the learner: the same order of
   summation, the same roundings. */
#pragma once
#include "common.h"

#define CELL 64 /* tokens */
#define CELLS 16
#define STRETCH (CELLS * CELL)

static inline long cells_of(long V) { return (V + CELL - 1) / CELL; }
static inline long stretches_of(long V) { return (V + STRETCH - 1) / STRETCH; }

/* One stretch of a row of logits: its largest, times scale, and for each cell the sum of e^d, d = scale l - that.
   `tilt` (may be NULL) is the sum of d e^d over all of it. */
void weigh(const float *logits, long count, float scale, float *peak, float *masses, float *tilt);

/* From all stretches of a row: masses become sums of e^(scale l - peak), peak that of the row. Returns log sum e^(scale l). */
float combine(const float *peaks, float *masses, long V, float *peak);

/* -sum p log p, after `combine`. */
float entropy_of(const float *peaks, const float *masses, const float *tilts, long V, float peak);

/* Logits of the `count` tokens of cell c of a row: in memory, or recomputed by `from`. */
typedef const float *(*cell_of)(void *from, long c, long count);

/* Sample one token of a row after `weigh`, by inverting the cumulative distribution at `uniform`; at temperature 0 the
   first of the most likely. Returns its log-prob, or NAN, and -1 for the token, if the logits are not numbers. */
float draw(float *peaks, float *masses, long V, float temperature, float uniform, cell_of cell, void *from, int64_t *token);

static inline float scale_of(float temperature) { return temperature > 0 ? 1.f / temperature : 1.f; }
