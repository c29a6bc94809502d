"""How good a model is: tasks, likelihood bound, Sudoku, infilled lines, and the card that says so."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "asking": ["Answers", "evaluate"],
        "bound": ["BoundResult", "measure_bound"],
        "card": ["Run", "render_card"],
        "harness": ["HarnessLM"],
        "lines": ["LineTask", "heldout_lines"],
        "questions": ["load_questions"],
        "rate": ["Rate"],
        "programs": ["Problem", "pass_at_k", "read_problems"],
        "sandbox": ["Sandbox", "run_program"],
        "score": ["Score"],
        "sudoku": ["Puzzles", "heldout_puzzles"],
        "table": ["markdown"],
        "task": ["Grade", "Question", "Task"],
        "tasks": ["TASKS"],
    },
)
