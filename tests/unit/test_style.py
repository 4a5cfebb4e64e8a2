"""The limits that keep every file one responsibility and every function one thought."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "models", "export", "quantize", "runtime", "tests", "scripts", "benchmarks")
MOST_LINES = 400
MOST_FUNCTION_LINES = 50
MOST_PARAMETERS = 7
# Torch custom ops take numbers and tensors, no dataclass: the file that defines one and its lowerings, which
# are called after it, share its long signature.
CUSTOM_OPS = {"cached_attention", "experts"}
VAGUE = {"utils", "util", "helpers", "helper", "misc", "common", "base"}


def files() -> Iterator[tuple[str, str]]:
    """(path from the root, text) of every Python file of the project."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a caller sees."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    extra = (node.args.vararg is not None) + (node.args.kwarg is not None)
    return len(names) - (names[:1] in (["self"], ["cls"])) + extra


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_files_are_short() -> None:
    assert [
        f"{path}: {n} lines" for path, text in files() if (n := text.count("\n")) > MOST_LINES
    ] == []


def test_functions_are_short() -> None:
    assert [
        f"{path}:{node.lineno}: {node.name} has {body_lines(node)} lines"
        for path, text in files()
        for node in functions(text)
        if body_lines(node) > MOST_FUNCTION_LINES
    ] == []


def custom_op(path: str, name: str) -> str | None:
    """The custom op whose signature a function shares."""
    for op in CUSTOM_OPS:
        if path == f"models/layers/{op}.py" or (
            path.startswith("export/lowerings/") and op in name
        ):
            return op
    return None


def test_functions_take_few_parameters() -> None:
    over = [
        (path, node.name, parameters(node))
        for path, text in files()
        for node in functions(text)
        if parameters(node) > MOST_PARAMETERS
    ]
    assert [found for found in over if custom_op(*found[:2]) is None] == []
    assert {custom_op(*found[:2]) for found in over} == CUSTOM_OPS


def test_files_have_a_name_and_say_what_they_are() -> None:
    vague = [path for path, _ in files() if Path(path).stem in VAGUE]
    silent = [
        path
        for path, text in files()
        if text.strip() and ast.get_docstring(ast.parse(text)) is None
    ]
    assert (vague, silent) == ([], [])


def narrows(node: ast.Assert) -> bool:
    """Whether an assertion only tells the type checker that something is not None."""
    test = node.test
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and node.msg is None


def test_user_input_is_never_asserted() -> None:
    """`python -O` removes assertions, and what they say is no message."""
    assert [
        f"{path}:{node.lineno}"
        for path, text in files()
        if not path.startswith("tests/")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assert) and not narrows(node)
    ] == []


def test_tests_compare_with_tolerances_that_mean_something() -> None:
    loose = re.compile(r"rtol\s*=\s*1(\.0*)?\b(?!e)|xfail\([^)]*strict\s*=\s*False")
    found = [path for path, text in files() if path.startswith("tests/") and loose.search(text)]
    assert [path for path in found if path != "tests/unit/test_style.py"] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, b, /, c, *, d): pass", 4),
        ("class A:\n def f(self, a, *args, **kwargs): pass", 3),
        ("async def f(): pass", 0),
    ],
)
def test_parameters_are_counted(source: str, expected: int) -> None:
    assert [parameters(node) for node in functions(source)] == [expected]


def test_lines_are_counted() -> None:
    (node,) = functions('def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n')
    assert body_lines(node) == 3
