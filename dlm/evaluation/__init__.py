"""How good a model is: tasks, likelihood bound, Sudoku, infilled lines, and the card that says so."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "asking": ["Answers", "evaluate"],
        "bound": ["BoundResult", "measure_bound"],
        "card": ["Run", "render_card"],
        "filling": ["Filling", "fill"],
        "infill": ["InfillResult", "evaluate_infill"],
        "lines": ["LineTask", "heldout_lines", "read_tasks"],
        "questions": ["load_questions"],
        "rate": ["Rate"],
        "score": ["Score"],
        "sudoku": ["SudokuResult", "evaluate_sudoku"],
        "table": ["markdown"],
        "task": ["Grade", "Question", "Task"],
        "tasks": ["TASKS"],
    },
)
