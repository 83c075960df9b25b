"""Axis expressions: arithmetic on axis names, evaluated from the syntax tree and never by `eval`.

Allowed are names, numbers, unary plus and minus, + - * / // % ** and parentheses. The result must be
a whole number >= 0, as it is a length.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from seatrial.errors import ProblemError

LONGEST = 1000  # characters; the published expressions have fewer than a hundred
LARGEST_POWER_BITS = 4096  # keeps 9**9**9 from filling the memory

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate_length(expression: str, names: Mapping[str, int]) -> int:
    """The whole number >= 0 that `expression` gives for these axis lengths.

    Raises ProblemError when it is not an arithmetic expression over `names` or does not come out as
    such a number.
    """
    try:
        value = _evaluate(_parse(expression), names)
    except (ZeroDivisionError, OverflowError, RecursionError) as fault:
        raise ProblemError(
            f"axis expression '{expression}' fails for {_shown(names)} ({_why(fault)}); correct it or the axes"
        ) from fault
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or value < 0:
        raise ProblemError(
            f"axis expression '{expression}' gives {value} for {_shown(names)}, not a whole number >= 0; "
            "correct it or the axes"
        )
    return value


def names_in(expression: str) -> tuple[str, ...]:
    """The axis names an expression uses, in order of appearance; raises ProblemError when it does not parse."""
    found = [node.id for node in ast.walk(_parse(expression)) if isinstance(node, ast.Name)]
    return tuple(dict.fromkeys(found))


def _parse(expression: str) -> ast.expr:
    if len(expression) > LONGEST:
        raise ProblemError(f"axis expression of {len(expression)} characters is longer than {LONGEST}; shorten it")
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        raise ProblemError(f"axis expression '{expression}' is not an arithmetic expression; correct it") from fault


def _evaluate(node: ast.expr, names: Mapping[str, int]) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise ProblemError(
                    f"axis expression uses '{name}', which is not an axis known before it; define it first"
                )
            return names[name]
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_evaluate(left, names), _evaluate(right, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result: int | float = _BINARY[type(op)](_evaluate(left, names), _evaluate(right, names))
            return result
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            signed: int | float = _UNARY[type(sign)](_evaluate(operand, names))
            return signed
        case _:
            raise ProblemError(
                f"axis expression contains {type(node).__name__} ('{ast.unparse(node)}'); "
                "only names, numbers, + - * / // % ** and parentheses are allowed"
            )


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and abs(exponent) * max(base.bit_length(), 1) > LARGEST_POWER_BITS:
        raise OverflowError("the power is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise OverflowError("a root of a negative number")
    return float(result) if isinstance(result, float) else int(result)


def _shown(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in names.items()) or "no axes"


def _why(fault: BaseException) -> str:
    return str(fault) or type(fault).__name__
