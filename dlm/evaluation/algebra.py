"""Whether two mathematical answers in LaTeX mean the same, by `math-verify` in a process of its own.

Not in this process: math-verify stops itself by a signal, which works in the main thread only and never inside a power of
millions of digits; and sympy takes seconds to import. The other process is ended after SECONDS, and the answers differ.
"""

import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import unicodedata
from typing import Any

from dlm.errors import UserError

SECONDS = 5
MEMORY = 2**31  # bytes it may take
LONGEST = 2000  # characters of an answer

HIGH = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
SIGNS = str.maketrans("−–÷⁄", "--//") | str.maketrans({"×": "\\times ", "·": "\\cdot ", "π": "\\pi ", "∞": "\\infty "})
SIGNS |= str.maketrans({"∪": "\\cup ", "±": "\\pm ", "≤": "\\le ", "≥": "\\ge ", "°": "^\\circ "})
THOUSANDS = re.compile(r"(?<![\w.,(\[])(?<!\\\{)(\d{1,3}(?:,\d{3})+)(?![\d,])")
UNIT = re.compile(r"\\(?:text|mathrm|mbox|rm)|[\d}]\s+[A-Za-z]")
NAMED = re.compile(r"^\s*\\?\w+\s*=\s*")
WORDS = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{\s*([^\W\d_][^\W\d_ '’-]*(?:[ '’-]+[^\W\d_]+)*)[\s.]*\}"
    r"(?:\s*\\(?:text|mathrm|mbox)\s*\{\s*(?:[kcm]?m|k?g|s|feet|inches|miles|hours|minutes|seconds|degrees|dollars|units)\s*\})?"
)
BASE = re.compile(r"\d\s*_\s*\{?(\d+)")


def same(answer: str, gold: str) -> bool:
    """Whether two answers mean the same: 1/2 is 0.5, and 2(x+1) is 2x+2; units and LaTeX's looks do not count."""
    if not answer.strip() or len(answer) > LONGEST:
        return False
    answer, gold = spelled(answer), spelled(gold)
    if _squeezed(answer) == _squeezed(gold):
        return True
    if (words := _words(gold)) and words == (_words(answer) or NAMED.sub("", answer).strip(" .").casefold()):
        return True
    (ordered, items), (gold_ordered, gold_items) = _items(answer), _items(gold)
    if ordered != gold_ordered and min(len(items), len(gold_items)) > 1:  # math-verify takes a list for a set
        return len(items) == len(gold_items) and all(map(same, items, gold_items))
    bases = [BASE.search(text) for text in (answer, gold)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:  # math-verify reads 2516_7 as 2516
        return False
    return _checker.ask(gold, answer)


def spelled(text: str) -> str:
    """Unicode's signs and thousands' commas as LaTeX that math-verify reads."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: "^{" + found[0].translate(HIGH) + "}", text)
    text = re.sub("[¼½¾⅓⅔⅕⅛]", lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = unicodedata.normalize("NFKC", text).translate(SIGNS).strip()
    return THOUSANDS.sub(lambda found: found[0].replace(",", ""), re.sub(r",\s*\\!\s*", ",", text))


def _squeezed(text: str) -> str:
    """Without blanks, \\text and brackets around one letter; a name's capitals say nothing, a variable's may."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s+|^\((?=\w\)$)|(?<=^\(\w)\)$|[.]$", "", text)
    return text.casefold() if text.isalpha() and len(text) > 1 else text


def _words(text: str) -> str:
    """The words of an answer in \\text, without `x =` before and a unit behind; empty where it is anything else."""
    found = WORDS.fullmatch(NAMED.sub("", text).strip())
    return found[1].casefold() if found else ""


def _items(text: str) -> tuple[bool, list[str]]:
    """Whether brackets keep the order of a list, as a tuple's do, and what stands between its commas."""
    text = re.sub(r"\\(?:left|right|[!,;])|\.$", "", NAMED.sub("", text)).strip()
    ordered = text[:1] in ("(", "[") and text[-1:] in (")", "]")
    inside = text[1:-1] if ordered else re.sub(r"^\\\{|\\\}$", "", text)
    depth, items = 0, [""]
    for sign in inside:
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:  # (1,2) and (3,4): the first bracket is not the last one's
            return False, [text]
        if sign == "," and depth == 0:
            items.append("")
        else:
            items[-1] += sign
    return ordered, items


class _Checker:
    """The other process: started when it is first needed, and anew after each time it was ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, gold: str, answer: str) -> bool:
        """Its verdict; False where it had to be ended."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.process = self._started()
            reply = self._reply(json.dumps([gold, answer]))
            return reply == "true"

    def _started(self) -> "subprocess.Popen[bytes]":
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("answers in LaTeX are compared by math-verify: pip install 'dlm[eval]'")
        command = [sys.executable, "-P", "-c", "from dlm.evaluation.algebra import serve; serve()"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, start_new_session=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)

    def _reply(self, line: str) -> str:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
            found = self.process.stdout.readline().decode().strip()
        except BrokenPipeError:
            found = ""
        if not found:  # it ended itself, or was ended
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
        return found


_checker = _Checker()
os.register_at_fork(after_in_child=_checker.__init__)


def serve() -> None:
    """In the other process: [gold, answer] a line in, true or false a line out. Its own clock kills it."""
    logging.disable()
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig, NormalizationConfig

    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def read(text: str) -> list[Any]:
        # As LaTeX only: its reader of plain expressions runs `eval`. Without a unit, 2ab is not 2 "ab".
        looks = NormalizationConfig(units=UNIT.search(text) is not None, malformed_operators=True, nits=True)
        return parse(f"${text}$", [LatexExtractionConfig(normalization_config=looks)], parsing_timeout=0)

    replies = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        gold, answer = json.loads(line)
        signal.alarm(SECONDS)  # nothing handles it: the system ends the process, whatever it is at
        found = verify(read(gold), read(answer), timeout_seconds=0)
        signal.alarm(0)
        print(json.dumps(bool(found)), file=replies, flush=True)
