/* Index tensors, read before a kernel follows them: 0, or the number of the rule that they break (__init__.py has the
   words). A few microseconds a call; a wrong index would write into memory that belongs to something else. */
#include "layers.h"

/* Segments of rows 0 to `rows`: within the rows, trees in order, each beginning with its prefix, which its branches see. */
EXPORT long check_segments(const segment *s, long count, long rows) {
    for (long i = 0, stem = 0; i < count; i++) {
        if (s[i].start < 0 || s[i].length < 0 || s[i].start + s[i].length > rows) return 1;
        if (s[i].prefix_start < 0 || s[i].prefix < 0 || s[i].prefix_start + s[i].prefix > rows) return 1;
        if (s[i].tree != (i ? s[i - 1].tree : 0) && (!i || s[i].tree != s[i - 1].tree + 1)) return 2;
        if (i && s[i].start < s[i - 1].start + s[i - 1].length) return 2;
        if (!i || s[i].tree != s[i - 1].tree) stem = i;
        if (i == stem ? s[i].prefix != 0 : s[i].prefix != s[stem].length || s[i].prefix_start != s[stem].start) return 9;
    }
    return 0;
}

/* Rows go to place places[t] of page pages[t]; there are `total` pages. */
EXPORT long check_places(const int32_t *pages, const int32_t *places, long T, long total) {
    for (long t = 0; t < T; t++)
        if (pages[t] < 0 || pages[t] >= total || places[t] < 0 || places[t] >= PAGE) return 3;
    return 0;
}

/* B rows of a table with `width` pages each, in groups. */
EXPORT long check_table(const int32_t *table, long width, long B, const int32_t *lengths, const int32_t *starts,
                        const int32_t *shared, long groups, long total) {
    if (starts[0] != 0 || starts[groups] != B) return 4;
    for (long g = 0; g < groups; g++) {
        if (starts[g + 1] < starts[g] || starts[g + 1] > B) return 4;
        if (shared[g] < 0 || (shared[g] && starts[g + 1] == starts[g])) return 5;
        for (long b = starts[g]; b < starts[g + 1]; b++) {
            if (lengths[b] < 1 || pages_of(lengths[b]) > width) return 6;
            if (shared[g] > pages_of(lengths[b])) return 5;
            for (long page = 0; page < pages_of(lengths[b]); page++)
                if (table[b * width + page] < 0 || table[b * width + page] >= total) return 7;
        }
    }
    return 0;
}

/* Words of a vocabulary. */
EXPORT long check_words(const int64_t *words, long count, long vocabulary) {
    for (long i = 0; i < count; i++)
        if (words[i] < 0 || words[i] >= vocabulary) return 8;
    return 0;
}
