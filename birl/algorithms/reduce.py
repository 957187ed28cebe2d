"""What the summed loss is divided by: one number for a whole optimizer step, so that micro-batches, packing and ranks
cannot change it. Each function maps the trained lengths of all samples of the step to the weight of each sample's
tokens."""

from collections.abc import Sequence


def by_token(lengths: Sequence[int], limit: int) -> list[float]:
    """1 / all trained tokens: every token counts the same (DAPO arXiv:2503.14476; bnpo)."""
    return [1 / max(sum(lengths), 1)] * len(lengths)


def by_sequence(lengths: Sequence[int], limit: int) -> list[float]:
    """1 / (samples x own length): every answer counts the same (GRPO arXiv:2402.03300)."""
    return [1 / (len(lengths) * max(n, 1)) for n in lengths]


def by_constant(lengths: Sequence[int], limit: int) -> list[float]:
    """1 / (samples x longest allowed answer): no length bias (Dr. GRPO arXiv:2503.20783)."""
    return [1 / (len(lengths) * limit)] * len(lengths)


DENOMINATORS = {"token": by_token, "sequence": by_sequence, "constant": by_constant}
