"""Estimates the cost of expressions; values at points replace expansions and factorings that would take minutes."""

import math
from typing import Any

import sympy

LARGEST = 100_000  # largest exponent, and largest argument of a factorial
TERMS = 300  # most terms of an expression that is expanded
DEGREE = 100  # largest exponent of a power of a non-number
LONG = 10**400  # larger integers are not factored


def unfinished(expression: Any) -> bool:
    """Whether it contains work that is not done: a sum, an integral, or a power or factorial with too many digits."""
    if not isinstance(expression, sympy.Basic):
        return False
    for part in sympy.postorder_traversal(expression):  # 9^(9^9) must be found before its parent
        if isinstance(part, sympy.Integral | sympy.Sum | sympy.Product | sympy.Limit):
            return True
        if isinstance(part, sympy.Pow | sympy.factorial | sympy.binomial):
            over: Any = part.exp if isinstance(part, sympy.Pow) else part.args[0]
            size: Any = over.evalf(5) if over.is_number else 0
            if not abs(size) <= LARGEST:
                return True
    return False


def large(expression: Any) -> bool:
    """Whether it has too many terms when expanded, too high a degree, or too long an integer."""
    if not isinstance(expression, sympy.Basic) or expression.is_Atom:
        return False
    return (
        any(isinstance(p, sympy.Integer) and abs(p) > LONG for p in sympy.postorder_traversal(expression))
        or _terms(expression) > TERMS
    )


def joins_logs(one: Any, other: Any) -> bool:
    """Whether sympy would turn n log(2) into log(2^n) with a large n, which may be in the other expression."""
    both = [e for e in (one, other) if isinstance(e, sympy.Basic)]
    parts = [part for e in both for part in sympy.postorder_traversal(e) if isinstance(part, sympy.Expr)]
    numbers = [part.evalf(5) for part in parts if part.is_number] if any(e.has(sympy.log) for e in both) else []
    return any(n.is_comparable and not abs(n) <= LARGEST for n in numbers)


def same_at_points(one: Any, other: Any, scaled: bool = False) -> bool:
    """Whether two expressions of the same variables agree to 40 digits at points near 1, or `scaled`: have the same
    ratio there, not 0: further away the highest power would hide all others."""
    one, other = _side(one), _side(other)
    if one == other or not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return bool(one == other)
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    values: list[tuple[Any, Any]] = []
    for step, point in enumerate((37, -41, 430), 1):  # on three lines through (1, 1, ...)
        at: Any = {name: 1 + sympy.Rational(13 * (1 + i * step) * point, 100_000) for i, name in enumerate(names)}
        values.append((one.evalf(50, subs=at), other.evalf(50, subs=at)))
    if scaled and not any(value == 0 for pair in values for value in pair):
        ratio = values[0][0] / values[0][1]
        values = [(a, b * ratio) for a, b in values]
    return all(near(a, b, 1e-40) for a, b in values)


def near(one: Any, other: Any, share: float) -> bool:
    """Whether two numbers differ by at most that fraction of the second; never for infinite and undefined ones."""
    gap, size = abs(one - other), abs(other)
    return bool(gap.is_comparable and gap.is_finite and size.is_finite and gap <= share * size)


def _side(expression: Any) -> Any:
    """The right side of y = expression."""
    return expression.rhs if isinstance(expression, sympy.Eq) and expression.lhs.is_Symbol else expression


def _terms(expression: Any) -> float:
    if expression.is_Atom:
        return 1
    sizes = [_terms(part) for part in expression.args]
    power = expression.exp if isinstance(expression, sympy.Pow | sympy.exp) else sympy.Integer(0)
    if not power.is_number and any(abs(n) > DEGREE for n in power.atoms(sympy.Integer)):
        return math.inf  # e^(999 x)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and not expression.base.is_Number:
        power, base = int(abs(expression.exp)), sizes[0]
        if power > DEGREE or base > TERMS:
            return math.inf
        return math.comb(power + int(base) - 1, power)
    if isinstance(expression, sympy.Mul):
        return math.prod(sizes)
    if isinstance(expression, sympy.Function):  # the sine of a sum of k terms expands to 2^(k-1) terms
        return 2.0 ** min(sum(sizes) - 1, 1000)
    return sum(sizes)
