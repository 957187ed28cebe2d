"""CPU kernels, in C: compiled on first use, and cached.

PyTorch's operators for a decoder layer cost more than its matrix products if there are only a few dozen rows, and none
guarantees bit-identical results for a row in another batch. These do (see `common.h`), and the engine and the learner
both use them. If there is no C compiler, or they do not support the model's shape, PyTorch's operators are used.

    kernels = birl.kernels.load(torch.bfloat16, head_dim=64)     # None if they are not available; why: `problem()`

All tensors are contiguous unless a stride is passed. Each method checks dtypes, shapes and indexes once a call, before
its kernel runs, and raises `BirlError` for arguments that would let the kernel access memory out of bounds. T rows, H
hidden size, I inner size, D head size, V vocabulary.
"""

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from birl.kernels.compiling import build, problem
from birl.kernels.instructions import marches
from birl.kernels.tensors import (
    BLOCK,
    CELL,
    LANES,
    PANEL,
    STRETCH,
    Checks,
    PackedWeight,
    coded_size,
    declare,
    expect,
    multiple,
    packed_size,
    require,
)

ROUND, KEEP, ADD, HALVES, SWIGLU = 0, 1, 2, 3, 4  # how gemm writes its float32 sums (layers.h)


class Kernels(Checks):
    """The functions of one compiled library. `dtype`: of weights and activations."""

    def __init__(self, lib: ctypes.CDLL, dtype: torch.dtype, head_dim: int) -> None:
        self.lib, self.dtype, self.head_dim = lib, dtype, head_dim
        declare(lib)
        self.isa = ""
        if dtype == torch.bfloat16:
            lib.gemm_start.restype = ctypes.c_char_p
            self.isa = (lib.gemm_start() or b"").decode()
            if not self.isa:
                raise OSError("the kernel does not grant AMX")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, rstd: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight: x [T, H] float32 -> [T, H]; `rstd` [T] receives the first factor."""
        self._norm(x, weight, rstd)
        h = torch.empty(x.shape, dtype=self.dtype)
        self.lib.rms_norm(x, weight, h, rstd, x.shape[0], x.shape[1], eps)
        return h

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, rstd: Tensor, grad_h: Tensor, grad_x: Tensor, rounded: Tensor | None = None
    ) -> Tensor:
        """Add the norm's gradient to grad_x [T, H] float32, and return the weight's; `rounded` receives the new grad_x
        in the kernels' dtype."""
        self._norm(x, weight, rstd)
        expect(grad_h, self.dtype, *x.shape)
        expect(grad_x, torch.float32, *x.shape)
        if rounded is not None:
            expect(rounded, self.dtype, *x.shape)
        parts = torch.zeros(self.lib.team_size(), x.shape[1], dtype=torch.float32)
        self.lib.rms_norm_backward(x, weight, rstd, grad_h, grad_x, rounded, parts, x.shape[0], x.shape[1])
        return parts.sum(0)

    def rotary(self, rows: Tensor, heads: int, cosine: Tensor, sine: Tensor, inverse: bool = False) -> None:
        """Rotate the first heads of each row [T, ...] in place. cosine, sine [T, D / 2] float32."""
        expect(rows, self.dtype, len(rows), rows.shape[-1], apart=True)
        self._angles(cosine, sine, len(rows))
        require(0 <= heads * self.head_dim <= rows.shape[1], f"{heads} heads in rows of {rows.shape[1]}")
        direction = -1.0 if inverse else 1.0
        self.lib.rotary(rows, cosine, sine, rows.shape[0], heads, rows.stride(0), direction)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [T, 2 I] -> [T, I]."""
        rows, width = gate_up.shape
        expect(gate_up, self.dtype, rows, width)
        multiple(width, 2 * LANES)
        y = torch.empty(rows, width // 2, dtype=self.dtype)
        self.lib.swiglu(gate_up, y, rows, width // 2)
        return y

    def swiglu_backward(self, gate_up: Tensor, grad_y: Tensor) -> Tensor:
        """gate_up is overwritten by its gradient. Returns the recomputed forward result."""
        rows, width = grad_y.shape
        expect(grad_y, self.dtype, rows, width)
        expect(gate_up, self.dtype, rows, 2 * width)
        multiple(width, LANES)
        y = torch.empty_like(grad_y)
        self.lib.swiglu_backward(gate_up, grad_y, y, *grad_y.shape)
        return y

    def pack(
        self,
        weights: Sequence[Tensor],
        transposed: bool = False,
        into: PackedWeight | None = None,
        halves: bool = False,
    ) -> PackedWeight:
        """Weights [N_i, K], concatenated along N, packed for products with their transpose; `transposed`: with
        themselves. `into`: an earlier result of the same shape, whose memory is reused. `halves` is for two weights of
        16 n rows (gemm.c)."""
        sizes = [w.shape[0] for w in weights]
        inner = weights[0].shape[1]
        for weight in weights:
            expect(weight, self.dtype, len(weight), inner)
        multiple(inner if transposed else 0, PANEL)
        for n in sizes if halves else sizes[:-1]:
            multiple(n, BLOCK if transposed else PANEL)
        require(
            not halves or (not transposed and len(sizes) == 2 and sizes[0] == sizes[1]), "halves that are not alike"
        )
        rows, columns = (inner, sum(sizes)) if transposed else (sum(sizes), inner)
        size = packed_size(rows, columns)
        data = torch.empty(size, dtype=self.dtype) if into is None else into.data
        expect(data, self.dtype, size)
        done = 0
        for weight, size in zip(weights, sizes, strict=True):
            self.lib.gemm_pack(weight, data, size, inner, done, columns, int(transposed), 2 if halves else 1)
            done += PANEL if halves else size
        return PackedWeight(data, rows, columns, halves)

    def encode(self, weights: Sequence[Tensor], into: PackedWeight | None = None, halves: bool = False) -> PackedWeight:
        """`pack` in int8, of weights [N_i, K] with N_i a multiple of 16 and K of 32, as `quantized.rounded` returns
        them. Products have the same bits as with those weights in bfloat16."""
        inner = weights[0].shape[1]
        multiple(inner, BLOCK)
        for weight in weights:
            expect(weight, torch.bfloat16, len(weight), inner)
            multiple(len(weight), PANEL)
        rows = sum(map(len, weights))
        require(not halves or [2 * len(w) for w in weights] == [rows, rows], "halves that are not alike")
        data = torch.empty(coded_size(rows, inner), dtype=torch.int8) if into is None else into.data
        expect(data, torch.int8, coded_size(rows, inner))
        done = 0
        for weight in weights:
            self.lib.gemm_encode(weight, data, len(weight), inner, done, 2 if halves else 1)
            done += PANEL if halves else len(weight)
        return PackedWeight(data, rows, inner, halves)

    def outer(self, grad: Tensor, x: PackedWeight, into: Tensor, add: bool) -> None:
        """into [N, K] float32 (+)= grad' x, the gradient of a weight: grad [T, N] with any row stride, x [T, K] packed
        transposed."""
        expect(grad, self.dtype, x.columns, len(into), apart=True)
        expect(into, torch.float32, len(into), x.rows, apart=True)
        expect(x.data, self.dtype, packed_size(x.rows, x.columns))
        multiple(len(into), PANEL)
        multiple(x.rows, PANEL)
        mode = ADD if add else KEEP
        self.lib.gemm_outer(
            grad, grad.stride(0), x.data, into, into.stride(0), grad.shape[1], x.rows, grad.shape[0], mode
        )

    def gemm(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
        """x W' + bias: [T, K] -> [T, N], or added to `add_to` [T, N] float32. x may have any row stride."""
        require(not weight.halves or (bias is None and add_to is None), "halves and a bias, or a sum")
        mode = ADD if add_to is not None else HALVES if weight.halves else ROUND
        y = torch.empty(x.shape[0], weight.rows, dtype=self.dtype) if add_to is None else add_to
        self._gemm(x, weight, bias, y, mode)
        return y

    def gemm_float(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """`gemm` without rounding: [T, N] float32, written to `into` if given."""
        y = torch.empty(x.shape[0], weight.rows, dtype=torch.float32) if into is None else into
        self._gemm(x, weight, bias, y, KEEP)
        return y

    def _gemm(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, y: Tensor, mode: int) -> None:
        expect(x, self.dtype, len(x), weight.columns, apart=True)
        width = weight.rows // 2 if mode == SWIGLU else weight.rows
        expect(y, torch.float32 if mode in (KEEP, ADD) else self.dtype, len(x), width, apart=True)
        self._product(weight, bias, codes=True)
        self.lib.gemm(
            x, x.stride(0), weight.data, bias, y, y.stride(0), x.shape[0], weight.rows, x.shape[1], mode | weight.codes
        )

    def tree_attention(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Attention within packed trees: query [T, heads, D], key and value [T, kv_heads, D], all with the same row
        stride -> out [T, heads * D], log-sum-exp [T, heads] float32. `segments`: see `birl.models.attention`."""
        rows, heads, _ = query.shape
        self._heads(query, key, value)
        self._groups(heads, key.shape[1], value.shape[1], window)
        self._segments(segments, rows)
        out = torch.empty(rows, heads * self.head_dim, dtype=self.dtype)
        lse = torch.empty(rows, heads, dtype=torch.float32)
        self.lib.tree_attention(
            query, key, value, query.stride(0), out, lse, segments, len(segments), heads, key.shape[1], scale, window
        )
        return out, lse

    def tree_attention_backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
        segments: Tensor,
        scale: float,
        window: int = 0,
    ) -> None:
        """Write the gradients of query, key and value into `grads`, which have their shapes and strides."""
        self._heads(query, key, value)
        self._heads(*grads, like=query)
        rows, heads, _ = query.shape
        self._groups(heads, key.shape[1], value.shape[1], window)
        shapes = [x.shape for x in grads]
        require(shapes == [query.shape, key.shape, value.shape], f"gradients of the shapes {[list(s) for s in shapes]}")
        for each in (out, grad_out):
            expect(each, self.dtype, rows, heads * self.head_dim)
        expect(lse, torch.float32, rows, heads)
        self._segments(segments, rows)
        self.lib.tree_attention_backward(
            *(query, key, value, query.stride(0), out, lse, grad_out, *grads, segments, len(segments), query.shape[1]),
            *(key.shape[1], scale, window),
        )

    def cache_write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, pages: Tensor, places: Tensor):
        """Write rows of key and value [T, kv_heads, D] to place places[t] of page pages[t] (int32)."""
        self._heads(key, value)
        self._groups(key.shape[1], key.shape[1], value.shape[1])
        self.check_pages(keys, values, key.shape[1])
        self._places(pages, places, key.shape[0], keys.shape[0])
        self.lib.cache_write(key, value, key.stride(0), keys, values, pages, places, key.shape[0], key.shape[1])

    def paged_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        lengths: Tensor,
        starts: Tensor,
        shared: Tensor,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """One query row [B, heads, D] for each of B sequences in the cache -> [B, heads * D]. All index tensors int32:
        table [B, pages], lengths [B]; rows starts[g]..starts[g + 1] have their first shared[g] pages in common."""
        rows, heads, _ = query.shape
        self._heads(query)
        self.check_pages(keys, values)
        self._groups(heads, keys.shape[1], values.shape[1], window)
        self._table((table, lengths, starts, shared), rows, keys.shape[0])
        out = torch.empty(rows, heads * self.head_dim, dtype=self.dtype)
        self.lib.paged_attention(
            *(query, query.stride(0), out, keys, values, table, table.shape[1], lengths, starts, shared, len(shared)),
            *(heads, keys.shape[1], scale, window),
        )
        return out

    def paged_stack(
        self,
        layers: Tensor,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        where: Sequence[Tensor],
        apart: bool,
        codes: int,
        sizes: tuple[int, int, int, int],
        total: int,
        eps: float,
        scale: float,
    ) -> None:
        """All layers in one call: x [T, H] float32 in place. `layers` [layers, 9] int64 addresses (gemm_stack.c),
        `where` the tensors of `Paged` (pages, places, table, lengths, starts, shared), `sizes` H, I, heads, kv_heads,
        `total` the number of pages in the cache. `apart`: every row belongs to a different sequence. `codes`: `CODES`
        if all weights are in int8, else 0.
        """
        hidden, inner, heads, kv_heads = sizes
        wide = max(hidden, heads * self.head_dim)
        per_row = 2 * wide + (heads + 2 * kv_heads) * self.head_dim + inner
        scratch = torch.empty(len(x) * per_row, dtype=self.dtype)
        pages, places, table, lengths, starts, shared = where
        expect(layers, torch.int64, len(layers), 9)
        expect(x, torch.float32, len(x), hidden)
        self._groups(heads, kv_heads, kv_heads)
        multiple(hidden, BLOCK)
        multiple(inner, BLOCK)
        self._angles(cosine, sine, len(x))
        self._places(pages, places, len(x), total)
        self._table((table, lengths, starts, shared), len(x), total)
        self.lib.paged_stack(
            *(layers, len(layers), x, cosine, sine, pages, places, table, table.shape[1], lengths, starts, shared),
            *(len(shared), int(apart), codes, scratch, len(x), *sizes, eps, scale),
        )

    def logprobs(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """logits [N, V] float32 -> log softmax(logits / temperature)[target], log-normaliser, entropy, each [N]."""
        expect(logits, torch.float32, *logits.shape[:2])
        self._tokens(targets, *logits.shape)
        logp, norm, entropy = torch.empty(3, len(logits), dtype=torch.float32).unbind()
        self.lib.logprobs(logits, targets, temperature, logp, norm, entropy, *logits.shape)
        return logp, norm, entropy

    def head_logprobs(
        self, hidden: Tensor, head: PackedWeight, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`logprobs` of the logits hidden W' + bias, hidden [N, K], which are never all in memory. Bit-identical."""
        rows, vocabulary = len(hidden), head.rows
        expect(hidden, self.dtype, rows, head.columns, apart=True)
        self._product(head, bias)
        self._tokens(targets, rows, vocabulary)
        logp, norm, entropy = torch.empty(3, rows, dtype=torch.float32).unbind()
        masses, (peaks, tilts) = _sums(rows, vocabulary)
        self.lib.head_logprobs(
            *(hidden, hidden.stride(0), head.data, bias, targets, temperature, logp, norm, entropy, peaks, masses),
            *(tilts, rows, vocabulary, head.columns),
        )
        return logp, norm, entropy

    def logprobs_backward(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        norm: Tensor,
        entropy: Tensor,
        grad_logp: Tensor | None,
        grad_entropy: Tensor | None,
        first: int,
    ) -> Tensor:
        """Gradient of the logits of the tokens first, first + 1, ...: tokens are rows, [V, N] -> [V, N] in the kernels'
        dtype, N padded to 32 with zeros."""
        vocabulary, count = logits.shape
        expect(logits, torch.float32, vocabulary, count)
        expect(targets, torch.int64, count)
        for each in (norm, entropy, grad_logp, grad_entropy):
            if each is not None:
                expect(each, torch.float32, count)
        grad = torch.empty(vocabulary, -(-count // 32) * 32, dtype=self.dtype)
        self.lib.logprobs_backward(
            *(logits, targets, temperature, norm, entropy, grad_logp, grad_entropy, grad, first, vocabulary, count),
            grad.shape[1],
        )
        return grad

    def sample(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """logits [B, V] float32 -> tokens [B], and their log-probs [B] under softmax(logits / temperature)."""
        expect(logits, torch.float32, *logits.shape[:2])
        self._draws(temperatures, uniforms, len(logits))
        tokens, logp = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.float32)
        self.lib.sample(logits, temperatures, uniforms, tokens, logp, *logits.shape)
        return tokens, logp

    def head_sample(
        self, hidden: Tensor, head: PackedWeight, bias: Tensor | None, temperatures: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`sample` from the logits hidden W' + bias, hidden [B, K], which are never all in memory. Bit-identical."""
        rows, vocabulary = len(hidden), head.rows
        expect(hidden, self.dtype, rows, head.columns, apart=True)
        self._product(head, bias)
        self._draws(temperatures, uniforms, rows)
        tokens, logp = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        masses, (peaks, _) = _sums(rows, vocabulary)
        self.lib.head_sample(
            *(hidden, hidden.stride(0), head.data, bias, temperatures, uniforms, tokens, logp, peaks, masses, rows),
            *(vocabulary, head.columns),
        )
        return tokens, logp


def _sums(rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Memory for one number per cell [rows, cells], and two per stretch [2, rows, stretches]."""
    cells, stretches = -(-vocabulary // CELL), -(-vocabulary // STRETCH)
    return torch.empty(rows, cells, dtype=torch.float32), torch.empty(2, rows, stretches, dtype=torch.float32)


@functools.cache
def load(dtype: torch.dtype, head_dim: int) -> Kernels | None:
    """The kernels for this element type and head size, or None."""
    if dtype not in (torch.bfloat16, torch.float32) or head_dim % 32 or problem():
        return None
    for march in marches():
        with suppress(OSError, subprocess.SubprocessError):
            return Kernels(ctypes.CDLL(str(build(dtype, head_dim, march))), dtype, head_dim)
    return None
