"""What the cards of models trained on Sudoku and on Python say in words."""

from collections.abc import Callable

from dlm.data.config import DataConfig
from dlm.evaluation.card import About

# The held-out text of the bundled `pico`, as its config has it; the packages it also reads are never held out.
STDLIB = DataConfig(source="stdlib", include_tests=True)


def about_sudoku(name: str) -> About:
    return About(
        summary=f"`{name}` fills 9×9 Sudoku grids by masked diffusion: one token a cell, the empty cells are masks, and they are "
        "filled in the order the model is sure of, not from left to right.",
        use=f'```python\nimport dlm\n\nlm = dlm.load("{name}")\n'
        'puzzle = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"\n'
        'print(dlm.infill(lm, [lm.encode(puzzle)], rule="margin")[0].text)\n```',
        data="Puzzles from the project's own generator (`dlm.sudoku`), each with exactly one solution, scrambled by Sudoku's "
        "symmetries as they are drawn. A quarter of all symmetry classes, chosen by a hash that no symmetry changes, is held "
        "out; no training puzzle is of a held-out class.",
        limits="It is a network, not a solver: nothing makes it keep the rules, and an answer may break them. "
        "Check it with `dlm.sudoku.check_solution`. Puzzles with fewer or more empty cells than those measured, with no "
        "solution or with several, were not measured. It knows nothing but Sudoku.",
        tags=("sudoku",),
    )


def about_code(name: str) -> About:
    from dlm.data.corpus import describe

    corpus = describe(STDLIB)
    return About(
        summary=f"`{name}` is a small masked diffusion model of Python source code. It writes a gap from both sides at once.",
        use=f'```python\nimport dlm\n\nlm = dlm.load("{name}")\n'
        'print(dlm.infill(lm, ["def area(r):\\n    return [MASK:3] * r ** 2\\n"])[0].text)\n```',
        data=f"The standard library of Python {corpus['python']} with its tests, without generated tables, and the installed "
        f"packages that the config below names. Held out by a hash of the path: {corpus['heldout_files']} files, "
        f"{corpus['heldout_bytes']:,} bytes; no training file is a copy of one. The tokenizer is a byte-level BPE learned "
        "from the training files. The sources stay under their own licences.",
        limits="It is small and was trained on one library: it knows Python's looks and some of its idiom, not what code does. "
        "Names, arguments and logic are often wrong; do not run what it writes unread. It was not trained on instructions "
        "or on any natural language but that of comments. The held-out split is that of the Python named above; under "
        "another Python the files differ.",
        tags=("code", "python"),
    )


ABOUT: dict[str, Callable[[str], About]] = {"sudoku": about_sudoku, "code": about_code}
