"""Checks that a generated file has its imports, the path of its log, one or two tests, and no other code.

The file quotes texts of a log, which may come from a stranger. `write.py` escapes these texts, and this module checks
the result with Python's own parser. This module must not depend on the content of the texts.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

RUN_IN_DOCSTRINGS = (">>>", "```")
"""Marks of code in a docstring, for tools that run it, such as `pytest --doctest-modules`."""


def wrong_part(content: bytes, run: str, names: Sequence[str]) -> str:
    """Return in words what is wrong with a generated file; empty if nothing is wrong.

    Args:
        content: the content of the file.
        run: the function that each test must call.
        names: the names of the tests.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it is not a Python file: {type(error).__name__}: {error}"
    expected = [*_HEAD, f"from kvledger.adapters.lab.repro import {run}", 'LOG = Path(__file__).with_suffix(".kvlog")']
    docstring, head, tests = tree.body[:1], tree.body[1 : 1 + len(expected)], tree.body[1 + len(expected) :]
    if not _is_docstring(docstring):
        return "it does not begin with a docstring, or the docstring has code that other tools run"
    if [ast.dump(statement) for statement in head] != [ast.dump(ast.parse(line).body[0]) for line in expected]:
        return "the docstring is not followed by the imports and the path of the log"
    if [test.name if isinstance(test, ast.FunctionDef) else "" for test in tests] != list(names):
        return f"the path of the log is not followed by exactly these tests: {', '.join(names)}"
    return next(
        (f"the test {name} has other code" for name, test in zip(names, tests, strict=True) if not _is_test(test, run)),
        "",
    )


_HEAD = ("from __future__ import annotations", "from pathlib import Path")
_ASSERTIONS = (
    ("trouble = CALL.trouble(LITERAL)", "assert not trouble, trouble"),
    ("trouble = CALL.trouble(LITERAL, besides=LITERAL)", "assert not trouble, trouble"),
    ("outcome = CALL", "trouble = outcome.trouble(LITERAL)", "assert not trouble, trouble"),
    ("outcome = CALL", "trouble = outcome.trouble(LITERAL, besides=LITERAL)", "assert not trouble, trouble"),
    ("assert CALL.other_answers == []",),
    ("outcome = CALL", "assert outcome.other_answers == []"),
)
"""The bodies that a test may have. CALL is a rerun of LOG."""


def _is_docstring(statements: Sequence[ast.stmt]) -> bool:
    match statements:
        case [ast.Expr(ast.Constant(str(text)))]:
            return not any(sign in text for sign in RUN_IN_DOCSTRINGS)
    return False


def _is_test(test: ast.stmt, run: str) -> bool:
    """Whether a statement is a function without arguments or decorators, whose body is one of `_ASSERTIONS`."""
    if not isinstance(test, ast.FunctionDef) or not _is_docstring(test.body[:1]):
        return False
    signature = ast.parse(f"def {test.name}() -> None: ...").body[0]
    signature.body = test.body  # type: ignore[attr-defined]
    if ast.dump(signature) != ast.dump(test):
        return False
    body = [ast.dump(_Abstract(run).visit(statement)) for statement in test.body[1:]]
    return any(body == [ast.dump(ast.parse(line).body[0]) for line in lines] for lines in _ASSERTIONS)


class _Abstract(ast.NodeTransformer):
    """Replaces the parts of a test that may vary by names, so that the test can be compared.

    The call that runs LOG again becomes CALL, if its other arguments are literals. In other calls, literal arguments
    become LITERAL.
    """

    def __init__(self, run: str) -> None:
        self._run = run

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace the call that runs LOG again. In any other call, replace the arguments that are literals."""
        match node:
            case ast.Call(ast.Name(name), [ast.Name("LOG")], keywords) if name == self._run:
                if all(keyword.arg and _is_literal(keyword.value) for keyword in keywords):
                    return ast.Name("CALL", ast.Load())
                return node
        node.func = self.visit(node.func)
        node.args = [_literal(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = _literal(keyword.value)
        return node


def _literal(node: ast.expr) -> ast.expr:
    return ast.Name("LITERAL", ast.Load()) if _is_literal(node) else node


def _is_literal(node: ast.expr) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements):
            return all(map(_is_literal, elements))
        case ast.Dict(keys, values):
            return all(key is not None and _is_literal(key) for key in keys) and all(map(_is_literal, values))
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float())):
            return True
    return False
