"""Triton kernels of sampling: from a row of logits to its token and log-prob. `birl/engine/sampler.py` and
`truncation.py` define the results; this file is imported only if Triton is installed.

    chunks   reads all logits, once: the highest logit of each chunk of `CHUNK` tokens, and its mass
    bound    with limits: from these alone, which chunks may hold a kept token
    ends     with limits: searches the kept tokens within these chunks; and the chunks' masses of kept tokens
    sample   a chunk by the masses, and a token of it
    tell     which tokens are kept, if requested

Only `chunks` reads all of the vocabulary, in many programs a row; each of the others is one program a row and reads two
numbers a chunk, and a few chunks. Masses are relative to the most likely token's; a chunk's to its own.

Nothing is sorted. Top-k and top-p keep the top of the ranking of tokens, so its lowest logit is found by bisection,
always between logits that occur: each pass counts and weighs the tokens above the middle. The order of summation does
not depend on the middle, so that sums never grow when it rises.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

NEGLIGIBLE = tl.constexpr(104.0)  # e^-104 is 0 in float32
SLACK = tl.constexpr(1e-5)  # exceeds the rounding error of float32 sums over a vocabulary
HALVINGS = tl.constexpr(20)
NOWHERE = tl.constexpr(2**24)  # a chunk after the end of any vocabulary


@triton.jit
def tempered(logits_ptr, at, vocab, temperature):
    return tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def temperature_of(temperature_ptr, row):
    """The temperature of a row, 1 for a greedy one."""
    asked = tl.load(temperature_ptr + row)
    return tl.where(asked == 0.0, 1.0, asked)


@triton.jit
def finite(peak):
    """`peak`, the highest of some logits, or 0 if it is -inf; to subtract from the logits."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def chunks_kernel(
    logits_ptr, temperature_ptr, peaks_ptr, masses_ptr, vocab, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK tokens of a row: the highest logit of each chunk after temperature, and its mass."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    logit = tempered(logits_ptr + row * vocab, at, vocab, temperature_of(temperature_ptr, row))
    peak = tl.max(logit, axis=1)
    mass = tl.sum(tl.exp(logit - finite(peak)[:, None]), axis=1)
    tl.store(peaks_ptr + row * chunks + chunk, peak, mask=chunk < chunks)
    tl.store(masses_ptr + row * chunks + chunk, mass, mask=chunk < chunks)


