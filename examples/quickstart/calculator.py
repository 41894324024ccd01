"""The agent's tool: the value of an arithmetic expression."""

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> float:
    """Value of an expression of numbers, + - * / and parentheses; ValueError for anything else."""
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"cannot calculate {expression!r}: {error}") from None


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise SyntaxError("not a calculation")
