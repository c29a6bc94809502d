"""How good a model is: tasks, likelihood bound, Sudoku, infilled lines, and the card that says so."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "asking": ["Answers", "evaluate"],
        "bound": ["BoundResult", "measure_bound"],
        "card": ["Run", "render_card"],
        "filling": ["Filling", "fill"],
        "harness": ["HarnessLM"],
        "infill": ["InfillResult", "evaluate_infill"],
        "lines": ["LineTask", "heldout_lines", "read_tasks"],
        "questions": ["load_questions"],
        "rate": ["Rate"],
        "programs": ["Problem", "pass_at_k", "read_problems"],
        "sandbox": ["Sandbox", "run_program"],
        "score": ["Score"],
        "sudoku": ["SudokuResult", "evaluate_sudoku"],
        "table": ["markdown"],
        "task": ["Grade", "Question", "Task"],
        "tasks": ["TASKS"],
    },
)
