/* The distribution over the vocabulary, for logits that lie in memory (vocabulary.c) and for those that are never all
   there (gemm_vocabulary.c). Sums are over cells, in stretches that have a peak of their own: so a stretch can be
   forgotten before the next is computed. Functions of one file, not inlined, for the engine and the learner: the same
   order of summation, the same roundings. */
#pragma once
#include "common.h"

#define CELL 64 /* words */
#define CELLS 16
#define STRETCH (CELLS * CELL)

static inline long cells_of(long V) { return (V + CELL - 1) / CELL; }
static inline long stretches_of(long V) { return (V + STRETCH - 1) / STRETCH; }

void weigh(const float *logits, long count, float scale, float *peak, float *masses);

/* From all stretches of a row: masses become sums of e^(scale l - peak), peak that of the row. Returns log sum e^(scale l). */
float combine(const float *peaks, float *masses, long V, float *peak);

/* The cell where the cumulative distribution passes uniform; the mass before it, and the mass to pass. */
long cell_at(const float *masses, long V, float uniform, double *before, double *point);

/* And the word in it; -1 where none is possible. */
long word_at(const float *cell, long count, float scale, float peak, double before, double point);
