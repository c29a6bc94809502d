"""What the cards of models trained on Sudoku and on Python say in words."""

from collections.abc import Callable
from dataclasses import replace

from dlm.data.lines import STDLIB
from dlm.evaluation.card import About


def about_sudoku(name: str) -> About:
    return About(
        summary=f"`{name}` fills 9×9 Sudoku grids by masked diffusion: one token a cell, the empty cells are masks, and they are "
        "filled in the order the model is sure of, not from left to right.",
        use=f'```python\nimport dlm\n\nlm = dlm.load("{name}")\n'
        'puzzle = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"\n'
        'print(dlm.infill(lm, [lm.encode(puzzle)], rule="margin", check="sudoku", retry_temperature=1.5)[0].text)\n```',
        data="Puzzles from the project's own generator (`dlm.sudoku`), each with exactly one solution, scrambled by Sudoku's "
        "symmetries as they are drawn. A quarter of all symmetry classes, chosen by a hash that no symmetry changes, is held "
        "out; no training puzzle is of a held-out class.",
        limits="It is a network, not a solver: nothing makes it keep the rules, and an answer may break them. With "
        '`check = "sudoku"` it fills the grid anew until the rules hold, and `.passed` tells whether they do. '
        "Puzzles with fewer or more empty cells than those measured, with no "
        "solution or with several, were not measured. It knows nothing but Sudoku.",
        tags=("sudoku",),
        config="sudoku-hard" if name == "sudoku" else None,
        before=("dlm-train --config sudoku",) if name == "sudoku" else (),
    )


USE = '```python\nimport dlm\n\nlm = dlm.load("{name}")\nprint({call}[0].text)\n```'
CONTINUED = 'dlm.generate(lm, ["import os\\n\\n\\ndef "], gen_length=64)'


def about_code(name: str) -> About:
    return _python(
        f"`{name}` is a small masked diffusion model of Python source code. It writes a gap from both sides at once.",
        USE.format(
            name=name, call='dlm.infill(lm, ["try:\\n    value = cache[key]\\n[MASK:2]:\\n    value = None\\n"])'
        ),
    )


def about_block(name: str) -> About:
    return _python(
        f"`{name}` is a small block-diffusion model of Python source code: it continues text a few tokens at a time, in "
        "parallel within a block, and its cache is exact.",
        USE.format(name=name, call=CONTINUED),
        "block-diffusion",
    )


def about_draft(name: str) -> About:
    about = _python(
        f"`{name}` is a DFlash draft for `pico-causal`: one layer that guesses the next tokens in one forward, which the model "
        "then checks in one. The text is the model's own, token for token, in fewer forwards.",
        f'```python\nimport dlm\n\nlm = dlm.load("pico-causal")\n'
        f'print(dlm.generate(lm, ["import os\\n\\n\\ndef "], gen_length=64, draft="{name}")[0].text)\n```',
        "speculative-decoding",
    )
    answers = "What `pico-causal` itself writes at temperature 0.8 after the first 32 tokens of 8,000 training sequences. They are from: "
    commands = ("dlm-prepare trajectories --config dflash/pico-responses",)
    return replace(about, data=answers + about.data, config="dflash/pico", before=commands)


def about_causal(name: str) -> About:
    return _python(
        f"`{name}` is a small autoregressive model of Python source code: what the diffusion models `pico-block` and `pico` "
        "are made from, and a judge of what they write. A text that it continues begins with end-of-text, which its tokenizer puts "
        "there; put it before token ids yourself (`lm.tokenizer.begin`): without it, short texts end in loops.",
        USE.format(name=name, call=CONTINUED),
        "causal-lm",
        before=("dlm-tokenizer --config pico-tokenizer", "dlm-train --config pico-trunk"),
    )


def _python(summary: str, use: str, method: str = "masked-diffusion", before: tuple[str, ...] = ()) -> About:
    from dlm.data.corpus import describe

    corpus = describe(STDLIB)
    return About(
        summary=summary,
        use=use,
        method=method,
        data=f"The standard library of Python {corpus['python']} with its tests, without generated tables, and the installed "
        f"packages that the config below names. Held out by a hash of the path: {corpus['heldout_files']} files, "
        f"{corpus['heldout_bytes']:,} bytes. No training file is a copy of one: none has its words in the same order, none shares "
        "ten telling lines (24 characters and more, no comments) that are half of all, and none that shares three of them has 30 % of its "
        "runs of eight tokens, each counted by the smaller of the two files (`dlm/data/duplicates.py`). The tokenizer is a byte-level BPE learned "
        "from the training files. The sources stay under their own licences.",
        limits="It is small and was trained on one library: it knows Python's looks and some of its idiom, not what code does. "
        "Names, arguments and logic are often wrong; do not run what it writes unread. It was not trained on instructions "
        "or on any natural language but that of comments. The held-out split is that of the Python named above; under "
        "another Python the files differ.",
        tags=("code", "python"),
        before=before,
    )


ABOUT: dict[str, Callable[[str], About]] = {
    "sudoku": about_sudoku,
    "code": about_code,
    "block": about_block,
    "causal": about_causal,
    "draft": about_draft,
}
