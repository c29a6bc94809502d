"""Single lines of source files, and small functions with one missing: what is to be filled in."""

import ast
import io
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from dlm.data.config import DataConfig
from dlm.errors import UserError

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
CODE = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
# From Python 3.12 on a string with braces is many tokens, what stands in the braces among them.
BEGIN, END = ({getattr(tokenize, f"{kind}STRING_{edge}", None) for kind in "FT"} for edge in ("START", "END"))

STDLIB = DataConfig(source="stdlib", include_tests=True)
"""What the bundled models of Python are held to, as their configs have it; the packages they also read are never held out."""


@dataclass(frozen=True, kw_only=True)
class LineTask:
    """A text with one line, or the end of one, missing: prefix + line + suffix is the whole."""

    name: str
    prefix: str
    line: str
    """Without its line break."""
    suffix: str
    """Begins with the line break, where the text goes on."""

    def filled(self, answer: str) -> str:
        """The text with `answer` in place of the line."""
        return self.prefix + answer + self.suffix


def heldout_lines(
    data: DataConfig, count: int = 250, seed: int = 0, *, context: int = 400, shortest: int = 8, longest: int = 100
) -> list[LineTask]:
    """`count` lines drawn evenly from all that qualify in the held-out files of `data` (source stdlib or text).

    A line qualifies when it holds code and is no part of a string or comment over several lines, its file parses, its
    code has `shortest` to `longest` characters, and `context` characters stand before and after it. What is to be
    filled is the line from its first visible character on: the indentation is left to the prefix.
    """
    from dlm.data.source import rows_of

    if data.source not in ("stdlib", "text"):
        raise UserError(f'data.source = "{data.source}": lines are taken from whole files, so from "stdlib" or "text"')
    found: list[LineTask] = []
    for row in rows_of(data, "heldout"):
        text = row.value["text"]
        name = blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest() if row.key == text else row.key
        found += lines_of(name, text, context=context, shortest=shortest, longest=longest)
    if not found:
        raise UserError(
            f'no line of the held-out split of data.source = "{data.source}" has code and {context} characters around it: '
            "raise data.heldout_fraction, or ask for less context"
        )
    chosen = np.random.default_rng(seed).permutation(len(found))[:count]
    return [found[i] for i in chosen]


def lines_of(name: str, text: str, *, context: int = 400, shortest: int = 8, longest: int = 100) -> Iterator[LineTask]:
    """The lines of one text that qualify, see `heldout_lines`; none where the text does not parse."""
    if not parses(text):
        return
    rows, start = code_rows(text), 0
    for number, line in enumerate(text.split("\n"), start=1):
        code = line.strip()
        if number in rows and shortest <= len(code) <= longest:
            begin = start + len(line) - len(line.lstrip())
            if begin >= context and len(text) - (start + len(line)) >= context:
                end = begin + len(code)
                yield LineTask(name=f"{name}:{number}", prefix=text[:begin], line=code, suffix=text[end:])
        start += len(line) + 1


def small_functions(text: str, rows: tuple[int, int] = (3, 15)) -> Iterator[str]:
    """The functions of a text that have so many rows and no decorators, each as a text that parses by itself."""
    tree, lines = _tree(text), text.split("\n")
    for node in ast.walk(tree) if isinstance(tree, ast.Module) else ():
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.end_lineno is None:
            continue
        function = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
        if rows[0] <= function.count("\n") <= rows[1] and parses(
            function
        ):  # a string over several rows may hinder dedent
            yield function


def code_rows(text: str) -> set[int]:
    """Numbers, from 1, of the lines with code that no string over several lines touches."""
    code: set[int] = set()
    touched: set[int] = set()
    open_strings: list[int] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            first, last = token.start[0], token.end[0]
            if token.type in BEGIN:
                open_strings.append(first)
            elif open_strings:
                if token.type in END and last > (first := open_strings.pop()):
                    touched.update(range(first, last + 1))
            elif token.type not in LAYOUT and last > first:
                touched.update(range(first, last + 1))
            elif token.type in CODE:
                code.add(first)
    except (tokenize.TokenError, SyntaxError):  # e.g. form feeds between indents, which ast accepts
        return set()
    return code - touched


def parses(text: str) -> bool:
    """Whether the running Python can parse `text` as a module."""
    return fault(text) is None


def fault(text: str) -> int | None:
    """The row, from 1, at which the running Python finds that `text` is no module; None where it is one."""
    found = _tree(text)
    return None if isinstance(found, ast.Module) else found


def _tree(text: str) -> ast.Module | int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape is no error
        try:
            return ast.parse(text)
        except SyntaxError as error:
            return error.lineno or 1
        except (ValueError, RecursionError, MemoryError):  # ValueError: null bytes
            return 1
