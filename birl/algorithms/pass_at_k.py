"""Unbiased pass@k."""

from math import comb, sqrt


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): probability that at least one of k answers, drawn from n without replacement, is right
    (Codex, arXiv:2107.03374 eq. 1)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} answers to a prompt, there are {n}")
    return 1 - comb(n - correct, k) / comb(n, k)


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion (95 % for z = 1.96): valid for small n and near 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
