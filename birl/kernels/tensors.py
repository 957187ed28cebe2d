"""Memory layout of the kernels' tensors, and the checks of each before a kernel runs. With a wrong tensor a kernel
would read or write out of bounds."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from birl.errors import BirlError

PAGE = 32  # positions in a page of the KV cache (attention.c)
CELL, STRETCH = 64, 1024  # tokens of a vocabulary that are summed together (vocabulary.h)
PANEL = 16  # rows of a weight that are packed together (tile.h)
LANES = 16  # numbers in one vector (common.h)
BLOCK = 32  # columns of a weight that are packed together (tile.h)
CODES = 8  # added to gemm's mode if the weight is in int8


@dataclass(slots=True)
class PackedWeight:
    """A weight [N, K], or several concatenated along N, in the layout that `Kernels.gemm` reads."""

    data: Tensor
    rows: int
    columns: int
    halves: bool = False  # two weights whose panels alternate, so that a thread has both sides of a SwiGLU

    @property
    def codes(self) -> int:
        """`CODES` if it is in int8, else 0."""
        return CODES if self.data.dtype == torch.int8 else 0


class Address(ctypes.c_void_p):
    """Parameter type of a kernel: address of a tensor's data; null for None."""

    @classmethod
    def from_param(cls, tensor: Tensor | None) -> "Address":
        return cls(None if tensor is None else tensor.data_ptr())


# parameters of each function: p a tensor, n long, f float, i int
SIGNATURES = {
    "check_segments": "pnn", "check_places": "ppnn", "check_table": "pnnpppnn", "check_tokens": "pnn",
    "rms_norm": "ppppnnf", "rms_norm_backward": "pppppppnn", "rotary": "pppnnnf", "swiglu": "ppnn",
    "swiglu_backward": "pppnn", "gemm_pack": "ppnnnnin", "gemm_encode": "ppnnnn", "gemm": "pnpppnnnni",
    "gemm_outer": "pnppnnnni", "tree_attention": "pppnpppnnnfn", "tree_attention_backward": "pppnpppppppnnnfn",
    "cache_write": "ppnppppnn", "paged_attention": "pnppppnpppnnnfn", "paged_stack": "pnppppppnpppniipnnnnnff",
    "logprobs": "ppfpppnn", "logprobs_backward": "ppfpppppnnnn", "sample": "pppppnn",
    "head_sample": "pnppppppppnnn", "head_logprobs": "pnpppfppppppnnn",
}  # fmt: skip
CODE = {"p": Address, "n": ctypes.c_long, "f": ctypes.c_float, "i": ctypes.c_int}


def declare(lib: ctypes.CDLL) -> None:
    """Declare the types of the library's functions."""
    for name, signature in SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes = [CODE[c] for c in signature]
        function.restype = ctypes.c_long if name.startswith("check_") else None
    lib.team_size.restype = ctypes.c_long


RULES = (  # of bounds.c, by number from 1
    "a segment lies outside of the packed rows",
    "the segments are not in the order of their trees",
    "a row would be written outside of the cache's pages",
    "the groups of rows do not cover the rows in order",
    "a group shares more pages than its rows have",
    "a sequence has no position, or more than its row of the table has pages for",
    "the table names a page that the cache does not have",
    "a target is no token of the vocabulary",
    "a segment does not go on where its parent ends",
)


def obey(rule: int) -> None:
    """Raise `BirlError` for the number of a broken rule; 0: none."""
    if rule:
        raise BirlError(f"A kernel was given a wrong index: {RULES[rule - 1]}. This is a mistake in birl.")


def require(fits: bool, given: str) -> None:
    if not fits:
        raise BirlError(f"A kernel was given {given}. This is a mistake in birl.")


def multiple(size: int, of: int) -> None:
    require(size % of == 0, f"a width of {size}, which is no multiple of {of}")


def packed_size(rows: int, columns: int) -> int:
    """Elements of a packed weight, in whole panels and blocks."""
    return -(-rows // PANEL) * PANEL * (-(-columns // BLOCK) * BLOCK)


def coded_size(rows: int, columns: int) -> int:
    """Bytes of a packed weight in int8: an exponent for each 32 codes."""
    return rows * columns // BLOCK * (BLOCK + 1)


def expect(x: Tensor, dtype: torch.dtype, *shape: int, apart: bool = False) -> None:
    """Check that a tensor has this dtype and shape, is on the CPU, and contiguous, or if `apart` with any row stride.
    Raises `BirlError` otherwise: with a wrong one a kernel would read or write out of bounds."""
    laid_out = x.is_contiguous() or (apart and x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1])
    if x.shape != shape or x.dtype != dtype or x.device.type != "cpu" or not laid_out:
        raise BirlError(
            f"A kernel expected {dtype} {list(shape)}, contiguous, and was given {x.dtype} {list(x.shape)} with "
            f"strides {x.stride()}."
        )


class Checks:
    """Checks of the arguments of `Kernels`; each raises `BirlError`."""

    lib: ctypes.CDLL
    dtype: torch.dtype
    head_dim: int

    def _heads(self, *rows: Tensor, like: Tensor | None = None) -> None:
        """Rows [T, heads, D] of the kernels' dtype and head size, all with the same row stride."""
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
            expect(weight.data, self.dtype, packed_size(weight.rows, weight.columns))
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
        obey(self.lib.check_segments(segments, len(segments), rows))

    def _places(self, pages: Tensor, places: Tensor, rows: int, total: int) -> None:
        for each in (pages, places):
            expect(each, torch.int32, rows)
        obey(self.lib.check_places(pages, places, rows, total))

    def _table(self, where: Sequence[Tensor], rows: int, total: int) -> None:
        table, lengths, starts, shared = where
        expect(table, torch.int32, rows, table.shape[-1])
        expect(lengths, torch.int32, rows)
        expect(starts, torch.int32, len(shared) + 1)
        expect(shared, torch.int32, len(shared))
        width = table.shape[1]
        obey(self.lib.check_table(table, width, rows, *where[1:], len(shared), total))

    def _tokens(self, tokens: Tensor, rows: int, vocabulary: int) -> None:
        expect(tokens, torch.int64, rows)
        obey(self.lib.check_tokens(tokens, rows, vocabulary))

    def _draws(self, temperatures: Tensor, uniforms: Tensor, rows: int) -> None:
        for each in (temperatures, uniforms):
            expect(each, torch.float32, rows)
