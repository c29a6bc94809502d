"""Sudoku, a task whose every answer can be checked exactly: puzzles, a solver, training samples, tokens and text."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "puzzles": ["SPLITS", "base_puzzles", "generate_puzzles", "make_puzzle", "split_of", "symmetry_invariant"],
        "solver": ["Grid", "check_solution", "find_clash", "follows_rules", "solutions"],
        "stream": ["SudokuStream", "scramble"],
        "text": ["EOS_ID", "MASK_ID", "grid_to_text", "parse_puzzle", "sudoku_tokenizer"],
    },
)
