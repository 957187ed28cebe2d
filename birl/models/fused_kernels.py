"""Triton kernels of the CUDA path: norms, rotary embedding, SwiGLU, log-probs. `fused.py` defines each in plain
PyTorch; this file is imported only if Triton is installed.

Each rounds to the element dtype where transformers' modules do, so that both give the same numbers up to the order of
sums. Rows are contiguous; offsets of rows are 64-bit, because [tokens, vocabulary] exceeds 2^31.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def add_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, y_ptr, rstd_ptr, size, eps,
    ADD: tl.constexpr, WIDE: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: sum = x + delta, y = weight * sum / rms(sum). WIDE: rounded once; ONE: factor 1 + weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + row * size + at, mask=inside, other=0.0)
    kind = x.dtype
    if ADD:
        delta = tl.load(delta_ptr + row * size + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(kind)
        tl.store(sum_ptr + row * size + at, x, mask=inside)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ONE:
        weight += 1.0
    normed = x * rstd
    if not WIDE:
        normed = normed.to(kind).to(tl.float32)
    tl.store(y_ptr + row * size + at, (normed * weight).to(kind), mask=inside)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def norm_backward_kernel(
    x_ptr, weight_ptr, rstd_ptr, grad_y_ptr, grad_sum_ptr, grad_x_ptr, part_ptr, rows, size, step,
    ADD: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + step, ...: grad_x, and this program's partial sum [size] of the weight's gradient."""
    pid = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    part = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, rows, step):
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if ONE:
            weight += 1.0
        x = tl.load(x_ptr + row * size + at, mask=inside, other=0.0)
        grad = tl.load(grad_y_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = x.to(tl.float32) * rstd
        part += grad * normed
        grad = grad * weight
        grad_x = rstd * (grad - normed * (tl.sum(grad * normed, axis=0) / size))
        if ADD:
            grad_x += tl.load(grad_sum_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + row * size + at, grad_x.to(x.dtype), mask=inside)
    tl.store(part_ptr + pid * size + at, part, mask=inside)


@triton.jit
def rotary_kernel(
    source_ptr, target_ptr, cosine_ptr, sine_ptr, rotated, heads, sign,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, REST: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One row of `heads` heads: the first 2 HALF elements of the first `rotated` heads are rotated by sign * angle, the
    rest copied. PAIRS: adjacent elements are rotated together, else i and i + HALF."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (i < HALF)
    start = row * heads * SIZE + head * SIZE
    one = start + (2 * i if PAIRS else i)
    two = one + (1 if PAIRS else HALF)
    a = tl.load(source_ptr + one, mask=inside, other=0.0)
    b = tl.load(source_ptr + two, mask=inside, other=0.0)
    kind = a.dtype
    cosine = tl.load(cosine_ptr + row * HALF + i, mask=i < HALF, other=0.0)
    step = cosine.dtype  # dtype that products are rounded to: the heads' own, or float32
    cosine = cosine.to(tl.float32)
    sine = tl.load(sine_ptr + row * HALF + i, mask=i < HALF, other=0.0).to(tl.float32) * sign
    a32, b32 = a.to(tl.float32), b.to(tl.float32)
    first = (a32 * cosine).to(step).to(tl.float32) - (b32 * sine).to(step).to(tl.float32)
    second = (b32 * cosine).to(step).to(tl.float32) + (a32 * sine).to(step).to(tl.float32)
    turned = head < rotated
    tl.store(target_ptr + one, tl.where(turned, first, a32).to(kind), mask=inside)
    tl.store(target_ptr + two, tl.where(turned, second, b32).to(kind), mask=inside)
    if REST:
        j = tl.arange(0, REST)[None, :]
        behind = (head < heads) & (j < SIZE - 2 * HALF)
        rest = tl.load(source_ptr + start + 2 * HALF + j, mask=behind)
        tl.store(target_ptr + start + 2 * HALF + j, rest, mask=behind)


@triton.jit
def turned_with(at, HALF: tl.constexpr):
    """Index of the element that each element of a head is rotated with; its own index if it is not rotated."""
    return tl.where(at < HALF, at + HALF, tl.where(at < 2 * HALF, at - HALF, at))


@triton.jit
def head_scale(query_weight_ptr, key_weight_ptr, at, inside, queries, ONE: tl.constexpr):
    """The norm weights of some heads, [heads, size]."""
    query = tl.load(query_weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(key_weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.where(queries, query, key)
    if ONE:
        scale += 1.0
    return scale


@triton.jit
def heads_kernel(
    source_ptr, target_ptr, query_weight_ptr, key_weight_ptr, cosine_ptr, sine_ptr, heads, kv_heads, eps,
    HALF: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one row: queries and keys are normalised, then rotated; values are copied."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads + 2 * kv_heads) & (at < SIZE)
    start = (row * (heads + 2 * kv_heads) + head) * SIZE
    raw = tl.load(source_ptr + start + at, mask=inside, other=0.0)
    kind = raw.dtype
    other = turned_with(at, HALF)
    x = raw.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1)[:, None] / SIZE + eps)
    y = tl.load(source_ptr + start + other, mask=inside, other=0.0).to(tl.float32) * rstd
    x *= rstd
    if not WIDE:
        x, y = x.to(kind).to(tl.float32), y.to(kind).to(tl.float32)
    x *= head_scale(query_weight_ptr, key_weight_ptr, at, at < SIZE, head < heads, ONE)
    y *= head_scale(query_weight_ptr, key_weight_ptr, other, at < SIZE, head < heads, ONE)
    x, y = x.to(kind).to(tl.float32), y.to(kind).to(tl.float32)
    i = tl.where(at < HALF, at, at - HALF)
    cosine = tl.load(cosine_ptr + row * HALF + i, mask=at < 2 * HALF, other=1.0)
    step = cosine.dtype
    sine = tl.load(sine_ptr + row * HALF + i, mask=at < 2 * HALF, other=0.0).to(tl.float32)
    sine = tl.where(at < HALF, -sine, sine)
    turned = (x * cosine.to(tl.float32)).to(step).to(tl.float32) + (y * sine).to(step).to(tl.float32)
    result = tl.where(at < 2 * HALF, turned, x).to(kind)
    tl.store(target_ptr + start + at, tl.where(head < heads + kv_heads, result, raw), mask=inside)


@triton.jit
def heads_backward_kernel(
    source_ptr, grad_ptr, result_ptr, query_weight_ptr, key_weight_ptr, cosine_ptr, sine_ptr, part_ptr,
    heads, kv_heads, eps, rows, step,
    HALF: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """GROUP heads of the rows pid, pid + step, ...: their gradient, and this program's partial sums [2, SIZE] of both
    weights' gradients."""
    pid, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, at = group * GROUP + tl.arange(0, GROUP)[:, None], tl.arange(0, BLOCK)[None, :]
    every = heads + 2 * kv_heads
    inside = (head < every) & (at < SIZE)
    other = turned_with(at, HALF)
    i = tl.where(at < HALF, at, at - HALF)
    part = tl.zeros([GROUP, BLOCK], dtype=tl.float32)
    for row in range(pid, rows, step):
        start = (row * every + head) * SIZE
        scale = head_scale(query_weight_ptr, key_weight_ptr, at, at < SIZE, head < heads, ONE)
        cosine = tl.load(cosine_ptr + row * HALF + i, mask=at < 2 * HALF, other=1.0)
        rounded = cosine.dtype
        sine = tl.load(sine_ptr + row * HALF + i, mask=at < 2 * HALF, other=0.0).to(tl.float32)
        sine = tl.where(at < HALF, sine, -sine)
        raw = tl.load(grad_ptr + start + at, mask=inside, other=0.0)
        kind = raw.dtype
        grad = (raw.to(tl.float32) * cosine.to(tl.float32)).to(rounded).to(tl.float32)
        with_other = tl.load(grad_ptr + start + other, mask=inside, other=0.0).to(tl.float32) * sine
        grad = (grad + with_other.to(rounded).to(tl.float32)).to(kind).to(tl.float32)
        x = tl.load(source_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1)[:, None] / SIZE + eps)
        x *= rstd
        part += grad * x
        grad *= scale
        grad = rstd * (grad - x * (tl.sum(grad * x, axis=1)[:, None] / SIZE))
        tl.store(result_ptr + start + at, tl.where(head < heads + kv_heads, grad.to(kind), raw), mask=inside)
    place = part_ptr + (pid * tl.num_programs(1) + group) * 2 * SIZE + tl.arange(0, BLOCK)
    keys = (head >= heads) & (head < heads + kv_heads)
    tl.store(place, tl.sum(tl.where(head < heads, part, 0.0), axis=0), mask=tl.arange(0, BLOCK) < SIZE)
    tl.store(place + SIZE, tl.sum(tl.where(keys, part, 0.0), axis=0), mask=tl.arange(0, BLOCK) < SIZE)


@triton.jit
def sum_copies_kernel(copies_ptr, order_ptr, starts_ptr, result_ptr, width, BLOCK: tl.constexpr):
    """A block of one row: the sum of the rows of `copies` from order[starts[row]] to order[starts[row + 1] - 1]."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        copy = tl.load(order_ptr + i)
        total += tl.load(copies_ptr + copy * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(result_ptr + row * width + at, total.to(result_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def activated(g, GELU: tl.constexpr):
    """silu(g), or gelu(g) by tanh; and its derivative."""
    if GELU:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
        slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * g * g)
        value = 0.5 * g * (1.0 + tanh)
        by_g = 0.5 * (1.0 + tanh) + 0.5 * g * (1.0 - tanh * tanh) * slope
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
        value = g / (1.0 + tl.exp(-g))
        by_g = sigmoid * (1.0 + g * (1.0 - sigmoid))
    return value, by_g


@triton.jit
def swiglu_kernel(gate_up_ptr, y_ptr, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """y = silu(gate) * up, or gelu(gate) * up, a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    value = activated(gate.to(tl.float32), GELU)[0].to(gate.dtype).to(tl.float32)
    tl.store(y_ptr + row * inner + at, (value * up).to(gate.dtype), mask=inside)


@triton.jit
def swiglu_backward_kernel(gate_up_ptr, grad_ptr, result_ptr, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * inner + at, mask=inside, other=0.0).to(tl.float32)
    value, by_g = activated(gate.to(tl.float32), GELU)
    tl.store(result_ptr + row * 2 * inner + at, (grad * up * by_g).to(gate.dtype), mask=inside)
    tl.store(result_ptr + row * 2 * inner + inner + at, (grad * value).to(gate.dtype), mask=inside)


@triton.jit
def logprob_kernel(logits_ptr, target_ptr, logprob_ptr, entropy_ptr, norm_ptr, vocab, temperature, BLOCK: tl.constexpr):
    """One row of logits: log-sum-exp, entropy and the target's log-prob in one pass."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    best = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocab
        logit = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(best, tl.max(logit, axis=0))
        scale = tl.exp(best - higher)
        p = tl.exp(logit - higher)
        total = total * scale + tl.sum(p, axis=0)
        weighted = weighted * scale + tl.sum(tl.where(inside, p * logit, 0.0), axis=0)
        best = higher
    norm = best + tl.log(total)
    target = tl.load(target_ptr + row)
    chosen = tl.load(logits_ptr + target).to(tl.float32) / temperature
    tl.store(logprob_ptr + row, chosen - norm)
    tl.store(entropy_ptr + row, norm - weighted / total)
    tl.store(norm_ptr + row, norm)


@triton.jit
def logprob_backward_kernel(
    logits_ptr, grad_ptr, target_ptr, norm_ptr, entropy_ptr, by_logp_ptr, by_entropy_ptr, vocab, first, temperature,
    LOGP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Logits of the tokens from `first` on -> their gradient, in grad's dtype; both may be the same memory."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    raw = tl.load(logits_ptr + row * vocab + at, mask=inside, other=0.0)
    logp = raw.to(tl.float32) / temperature - tl.load(norm_ptr + row)
    p = tl.exp(logp)
    grad = tl.zeros([BLOCK], dtype=tl.float32)
    if LOGP:
        hit = (at + first) == tl.load(target_ptr + row)
        grad += (tl.where(hit, 1.0, 0.0) - p) * tl.load(by_logp_ptr + row)
    if ENTROPY:
        grad -= p * (logp + tl.load(entropy_ptr + row)) * tl.load(by_entropy_ptr + row)
    tl.store(grad_ptr + row * vocab + at, (grad / temperature).to(grad_ptr.dtype.element_ty), mask=inside)
