"""Loss denominators: one for a whole optimizer step, so that micro-batches, packing and ranks do not change it. Each
function maps the trained lengths of all samples of the step, the group of each (any ids) and the longest allowed answer
to the weight of each sample's tokens."""

from collections.abc import Callable, Sequence

#: trained lengths of samples, the group of each, the longest answer -> the weight of each sample's tokens
Denominator = Callable[[Sequence[int], Sequence[int], int], list[float]]


def by_token(lengths: Sequence[int], groups: Sequence[int], limit: int) -> list[float]:
    """1 / all trained tokens: every token has the same weight (DAPO arXiv:2503.14476 section 3.3; bnpo)."""
    return [1 / max(sum(lengths), 1)] * len(lengths)


def by_sequence(lengths: Sequence[int], groups: Sequence[int], limit: int) -> list[float]:
    """1 / (samples x own length): every answer has the same weight (GRPO arXiv:2402.03300 eq. 3)."""
    return [1 / (len(lengths) * max(n, 1)) for n in lengths]


def by_constant(lengths: Sequence[int], groups: Sequence[int], limit: int) -> list[float]:
    """1 / (samples x longest allowed answer): no length bias (Dr. GRPO arXiv:2503.20783)."""
    return [1 / (len(lengths) * limit) for _ in lengths]


def by_group(lengths: Sequence[int], groups: Sequence[int], limit: int) -> list[float]:
    """1 / (groups x tokens of the own group): every prompt has the same weight, and every token of its answers (DAPO
    arXiv:2503.14476 eq. 8 as written, with the expectation over prompts outside). A group without tokens counts as a
    group."""
    tokens: dict[int, int] = {}
    for n, group in zip(lengths, groups, strict=True):
        tokens[group] = tokens.get(group, 0) + n
    return [1 / (len(tokens) * max(tokens[group], 1)) for group in groups]


DENOMINATORS: dict[str, Denominator] = {
    "token": by_token,
    "sequence": by_sequence,
    "constant": by_constant,
    "group": by_group,
}
