"""Triton kernel of sampling: one program takes a row of logits to its token and log-prob. `birl/engine/sampler.py` and
`truncation.py` say what it computes; this file is imported only where Triton is.

Nothing is sorted. What top-k and top-p keep is the beginning of the ranking of words, so its lowest logit is searched
by bisection, always between logits that occur: each pass counts and weighs what lies above the middle. Sums of a pass
have one order whatever the middle, so that they never grow when it rises. Masses are multiples of the likeliest word's.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def tempered(logits_ptr, at, words, temperature):
    return tl.load(logits_ptr + at, mask=at < words, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def above(logits_ptr, words, temperature, peak, middle, BLOCK: tl.constexpr):
    """Of the words above `middle`: how many, their mass, the lowest; and the highest of the others."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    lowest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, words, BLOCK):
        logit = tempered(logits_ptr, start + tl.arange(0, BLOCK), words, temperature)
        inside = logit > middle
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(logit - peak), 0.0)
        lowest = tl.minimum(lowest, tl.where(inside, logit, float("inf")))
        highest = tl.maximum(highest, tl.where(inside, float("-inf"), logit))
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.min(lowest, axis=0), tl.max(highest, axis=0)


@triton.jit
def least_kept(logits_ptr, words, temperature, peak, low, most, most_mass, BLOCK: tl.constexpr):
    """The lowest logit from `low` on above which fewer than `most` words and less than `most_mass` lie; how many and
    how much do. Where even `low` has no more above it: the highest logit that is not above `low`."""
    high = peak
    count = 0
    mass = 0.0
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)  # they may be neighbours
        count_here, mass_here, lowest, highest = above(logits_ptr, words, temperature, peak, middle, BLOCK)
        keeps = (count_here < most) & (mass_here < most_mass)
        count = tl.where(keeps, count_here, count)
        mass = tl.where(keeps, mass_here, mass)
        low = tl.where(keeps, low, lowest)
        high = tl.where(keeps, highest, high)
    return high, count, mass


@triton.jit
def end_of_ties(logits_ptr, words, temperature, value, ties, BLOCK: tl.constexpr):
    """The place behind the first `ties` words with this logit, or `words`."""
    end = words
    before = 0
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tie = (tempered(logits_ptr, at, words, temperature) == value) & (at < words)
        rank = before + tl.cumsum(tie.to(tl.int32), axis=0)
        end = tl.minimum(end, tl.min(tl.where(tie & (rank == ties), at + 1, words), axis=0))
        before += tl.sum(tie.to(tl.int32), axis=0)
    return end


@triton.jit
def truncated(logits_ptr, words, temperature, peak, top_k, top_p, log_min_p, BLOCK: tl.constexpr):
    """(least, end): words with logits above `least` are kept, and those with this one in front of `end`."""
    least = float("-inf")
    end = words
    if (top_k > 0) | (top_p < 1.0):
        most = tl.where(top_k > 0, tl.minimum(top_k, words), words)
        low = peak - 104.0  # e^-104 is 0 in float32
        ties = words
        if top_k > 0:
            least, count, mass = least_kept(logits_ptr, words, temperature, peak, low, most, float("inf"), BLOCK)
            ties = most - count
            mass += ties * tl.exp(least - peak)
            low = tl.maximum(least, low)
        else:
            count, mass, _, _ = above(logits_ptr, words, temperature, peak, float("-inf"), BLOCK)
        if top_p < 1.0:
            most_mass = top_p * mass
            least, count, mass = least_kept(logits_ptr, words, temperature, peak, low, most, most_mass, BLOCK)
            wanted = tl.ceil((most_mass - mass) / tl.exp(least - peak))
            ties = tl.minimum(wanted, (most - count).to(tl.float32)).to(tl.int32)
        end = end_of_ties(logits_ptr, words, temperature, least, ties, BLOCK)
    if peak + log_min_p > least:
        least = peak + log_min_p
        end = words
    return least, end


