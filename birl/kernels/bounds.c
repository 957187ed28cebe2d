/* Check index tensors before a kernel uses them: 0, or the number of the rule that they break (the messages are in
   tensors.py). A few microseconds a call; a wrong index would write to memory out of bounds. */
#include "layers.h"

/* Segments of rows 0 to `rows`, nodes of trees in pre-order: each is after the previous one, and continues at its
   parent's end; the parent is the previous one or an ancestor of that. */
EXPORT long check_segments(const segment *s, long count, long rows) {
    for (long i = 0; i < count; i++) {
        const long root = !i || s[i].tree != s[i - 1].tree, parent = s[i].parent;
        if (s[i].start < 0 || s[i].length < 0 || s[i].start + s[i].length > rows) return 1;
        if (s[i].tree != (i ? s[i - 1].tree : 0) && (!i || s[i].tree != s[i - 1].tree + 1)) return 2;
        if (i && (root ? s[i].start < s[i - 1].start + s[i - 1].length : s[i].start != s[i - 1].start + s[i - 1].length)) return 2;
        if (root ? parent != -1 || s[i].prefix != 0 : parent < 0 || parent >= i) return 9;
        if (root) continue;
        long above = i - 1;
        while (above > parent) above = s[above].parent;
        if (above != parent || s[i].prefix != s[parent].prefix + s[parent].length) return 9;
    }
    return 0;
}

/* Rows are written to position places[t] of page pages[t]; there are `total` pages. */
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

/* Tokens of a vocabulary. */
EXPORT long check_tokens(const int64_t *tokens, long count, long vocabulary) {
    for (long i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= vocabulary) return 8;
    return 0;
}