@triton.jit
def bound_kernel(
    limits_ptr, peaks_ptr, masses_ptr, list_ptr, floats_ptr, counts_ptr, vocab, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`list`: the chunks that may hold a kept token, in ascending order, and `counts` their number; masses of others
    are set to 0. `floats`: the row's highest logit, its mass, and a lower bound of the kept tokens' logits. The list of
    a row without limits is empty."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(limits_ptr + 3 * row).to(tl.int32)
    top_p = tl.load(limits_ptr + 3 * row + 1)
    log_min_p = tl.load(limits_ptr + 3 * row + 2)
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(peaks_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    masses = tl.load(masses_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    peak = tl.max(peaks, axis=0)
    first = tl.exp(peaks - finite(peak))  # mass of each chunk's most likely token
    total = tl.sum(masses * first, axis=0)
    counted = (top_k > 0) & (top_k < vocab)
    weighed = (top_p < 1.0) & (top_k == 0)  # after top-k, top-p is of another mass
    low = peak - NEGLIGIBLE
    if counted | weighed:
        high = peak
        for _ in range(HALVINGS):
            # Lower bounds of the number of tokens and the mass above the middle: a chunk's most likely token, if it is
            # above, or all of the chunk, if each of its other tokens were at the middle.
            middle = low + (high - low) * 0.5
            inside = peaks > middle
            others = (CHUNK - 1) * tl.exp(middle - finite(peak))
            mass = tl.sum(tl.where(inside, tl.maximum(first, masses * first - others), 0.0), axis=0)
            enough = (tl.sum(inside.to(tl.int32), axis=0) >= top_k) | ~counted
            enough = enough & ((mass > top_p * total + SLACK * total) | ~weighed)
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    elif (top_p == 1.0) & (top_k == 0):
        low = peak + log_min_p
    limited = (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf"))
    chosen = (peaks >= low) & (chunk < chunks) & limited
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + row * chunks + place, chunk, mask=chosen)
    tl.store(masses_ptr + row * chunks + chunk, 0.0, mask=limited & ~chosen & (chunk < chunks))
    tl.store(counts_ptr + 2 * row, tl.sum(chosen.to(tl.int32), axis=0))
    tl.store(floats_ptr + 3 * row, peak)
    tl.store(floats_ptr + 3 * row + 1, total)
    tl.store(floats_ptr + 3 * row + 2, low)


@triton.jit
def listed(list_ptr, start, count, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK tokens of the listed chunks, from the list's token `start` on."""
    at = start + tl.arange(0, BLOCK)
    chunk = tl.load(list_ptr + at // CHUNK, mask=at // CHUNK < count, other=NOWHERE)
    return chunk * CHUNK + at % CHUNK


@triton.jit
def above(logits_ptr, list_ptr, count, vocab, temperature, peak, middle, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Number, mass and lowest logit of the listed tokens above `middle`; and the highest logit of the others."""
    number = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    lowest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, count * CHUNK, BLOCK):
        at = listed(list_ptr, start, count, CHUNK, BLOCK)
        logit = tempered(logits_ptr, at, vocab, temperature)
        inside = logit > middle
        number += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(logit - peak), 0.0)
        lowest = tl.minimum(lowest, tl.where(inside, logit, float("inf")))
        highest = tl.maximum(highest, tl.where(inside, float("-inf"), logit))
    return tl.sum(number, axis=0), tl.sum(mass, axis=0), tl.min(lowest, axis=0), tl.max(highest, axis=0)


@triton.jit
def least_kept(
    logits_ptr, list_ptr, count, vocab, temperature, peak, low, most, most_mass,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest logit from `low` on with fewer than `most` tokens and less than `most_mass` above it; their number and
    mass. If even `low` has no more above it: the highest logit that is not above `low`."""
    high = peak
    number = 0
    mass = 0.0
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)  # they may be adjacent floats
        number_here, mass_here, lowest, highest = above(
            logits_ptr, list_ptr, count, vocab, temperature, peak, middle, CHUNK, BLOCK
        )
        keeps = (number_here < most) & (mass_here < most_mass)
        number = tl.where(keeps, number_here, number)
        mass = tl.where(keeps, mass_here, mass)
        low = tl.where(keeps, low, lowest)
        high = tl.where(keeps, highest, high)
    return high, number, mass


@triton.jit
def end_of_ties(logits_ptr, list_ptr, count, vocab, temperature, value, ties, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The index after the first `ties` tokens with this logit, or `vocab`."""
    end = vocab
    before = 0
    for start in range(0, count * CHUNK, BLOCK):
        at = listed(list_ptr, start, count, CHUNK, BLOCK)
        tie = (tempered(logits_ptr, at, vocab, temperature) == value) & (at < vocab)
        rank = before + tl.cumsum(tie.to(tl.int32), axis=0)
        end = tl.minimum(end, tl.min(tl.where(tie & (rank == ties), at + 1, vocab), axis=0))
        before += tl.sum(tie.to(tl.int32), axis=0)
    return end


@triton.jit
def truncated(
    logits_ptr, list_ptr, count, vocab, temperature, peak, total, low, top_k, top_p, log_min_p,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(least, end): tokens with logits above `least` are kept, and those with this logit before `end`."""
    least = float("-inf")
    end = vocab
    if (top_k > 0) | (top_p < 1.0):
        most = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab)
        ties = vocab
        mass = total
        if top_k > 0:
            least, number, mass = least_kept(
                logits_ptr, list_ptr, count, vocab, temperature, peak, low, most, float("inf"), CHUNK, BLOCK
            )
            ties = most - number
            mass += ties * tl.exp(least - peak)
            low = tl.maximum(least, low)
        if top_p < 1.0:
            most_mass = top_p * mass
            least, number, mass = least_kept(
                logits_ptr, list_ptr, count, vocab, temperature, peak, low, most, most_mass, CHUNK, BLOCK
            )
            wanted = tl.ceil((most_mass - mass) / tl.exp(least - peak))
            ties = tl.minimum(wanted, (most - number).to(tl.float32)).to(tl.int32)
        end = end_of_ties(logits_ptr, list_ptr, count, vocab, temperature, least, ties, CHUNK, BLOCK)
    if peak + log_min_p > least:
        least = peak + log_min_p
        end = vocab
    return least, end


@triton.jit
def masses_of(logits_ptr, at, vocab, temperature, peak, least, end, LIMITS: tl.constexpr):
    """Masses of tokens, relative to that with the logit `peak`; 0 if they are not kept."""
    logit = tempered(logits_ptr, at, vocab, temperature)
    p = tl.exp(logit - peak)
    if LIMITS:
        p = tl.where((logit > least) | ((logit == least) & (at < end)), p, 0.0)
    return p


@triton.jit
def ends_kernel(
    logits_ptr, temperature_ptr, limits_ptr, peaks_ptr, masses_ptr, list_ptr, floats_ptr, counts_ptr, vocab, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept tokens of a row, as `truncated`, written to `floats`' third and `counts`' second column; and the masses
    of the kept tokens of its listed chunks."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    peaks_ptr += row * chunks
    masses_ptr += row * chunks
    list_ptr += row * chunks
    temperature = temperature_of(temperature_ptr, row)
    count = tl.load(counts_ptr + 2 * row)
    least = float("-inf")
    end = vocab
    if count > 0:
        least, end = truncated(
            logits_ptr, list_ptr, count, vocab, temperature, tl.load(floats_ptr + 3 * row),
            tl.load(floats_ptr + 3 * row + 1), tl.load(floats_ptr + 3 * row + 2),
            tl.load(limits_ptr + 3 * row).to(tl.int32), tl.load(limits_ptr + 3 * row + 1),
            tl.load(limits_ptr + 3 * row + 2), CHUNK, BLOCK,
        )  # fmt: skip
    for start in range(0, count, BLOCK // CHUNK):
        place = start + tl.arange(0, BLOCK // CHUNK)
        chunk = tl.load(list_ptr + place, mask=place < count, other=NOWHERE)
        peak = tl.load(peaks_ptr + chunk, mask=place < count, other=0.0)
        at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        p = masses_of(logits_ptr, at, vocab, temperature, peak[:, None], least, end, True)
        tl.store(masses_ptr + chunk, tl.sum(p, axis=1), mask=place < count)
    tl.store(floats_ptr + 3 * row + 2, least)
    tl.store(counts_ptr + 2 * row + 1, end)


@triton.jit
def tell_kernel(
    logits_ptr, temperature_ptr, list_ptr, floats_ptr, counts_ptr, kept_ptr, vocab, chunks, room,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the number of kept tokens, and up to `room` of them; for a row without limits `vocab`, and none."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    list_ptr += row * chunks
    kept_ptr += row * (room + 1)
    temperature = temperature_of(temperature_ptr, row)
    peak = tl.load(floats_ptr + 3 * row)
    least = tl.load(floats_ptr + 3 * row + 2)
    count = tl.load(counts_ptr + 2 * row)
    end = tl.load(counts_ptr + 2 * row + 1)
    number = 0
    for start in range(0, count * CHUNK, BLOCK):
        at = listed(list_ptr, start, count, CHUNK, BLOCK)
        inside = masses_of(logits_ptr, at, vocab, temperature, peak, least, end, True) > 0.0
        place = number + tl.cumsum(inside.to(tl.int32), axis=0)
        tl.store(kept_ptr + place, at, mask=inside & (place <= room))
        number += tl.sum(inside.to(tl.int32), axis=0)
    tl.store(kept_ptr, tl.where(count > 0, number, vocab))


@triton.jit
def sample_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, peaks_ptr, masses_ptr, floats_ptr, counts_ptr, token_ptr, logprob_ptr,
    vocab, chunks, LIMITS: tl.constexpr, GIVEN: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One row: the first token whose cumulative probability exceeds the uniform number, or, at temperature 0, the most
    likely; and its log-prob. GIVEN: the log-prob of the given token."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    temperature = temperature_of(temperature_ptr, row)
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(peaks_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    masses = tl.load(masses_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    peak = tl.max(peaks, axis=0)
    masses *= tl.exp(peaks - finite(peak))
    cumulative = tl.cumsum(masses, axis=0)
    total = tl.max(cumulative, axis=0)
    least = float("-inf")
    end = vocab
    if LIMITS:
        least = tl.load(floats_ptr + 3 * row + 2)
        end = tl.load(counts_ptr + 2 * row + 1)
    if GIVEN:
        token = tl.load(token_ptr + row).to(tl.int32)
    else:
        greedy = tl.load(temperature_ptr + row) == 0.0
        point = tl.load(uniform_ptr + row) * total
        here = tl.min(tl.where((cumulative > point) & (masses > 0.0), chunk, CHUNKS), axis=0)
        here = tl.minimum(here, tl.max(tl.where(masses > 0.0, chunk, 0), axis=0))
        before = tl.sum(tl.where(chunk == here, cumulative - masses, 0.0), axis=0)
        best = tl.min(tl.where(peaks == peak, chunk, chunks - 1), axis=0)  # no NaN is the highest
        at = tl.where(greedy, best, here) * CHUNK + tl.arange(0, CHUNK)
        p = masses_of(logits_ptr, at, vocab, temperature, peak, least, end, LIMITS)
        token = tl.min(tl.where((before + tl.cumsum(p, axis=0) > point) & (p > 0.0), at, vocab - 1), axis=0)
        last = tl.max(tl.where(p > 0.0, at, 0), axis=0)  # rounding must not select past the last possible token
        best = tl.min(tl.where(tempered(logits_ptr, at, vocab, temperature) == peak, at, vocab - 1), axis=0)
        token = tl.where(greedy, best, tl.minimum(token, last))
        tl.store(token_ptr + row, token.to(tl.int64))
    chosen = tl.load(logits_ptr + token).to(tl.float32) / temperature
    logprob = chosen - peak - tl.log(total)
    if LIMITS:
        logprob = tl.where((chosen > least) | ((chosen == least) & (token < end)), logprob, float("-inf"))
    tl.store(logprob_ptr + row, logprob)
