"""Kernels for the CPU, in C: compiled when first needed, kept in the cache.

PyTorch's operators for a decoder layer cost more than its matrix products once there are only a few dozen rows, and
none promises bit-identical results for a row in another batch. These do (see `common.h`), and the engine and the
learner both use them. Where there is no C compiler, or the model's shape does not fit, everything runs on PyTorch's
operators.

    kernels = birl.kernels.load(torch.bfloat16, head_dim=64)     # None where they cannot be had; why: `problem()`

All tensors are contiguous unless a stride is passed. Each method checks types, shapes and indexes once a call, before
its kernel runs, and raises `BirlError` for what would lead the kernel out of memory. T rows, H hidden size, I inner
size, D head size, V vocabulary.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from birl.cache import alone, cache_folder, sweep
from birl.errors import BirlError
from birl.kernels.instructions import NATIVE, flags, marches, processor

HERE = Path(__file__).parent
FLAGS = ["-O3", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fvisibility=hidden", "-w"]
PAGE = 32  # positions in a page of the KV cache (attention.c)
CELL, STRETCH = 64, 1024  # words of a vocabulary that are summed together (vocabulary.h)
PANEL = 16  # rows of a weight that are packed together (tile.h)
LANES = 16  # numbers that are computed together (common.h)
BLOCK = 32  # columns of a weight that are packed together (tile.h)
ROUND, KEEP, ADD, HALVES, SWIGLU = 0, 1, 2, 3, 4  # what gemm does with its float32 sums (layers.h)
CODES = 8  # with one of these: the weight is in int8


@dataclass(slots=True)
class PackedWeight:
    """A weight [N, K], or several below one another, in the layout that `Kernels.gemm` reads."""

    data: Tensor
    rows: int
    columns: int
    halves: bool = False  # two weights whose panels take turns, so that a thread has both sides of a SwiGLU

    @property
    def codes(self) -> int:
        """`CODES` where it is in int8, else 0."""
        return CODES if self.data.dtype == torch.int8 else 0


class Kernels:
    """The functions of one compiled library. `dtype` is the type of weights and activations."""

    def __init__(self, lib: ctypes.CDLL, dtype: torch.dtype, head_dim: int) -> None:
        self.lib, self.dtype, self.head_dim = lib, dtype, head_dim
        pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        codes = {"p": pointer, "n": number, "f": real, "i": ctypes.c_int}
        for name, signature in SIGNATURES.items():
            if hasattr(lib, name):
                function = getattr(lib, name)
                function.argtypes = [codes[c] for c in signature]
                function.restype = number if name.startswith("check_") else None
        lib.team_size.restype = number
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
        self.lib.rms_norm(_p(x), _p(weight), _p(h), _p(rstd), x.shape[0], x.shape[1], eps)
        return h

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, rstd: Tensor, grad_h: Tensor, grad_x: Tensor, rounded: Tensor | None = None
    ) -> Tensor:
        """Add the norm's gradient to grad_x [T, H] float32, and return the weight's; `rounded` receives the new grad_x
        in this type."""
        self._norm(x, weight, rstd)
        expect(grad_h, self.dtype, *x.shape)
        expect(grad_x, torch.float32, *x.shape)
        if rounded is not None:
            expect(rounded, self.dtype, *x.shape)
        parts = torch.zeros(self.lib.team_size(), x.shape[1], dtype=torch.float32)
        self.lib.rms_norm_backward(
            _p(x), _p(weight), _p(rstd), _p(grad_h), _p(grad_x), _p(rounded), _p(parts), x.shape[0], x.shape[1]
        )
        return parts.sum(0)

    def rotary(self, rows: Tensor, heads: int, cosine: Tensor, sine: Tensor, inverse: bool = False) -> None:
        """Rotate the first heads of each row [T, ...] in place. cosine, sine [T, D / 2] float32."""
        expect(rows, self.dtype, len(rows), rows.shape[-1], apart=True)
        self._angles(cosine, sine, len(rows))
        require(0 <= heads * self.head_dim <= rows.shape[1], f"{heads} heads in rows of {rows.shape[1]}")
        direction = -1.0 if inverse else 1.0
        self.lib.rotary(_p(rows), _p(cosine), _p(sine), rows.shape[0], heads, rows.stride(0), direction)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [T, 2 I] -> [T, I]."""
        rows, width = gate_up.shape
        expect(gate_up, self.dtype, rows, width)
        multiple(width, 2 * LANES)
        y = torch.empty(rows, width // 2, dtype=self.dtype)
        self.lib.swiglu(_p(gate_up), _p(y), rows, width // 2)
        return y

    def swiglu_backward(self, gate_up: Tensor, grad_y: Tensor) -> Tensor:
        """gate_up becomes its own gradient. Returns the forward result, which was not kept."""
        rows, width = grad_y.shape
        expect(grad_y, self.dtype, rows, width)
        expect(gate_up, self.dtype, rows, 2 * width)
        multiple(width, LANES)
        y = torch.empty_like(grad_y)
        self.lib.swiglu_backward(_p(gate_up), _p(grad_y), _p(y), *grad_y.shape)
        return y

    def pack(
        self,
        weights: Sequence[Tensor],
        transposed: bool = False,
        into: PackedWeight | None = None,
        halves: bool = False,
    ) -> PackedWeight:
        """Weights [N_i, K] below one another, for products with their transpose; `transposed`: with themselves. `into`:
        an earlier result of the same shape, to use its memory. `halves` is for two weights of 16 n rows (gemm.c)."""
        sizes = [w.shape[0] for w in weights]
        inner = weights[0].shape[1]
        for weight in weights:
            expect(weight, torch.bfloat16, len(weight), inner)
        multiple(inner if transposed else 0, PANEL)
        for n in sizes if halves else sizes[:-1]:
            multiple(n, BLOCK if transposed else PANEL)
        require(
            not halves or (not transposed and len(sizes) == 2 and sizes[0] == sizes[1]), "halves that are not alike"
        )
        rows, columns = (inner, sum(sizes)) if transposed else (sum(sizes), inner)
        size = packed_size(rows, columns)
        data = torch.empty(size, dtype=torch.bfloat16) if into is None else into.data
        expect(data, torch.bfloat16, size)
        done = 0
        for weight, size in zip(weights, sizes, strict=True):
            self.lib.gemm_pack(_p(weight), _p(data), size, inner, done, columns, int(transposed), 2 if halves else 1)
            done += PANEL if halves else size
        return PackedWeight(data, rows, columns, halves)

    def encode(self, weights: Sequence[Tensor], into: PackedWeight | None = None, halves: bool = False) -> PackedWeight:
        """`pack` in int8, of weights [N_i, K] with N_i a multiple of 16 and K of 32: what `models/int8.py` rounds them
        to. Products with it are computed as with those weights in bfloat16, with the same bits."""
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
            self.lib.gemm_encode(_p(weight), _p(data), len(weight), inner, done, 2 if halves else 1)
            done += PANEL if halves else len(weight)
        return PackedWeight(data, rows, inner, halves)

    def outer(self, grad: Tensor, x: PackedWeight, into: Tensor, add: bool) -> None:
        """into [N, K] float32 (+)= grad' x, the gradient of a weight: grad [T, N], rows may be apart, x [T, K] packed
        transposed."""
        expect(grad, self.dtype, x.columns, len(into), apart=True)
        expect(into, torch.float32, len(into), x.rows, apart=True)
        expect(x.data, torch.bfloat16, packed_size(x.rows, x.columns))
        multiple(len(into), PANEL)
        multiple(x.rows, PANEL)
        mode = ADD if add else KEEP
        self.lib.gemm_outer(
            *(_p(grad), grad.stride(0), _p(x.data), _p(into), into.stride(0)),
            *(grad.shape[1], x.rows, grad.shape[0], mode),
        )

    def gemm(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
        """x W' + bias: [T, K] -> [T, N], or added to `add_to` [T, N] float32. Rows of x may be apart."""
        require(not weight.halves or (bias is None and add_to is None), "halves and a bias, or a sum")
        mode = ADD if add_to is not None else HALVES if weight.halves else ROUND
        y = torch.empty(x.shape[0], weight.rows, dtype=self.dtype) if add_to is None else add_to
        self._gemm(x, weight, bias, y, mode)
        return y

    def gemm_float(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """The same, not rounded: [T, N] float32, `into` where it is given."""
        y = torch.empty(x.shape[0], weight.rows, dtype=torch.float32) if into is None else into
        self._gemm(x, weight, bias, y, KEEP)
        return y

    def _gemm(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, y: Tensor, mode: int) -> None:
        expect(x, self.dtype, len(x), weight.columns, apart=True)
        width = weight.rows // 2 if mode == SWIGLU else weight.rows
        expect(y, torch.float32 if mode in (KEEP, ADD) else self.dtype, len(x), width, apart=True)
        self._product(weight, bias, codes=True)
        self.lib.gemm(
            *(_p(x), x.stride(0), _p(weight.data), _p(bias), _p(y), y.stride(0)),
            *(x.shape[0], weight.rows, x.shape[1], mode | weight.codes),
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
            *(_p(query), _p(key), _p(value), query.stride(0), _p(out), _p(lse)),
            *(_p(segments), len(segments), heads, key.shape[1], scale, window),
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
        """Write the gradients by query, key and value into `grads`, which have their shapes and strides."""
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
            *(_p(query), _p(key), _p(value), query.stride(0), _p(out), _p(lse), _p(grad_out), *map(_p, grads)),
            *(_p(segments), len(segments), query.shape[1], key.shape[1], scale, window),
        )

    def cache_write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, pages: Tensor, places: Tensor):
        """Rows of key and value [T, kv_heads, D] go to place places[t] of page pages[t] (int32)."""
        self._heads(key, value)
        self._groups(key.shape[1], key.shape[1], value.shape[1])
        self.check_pages(keys, values, key.shape[1])
        self._places(pages, places, key.shape[0], keys.shape[0])
        self.lib.cache_write(
            *(_p(key), _p(value), key.stride(0), _p(keys), _p(values), _p(pages), _p(places)),
            *(key.shape[0], key.shape[1]),
        )

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
            *(_p(query), query.stride(0), _p(out), _p(keys), _p(values), _p(table), table.shape[1]),
            *(_p(lengths), _p(starts), _p(shared), len(shared), heads, keys.shape[1], scale, window),
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
        `total` the number of pages in the cache. `apart`: every row belongs to another sequence. `codes`: `CODES`
        where all weights are in int8, else 0.
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
            *(_p(layers), len(layers), _p(x), _p(cosine), _p(sine), _p(pages), _p(places), _p(table), table.shape[1]),
            *(_p(lengths), _p(starts), _p(shared), len(shared), int(apart), codes, _p(scratch), len(x), *sizes),
            *(eps, scale),
        )

    def logprobs(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """logits [N, V] float32 -> log softmax(logits / temperature)[target], log-normaliser, entropy, each [N]."""
        expect(logits, torch.float32, *logits.shape[:2])
        self._words(targets, *logits.shape)
        logp, norm, entropy = torch.empty(3, len(logits), dtype=torch.float32).unbind()
        self.lib.logprobs(*(_p(logits), _p(targets), temperature, _p(logp), _p(norm), _p(entropy)), *logits.shape)
        return logp, norm, entropy

    def head_logprobs(
        self, hidden: Tensor, head: PackedWeight, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the logits hidden W' + bias, hidden [N, K], which are never all in memory. Bit-identical."""
        rows, words = len(hidden), head.rows
        expect(hidden, self.dtype, rows, head.columns, apart=True)
        self._product(head, bias)
        self._words(targets, rows, words)
        logp, norm, entropy = torch.empty(3, rows, dtype=torch.float32).unbind()
        masses, (peaks, tilts) = (
            torch.empty(rows, -(-words // CELL), dtype=torch.float32),
            torch.empty(2, rows, -(-words // STRETCH), dtype=torch.float32),
        )
        self.lib.head_logprobs(
            *(_p(hidden), hidden.stride(0), _p(head.data), _p(bias), _p(targets), temperature),
            *(_p(logp), _p(norm), _p(entropy), _p(peaks), _p(masses), _p(tilts), rows, words, head.columns),
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
        """Gradient by the logits of the words first, first + 1, ...: words are rows, [W, N] -> [W, N] in this type, N
        padded to 32 with zeros."""
        words, count = logits.shape
        expect(logits, torch.float32, words, count)
        expect(targets, torch.int64, count)
        for each in (norm, entropy, grad_logp, grad_entropy):
            if each is not None:
                expect(each, torch.float32, count)
        grad = torch.empty(words, -(-count // 32) * 32, dtype=self.dtype)
        self.lib.logprobs_backward(
            *(_p(logits), _p(targets), temperature, _p(norm), _p(entropy), _p(grad_logp), _p(grad_entropy)),
            *(_p(grad), first, words, count, grad.shape[1]),
        )
        return grad

    def _heads(self, *rows: Tensor, like: Tensor | None = None) -> None:
        """Rows [T, heads, D] of this type and head size, one row stride for all."""
        first = rows[0] if like is None else like
        for x in rows:
            fits = x.ndim == 3 and x.dtype == self.dtype and x.device.type == "cpu" and x.shape[2] == self.head_dim
            near = fits and x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == self.head_dim)
            if not near or len(x) != len(first) or (len(x) > 1 and x.stride(0) != first.stride(0)):
                raise BirlError(
                    f"A kernel for heads of {self.head_dim} in {self.dtype} was given {x.dtype} {list(x.shape)} with "
                    f"strides {x.stride()}."
                )

    def _groups(self, heads: int, kv_heads: int, value_heads: int, window: int = 0) -> None:
        shared = kv_heads > 0 and heads % kv_heads == 0 and value_heads == kv_heads and window >= 0
        require(shared, f"{heads} query, {kv_heads} key and {value_heads} value heads, window {window}")

    def _norm(self, x: Tensor, weight: Tensor, rstd: Tensor | None) -> None:
        rows, width = x.shape
        expect(x, torch.float32, rows, width)
        expect(weight, self.dtype, width)
        multiple(width, LANES)
        if rstd is not None:
            expect(rstd, torch.float32, rows)

    def _angles(self, cosine: Tensor, sine: Tensor, rows: int) -> None:
        for each in (cosine, sine):
            expect(each, torch.float32, rows, self.head_dim // 2)

    def _product(self, weight: PackedWeight, bias: Tensor | None, codes: bool = False) -> None:
        if codes and weight.codes:
            expect(weight.data, torch.int8, coded_size(weight.rows, weight.columns))
        else:
            expect(weight.data, torch.bfloat16, packed_size(weight.rows, weight.columns))
        multiple(weight.rows, PANEL)
        multiple(weight.columns, BLOCK)
        if bias is not None:
            expect(bias, self.dtype, weight.rows)

    def check_pages(self, keys: Tensor, values: Tensor, kv_heads: int | None = None) -> None:
        pages, heads = len(keys), keys.shape[1] if kv_heads is None else kv_heads
        expect(keys, self.dtype, pages, heads, self.head_dim, PAGE)
        expect(values, self.dtype, pages, heads, PAGE, self.head_dim)

    def _segments(self, segments: Tensor, rows: int) -> None:
        expect(segments, torch.int64, len(segments), 5)
        obey(self.lib.check_segments(_p(segments), len(segments), rows))

    def _places(self, pages: Tensor, places: Tensor, rows: int, total: int) -> None:
        for each in (pages, places):
            expect(each, torch.int32, rows)
        obey(self.lib.check_places(_p(pages), _p(places), rows, total))

    def _table(self, where: Sequence[Tensor], rows: int, total: int) -> None:
        table, lengths, starts, shared = where
        expect(table, torch.int32, rows, table.shape[-1])
        expect(lengths, torch.int32, rows)
        expect(starts, torch.int32, len(shared) + 1)
        expect(shared, torch.int32, len(shared))
        width = table.shape[1]
        obey(self.lib.check_table(_p(table), width, rows, *map(_p, where[1:]), len(shared), total))

    def _words(self, words: Tensor, rows: int, vocabulary: int) -> None:
        expect(words, torch.int64, rows)
        obey(self.lib.check_words(_p(words), rows, vocabulary))

    def _draws(self, temperatures: Tensor, uniforms: Tensor, rows: int) -> None:
        for each in (temperatures, uniforms):
            expect(each, torch.float32, rows)

    def sample(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """logits [B, V] float32 -> tokens [B], and their log-probs [B] under softmax(logits / temperature)."""
        expect(logits, torch.float32, *logits.shape[:2])
        self._draws(temperatures, uniforms, len(logits))
        tokens, logp = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.float32)
        self.lib.sample(_p(logits), _p(temperatures), _p(uniforms), _p(tokens), _p(logp), *logits.shape)
        return tokens, logp

    def head_sample(
        self, hidden: Tensor, head: PackedWeight, bias: Tensor | None, temperatures: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same of the logits hidden W' + bias, hidden [B, K], which are never all in memory. Bit-identical."""
        rows, words = len(hidden), head.rows
        expect(hidden, self.dtype, rows, head.columns, apart=True)
        self._product(head, bias)
        self._draws(temperatures, uniforms, rows)
        tokens, logp = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        masses, peaks = (
            torch.empty(rows, -(-words // CELL), dtype=torch.float32),
            torch.empty(rows, -(-words // STRETCH), dtype=torch.float32),
        )
        self.lib.head_sample(
            *(_p(hidden), hidden.stride(0), _p(head.data), _p(bias), _p(temperatures), _p(uniforms)),
            *(_p(tokens), _p(logp), _p(peaks), _p(masses), rows, words, head.columns),
        )
        return tokens, logp


# p pointer, n long, f float, i int
SIGNATURES = {
    "check_segments": "pnn",
    "check_places": "ppnn",
    "check_table": "pnnpppnn",
    "check_words": "pnn",
    "rms_norm": "ppppnnf",
    "rms_norm_backward": "pppppppnn",
    "rotary": "pppnnnf",
    "swiglu": "ppnn",
    "swiglu_backward": "pppnn",
    "gemm_pack": "ppnnnnin",
    "gemm_encode": "ppnnnn",
    "gemm": "pnpppnnnni",
    "gemm_outer": "pnppnnnni",
    "tree_attention": "pppnpppnnnfn",
    "tree_attention_backward": "pppnpppppppnnnfn",
    "cache_write": "ppnppppnn",
    "paged_attention": "pnppppnpppnnnfn",
    "paged_stack": "pnppppppnpppniipnnnnnff",
    "logprobs": "ppfpppnn",
    "logprobs_backward": "ppfpppppnnnn",
    "sample": "pppppnn",
    "head_sample": "pnppppppppnnn",
    "head_logprobs": "pnpppfppppppnnn",
}


def _p(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


RULES = (  # of bounds.c, by number from 1
    "a segment lies outside of the packed rows",
    "the segments are not in the order of their trees",
    "a row would be written outside of the cache's pages",
    "the groups of rows do not cover the rows in order",
    "a group shares more pages than its rows have",
    "a sequence has no position, or more than its row of the table has pages for",
    "the table names a page that the cache does not have",
    "a target is no word of the vocabulary",
    "a segment does not go on where its parent ends",
)


def obey(rule: int) -> None:
    """Raises `BirlError` for the number of a broken rule."""
    if rule:
        raise BirlError(f"A kernel was given a wrong index: {RULES[rule - 1]}. This is a mistake in birl.")


def require(fits: bool, given: str) -> None:
    if not fits:
        raise BirlError(f"A kernel was given {given}. This is a mistake in birl.")


def multiple(size: int, of: int) -> None:
    require(size % of == 0, f"a width of {size}, which is no multiple of {of}")


def packed_size(rows: int, columns: int) -> int:
    """Numbers of a weight in whole panels and blocks."""
    return -(-rows // PANEL) * PANEL * (-(-columns // BLOCK) * BLOCK)


def coded_size(rows: int, columns: int) -> int:
    """Bytes of a weight in int8: an exponent for each 32 codes."""
    return rows * columns // BLOCK * (BLOCK + 1)


def expect(x: Tensor, dtype: torch.dtype, *shape: int, apart: bool = False) -> None:
    """A contiguous tensor of this type and shape on the CPU, or with rows that are `apart`. Raises `BirlError` for
    anything else: behind a wrong one a kernel would read, or write, memory that is not its own."""
    laid_out = x.is_contiguous() or (apart and x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1])
    if x.shape != shape or x.dtype != dtype or x.device.type != "cpu" or not laid_out:
        raise BirlError(
            f"A kernel expected {dtype} {list(shape)}, contiguous, and was given {x.dtype} {list(x.shape)} with "
            f"strides {x.stride()}."
        )


def problem() -> str:
    """Why there are no kernels on this machine; empty where there are. Raises `BirlError` for a wrong BIRL_ISA."""
    if os.environ.get("BIRL_KERNELS", "1") == "0":
        return "switched off by BIRL_KERNELS=0"
    if not sys.platform.startswith("linux"):
        return "only built on Linux"
    if compiler() is None:
        return "no C compiler (install gcc, or set CC)"
    try:
        build(torch.bfloat16, 64, marches()[0])
    except (OSError, subprocess.SubprocessError) as error:
        return f"they do not compile: {error}"
    return ""


def compiler() -> str | None:
    wanted = os.environ.get("CC")
    return next((path for name in (wanted, "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)


@functools.cache
def load(dtype: torch.dtype, head_dim: int) -> Kernels | None:
    """The kernels for this element type and head size, or None."""
    if dtype not in (torch.bfloat16, torch.float32) or head_dim % 32 or problem():
        return None
    for march in marches():
        with suppress(OSError, subprocess.SubprocessError):
            return Kernels(ctypes.CDLL(str(build(dtype, head_dim, march))), dtype, head_dim)
    return None


def build(dtype: torch.dtype, head_dim: int, march: str = NATIVE) -> Path:
    """Compile, unless the cache has it: about a second. Raises `OSError` or `SubprocessError`."""
    rounded = dtype == torch.bfloat16
    command = [
        compiler() or "cc",
        *FLAGS,
        f"-march={march}",
        f"-DHEAD_DIM={head_dim}",
        *(["-DBF16"] if rounded else []),
    ]
    identity = hashlib.sha256(repr((command, _version(command[0]), processor(), sorted(flags()))).encode())
    for file in (*sources(rounded), *sorted(HERE.glob("*.h"))):
        identity.update(file.read_bytes())
    root = cache_folder("kernels")
    target = root / f"{identity.hexdigest()[:20]}.so"
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with alone(target):
        if target.exists():  # another process has compiled them meanwhile
            return target
        sweep(root, "tmp*")
        began = time.monotonic()
        print("birl: compiling kernels for this processor, once,", file=sys.stderr, end=" ", flush=True)
        try:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                made = Path(folder, "kernels.so")
                _compile([*command, "-o", str(made), *map(str, sources(rounded)), "-lm"])
                made.replace(target)
        finally:
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return target


def sources(rounded: bool) -> list[Path]:
    """Of bfloat16, or of float32, whose products are PyTorch's; attention is another in each type."""
    return [f for f in sorted(HERE.glob("*.c")) if (f.name != "attention.c" if rounded else f.name[:4] != "gemm")]


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[0] if done.stderr.strip() else "the compiler failed")


def _version(program: str) -> tuple[int, int] | None:
    """Size and time of the compiler's file: another version of it may round otherwise."""
    try:
        file = Path(shutil.which(program) or program).stat()
    except OSError:
        return None
    return file.st_size, file.st_mtime_ns
