"""Seeds of everything random."""

import hashlib


def derive_seed(*numbers: int) -> int:
    """A 64-bit seed from a few numbers; neighbours give unrelated streams."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
