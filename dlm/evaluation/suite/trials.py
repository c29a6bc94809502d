"""The kinds of tasks that the suite knows, by the word that a config calls them."""

from dlm.evaluation.suite.code import MBPP, Code, Infilling
from dlm.evaluation.suite.perplexity import Perplexity
from dlm.evaluation.suite.texts import FromFile, Lines, Questions, Sudoku
from dlm.evaluation.suite.trial import Trial
from dlm.evaluation.suite.whole import Bound, LmEval

TRIALS: dict[str, type[Trial]] = {
    "humaneval": Code,
    "mbpp": MBPP,
    "infilling": Infilling,
    "lines": Lines,
    "sudoku": Sudoku,
    "questions": Questions,
    "file": FromFile,
    "bound": Bound,
    "perplexity": Perplexity,
    "lm_eval": LmEval,
}
"""`kind` of a [[task]] -> what it does."""
