"""Derivation of random seeds."""

import hashlib


def derive_seed(*numbers: int) -> int:
    """A 64-bit seed from some numbers; similar numbers give unrelated streams."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
