"""How good a model is: likelihood bound, Sudoku, infilled lines, and the card that says so. Stands above every other room."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "bound": ["BoundResult", "measure_bound"],
        "card": ["Run", "render_card"],
        "decoding": ["Decoding", "decode"],
        "infill": ["InfillResult", "evaluate_infill"],
        "lines": ["LineTask", "heldout_lines", "read_tasks"],
        "rate": ["Rate"],
        "score": ["Score"],
        "sudoku": ["SudokuResult", "evaluate_sudoku"],
        "table": ["markdown"],
    },
)
