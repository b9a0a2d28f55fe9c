"""Docstrings make sense without the code around them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent
FRAGMENT = re.compile(r"(Of|That|By|What|How|Whether|Where|As) ")
UNCLEAR = re.compile(r"\b(anew|so many|so long|told|asked for|come to|goes by|of its own|wish|life|news)\b")


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, and of its classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield " ".join(str(statement.value.value).split())


def unclear(source: str) -> list[str]:
    return [text for text in docstrings(source) if FRAGMENT.match(text) or UNCLEAR.search(text)]


def test_no_docstring_is_a_fragment_or_needs_a_second_reading():
    found = {str(file.relative_to(PACKAGE)): unclear(file.read_text()) for file in PACKAGE.rglob("*.py")}
    assert {file: texts for file, texts in found.items() if texts} == {}


@pytest.mark.parametrize("text", ["Of the starting states.", "Number of envs that is asked for."])
def test_an_unclear_docstring_is_found(text: str):
    assert unclear(f'class Options:\n    envs: int = 1\n    """{text}"""\n') == [text]