@triton.jit
def masses(logits_ptr, at, words, temperature, peak, least, end, LIMITS: tl.constexpr):
    """Of words, 0 of those that are not kept."""
    logit = tempered(logits_ptr, at, words, temperature)
    p = tl.exp(logit - peak)
    if LIMITS:
        p = tl.where((logit > least) | ((logit == least) & (at < end)), p, 0.0)
    return p


@triton.jit
def tell(logits_ptr, kept_ptr, words, room, temperature, peak, least, end, LIMITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write how many words are kept, and which, as far as there is room. In a pass of its own: within another one
    registers spill."""
    count = 0
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = masses(logits_ptr, at, words, temperature, peak, least, end, LIMITS) > 0.0
        place = count + tl.cumsum(inside.to(tl.int32), axis=0)
        tl.store(kept_ptr + place, at, mask=inside & (place <= room))
        count += tl.sum(inside.to(tl.int32), axis=0)
    tl.store(kept_ptr, count)


@triton.jit
def sample_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, limits_ptr, token_ptr, logprob_ptr, kept_ptr, words, room,
    LIMITS: tl.constexpr, GIVEN: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the first word whose cumulative probability exceeds the uniform number, or, at temperature 0, the
    likeliest; and its log-prob. GIVEN: the log-prob of the token that is there. KEPT: how many words are kept, too, and
    which, the first `room` of them."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * words
    asked = tl.load(temperature_ptr + row)
    greedy = asked == 0.0
    temperature = tl.where(greedy, 1.0, asked)
    peak = float("-inf")
    best = 0
    for start in range(0, words, BLOCK):
        logit = tempered(logits_ptr, start + tl.arange(0, BLOCK), words, temperature)
        higher = tl.max(logit, axis=0)
        place = start + tl.argmax(logit, axis=0)
        best = tl.where(higher > peak, place, best)
        peak = tl.maximum(higher, peak)
    least = peak
    end = words
    if LIMITS:
        top_k = tl.load(limits_ptr + 3 * row).to(tl.int32)
        top_p = tl.load(limits_ptr + 3 * row + 1)
        log_min_p = tl.load(limits_ptr + 3 * row + 2)
        least, end = truncated(logits_ptr, words, temperature, peak, top_k, top_p, log_min_p, BLOCK)
    total = 0.0
    last = 0
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = masses(logits_ptr, at, words, temperature, peak, least, end, LIMITS)
        total += tl.sum(p, axis=0)
        last = tl.maximum(last, tl.max(tl.where(p > 0.0, at, 0), axis=0))
    if GIVEN:
        token = tl.load(token_ptr + row).to(tl.int32)
    else:
        point = tl.load(uniform_ptr + row) * total
        before = 0.0
        token = words
        for start in range(0, words, BLOCK):  # block sums once more, in the same order: `before` ends as `total`
            at = start + tl.arange(0, BLOCK)
            p = masses(logits_ptr, at, words, temperature, peak, least, end, LIMITS)
            here = tl.min(tl.where((before + tl.cumsum(p, axis=0) > point) & (p > 0.0), at, words), axis=0)
            token = tl.minimum(token, here)
            before += tl.sum(p, axis=0)
        token = tl.minimum(token, last)  # rounding must not lead past the last possible word
        token = tl.where(greedy, best, token)
        tl.store(token_ptr + row, token.to(tl.int64))
    chosen = tl.load(logits_ptr + token).to(tl.float32) / temperature
    logprob = chosen - peak - tl.log(total)
    if LIMITS:
        logprob = tl.where((chosen > least) | ((chosen == least) & (token < end)), logprob, float("-inf"))
    tl.store(logprob_ptr + row, logprob)
    if KEPT:
        tell(logits_ptr, kept_ptr + row * (room + 1), words, room, temperature, peak, least, end, LIMITS, BLOCK)
