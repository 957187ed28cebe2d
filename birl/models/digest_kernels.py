"""Triton kernel of weight digests: 64-bit XXH3 with seed 0 of every `digests.PIECE` bytes, bit for bit equal to the
library xxhash (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md). Imported only if Triton is installed.

One program processes one piece, in blocks of 1,024 bytes: 16 stripes of 8 words are added to 8 sums in any order;
between two blocks the sums are scrambled.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

SCRAMBLE = tl.constexpr(0x9E3779B1)
AVALANCHE = tl.constexpr(0x165667919E3779F9)


@triton.jit
def unsigned(pointer, at):
    return tl.load(pointer + at).to(tl.uint64, bitcast=True)


@triton.jit
def taken(words_ptr, keys_ptr, at, keys_at):
    """Return what the 16 stripes of a block add to the 8 sums."""
    words = unsigned(words_ptr, at)
    keyed = words ^ unsigned(keys_ptr, keys_at)
    return tl.sum(unsigned(words_ptr, at ^ 1) + (keyed & 0xFFFFFFFF) * (keyed >> 32), axis=0)


@triton.jit
def digest_kernel(words_ptr, keys_ptr, result_ptr, BLOCKS: tl.constexpr):
    """`words`: pieces of BLOCKS x 128 int64; `keys` as of `digests.keys`; `result`: one int64 for each piece."""
    words_ptr += tl.program_id(0).to(tl.int64) * (BLOCKS * 128)
    lane = tl.arange(0, 8)
    at = tl.arange(0, 16)[:, None] * 8 + lane[None, :]
    scramble = unsigned(keys_ptr, 256 + lane)
    sums = unsigned(keys_ptr, 272 + lane)
    for block in range(BLOCKS - 1):
        sums += taken(words_ptr, keys_ptr, block * 128 + at, at)
        sums = (sums ^ (sums >> 47) ^ scramble) * SCRAMBLE
    sums += taken(words_ptr, keys_ptr, (BLOCKS - 1) * 128 + at, 128 + at)
    even, odd = tl.split(tl.reshape(sums ^ unsigned(keys_ptr, 264 + lane), (4, 2)))
    result = unsigned(keys_ptr, 280) + tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=0)
    result = (result ^ (result >> 37)) * AVALANCHE
    result = result ^ (result >> 32)
    tl.store(result_ptr + tl.program_id(0), result.to(tl.int64, bitcast=True))
