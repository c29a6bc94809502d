"""Words of short answers, compared as SQuAD does (arXiv 1606.05250)."""

import re
import string
import unicodedata
from collections import Counter


def normalise(text: str) -> str:
    """SQuAD's: lower case, without punctuation, articles and extra blanks."""
    kept = "".join(c for c in text.casefold() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", kept).split())


def f1(got: str, want: str) -> float:
    """Of the words of two normalised answers; a yes or no is right or wrong."""
    if got == want:
        return float(bool(got))
    if {got, want} & {"yes", "no", "noanswer"}:
        return 0.0
    first, second = got.split(), want.split()
    common = sum((Counter(first) & Counter(second)).values())
    return 2 * common / (len(first) + len(second)) if common else 0.0
