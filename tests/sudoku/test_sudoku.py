import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from dlm import sudoku
from dlm.errors import UserError
from dlm.sudoku import puzzles, solver
from dlm.sudoku import stream as stream_of
from tests.refusals import refused

# The puzzle of Wikipedia's article "Sudoku" and its published solution.
KNOWN = "53..7.... 6..195... .98....6. 8...6...3 4..8.3..1 7...2...6 .6....28. ...419..5 ....8..79"
ANSWER = "534678912 672195348 198342567 859761423 426853791 713924856 961537284 287419635 345286179"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool")


def stream(folder: Path, **options: object) -> sudoku.SudokuStream:
    return sudoku.SudokuStream(pool_size=8, folder=folder, **options)  # type: ignore[arg-type]


def count_by_backtracking(puzzle: np.ndarray, limit: int = 2) -> int:
    """Sets and recursion on the emptiest cell: no exact cover, no bits, no hidden singles."""
    grid = puzzle.reshape(9, 9).tolist()

    def free(r: int, c: int) -> set[int]:
        box = {grid[y][x] for y in range(r - r % 3, r - r % 3 + 3) for x in range(c - c % 3, c - c % 3 + 3)}
        return set(range(1, 10)) - set(grid[r]) - {row[c] for row in grid} - box

    def count(left: int) -> int:
        holes = [(len(choices := free(r, c)), r, c, choices) for r in range(9) for c in range(9) if not grid[r][c]]
        if not holes:
            return 1
        _, r, c, choices = min(holes, key=lambda hole: hole[0])
        found = 0
        for digit in choices:
            grid[r][c] = digit
            found += count(left - found)
            if found >= left:
                break
        grid[r][c] = 0
        return found

    return count(limit)


def test_known_puzzle():
    puzzle, answer = sudoku.parse_puzzle(KNOWN), sudoku.parse_puzzle(ANSWER)
    assert [found.tolist() for found in sudoku.solutions(puzzle)] == [answer.tolist()]
    assert count_by_backtracking(puzzle) == 1


def test_solutions_counts_like_backtracking():
    rng = np.random.default_rng(1)
    puzzle, _ = sudoku.make_puzzle(rng)
    for removed in (1, 2):  # a minimal puzzle without one of its givens has several solutions
        puzzle = puzzle.copy()
        puzzle[rng.choice(np.flatnonzero(puzzle), removed, replace=False)] = 0
        found = sudoku.solutions(puzzle, limit=5)
        assert len(found) == count_by_backtracking(puzzle, 5) > 1
        assert len({grid.tobytes() for grid in found}) == len(found)
        assert all(sudoku.check_solution(puzzle, grid) for grid in found)


@pytest.mark.parametrize(
    "text",
    [  # three in which singles found together exclude each other, deep in a wrong branch
        "76...1...5..8...3...17.5.9........6...358.....9.3.7..4..2....87.........1...28..5",
        ".4...2....89......5......4....21.6...6.4..3.8..38....78.......4.35.........16...9",
        "4..............7.19..2..36...79..1....6....2..8.3.6.9.5..8....9.1...5.......37...",
    ],
)
def test_singles_that_exclude_each_other(text):
    puzzle = sudoku.parse_puzzle(text)
    (found,) = sudoku.solutions(puzzle)
    assert sudoku.check_solution(puzzle, found)


def test_solutions_of_the_impossible_and_the_empty():
    clash = np.zeros(81, np.int8)
    clash[[0, 8]] = 4
    stuck = sudoku.parse_puzzle("12345678. ........9" + "." * 63)
    assert sudoku.solutions(clash) == sudoku.solutions(stuck) == []
    assert len(sudoku.solutions(np.zeros(81, np.int8), limit=3)) == 3


def test_generated_puzzles_have_one_solution():
    puzzles, answers = sudoku.generate_puzzles(6, (30, 55), seed=3)
    assert (((puzzles == 0).sum(1) >= 30) & ((puzzles == 0).sum(1) <= 55)).all()
    for puzzle, answer in zip(puzzles, answers, strict=True):
        assert sudoku.check_solution(puzzle, answer)
        assert count_by_backtracking(puzzle) == 1


@pytest.mark.parametrize("empty", [0, 30, 55])
def test_asked_number_of_holes(empty):
    puzzle, answer = sudoku.make_puzzle(np.random.default_rng(empty), empty)
    assert (puzzle == 0).sum() == empty
    assert [found.tolist() for found in sudoku.solutions(puzzle)] == [answer.tolist()]


def test_dug_out_puzzle_is_minimal():
    puzzle, answer = sudoku.make_puzzle(np.random.default_rng(5))
    assert (puzzle == 0).sum() >= 50
    assert (answer[puzzle > 0] == puzzle[puzzle > 0]).all()
    for cell in np.flatnonzero(puzzle):
        fewer = puzzle.copy()
        fewer[cell] = 0
        assert len(sudoku.solutions(fewer)) == 2


def test_puzzle_depends_on_its_own_address():
    many, _ = sudoku.generate_puzzles(4, seed=7)
    few, _ = sudoku.generate_puzzles(2, seed=7)
    other, _ = sudoku.generate_puzzles(2, seed=8)
    assert (many[:2] == few).all()
    assert (few != other).any(1).all()


def test_symmetries_keep_rules_uniqueness_and_class():
    rng = np.random.default_rng(2)
    pair = np.stack(sudoku.make_puzzle(rng))
    moved = sudoku.scramble(rng, np.repeat(pair[None], 40, 0))
    assert len({grid.tobytes() for grid in moved}) == 40
    assert sudoku.follows_rules(moved[:, 1]).all()
    assert {sudoku.symmetry_invariant(grid) for grid in moved[:, 1]} == {sudoku.symmetry_invariant(pair[1])}
    for puzzle, answer in moved[:10]:
        assert [found.tolist() for found in sudoku.solutions(puzzle)] == [answer.tolist()]


def test_invariant_tells_random_grids_apart():
    rng = np.random.default_rng(4)
    grids = [puzzles.random_grid(rng) for _ in range(60)]
    assert len({sudoku.symmetry_invariant(grid) for grid in grids}) == 60
    assert {sudoku.split_of(grid) for grid in grids} == set(sudoku.SPLITS)


def test_splits_share_no_symmetry_class(folder):
    """The same seed on both sides: it is the class of the grid that keeps them apart, not the seed."""
    train = sudoku.base_puzzles(8, "train", folder=folder)[:, 1]
    heldout = np.concatenate([sudoku.base_puzzles(8, "heldout", folder=folder)[:, 1], sudoku.generate_puzzles(6)[1]])
    assert {sudoku.split_of(grid) for grid in train} == {"train"}
    assert {sudoku.split_of(grid) for grid in heldout} == {"heldout"}

    def relabelled(grid: np.ndarray) -> bytes:  # digits in order of first appearance
        return np.argsort(grid[:9])[grid - 1].tobytes()

    assert not {relabelled(grid) for grid in train} & {relabelled(grid) for grid in heldout}


def test_stream_samples(folder):
    samples = list(itertools.islice(stream(folder, empty=(20, 60)), 600))
    assert [sample["index"] for sample in samples] == list(range(600))
    for sample in samples:
        ids, given = sample["input_ids"], sample["prompt_mask"]
        assert (ids.shape, ids.dtype, given.shape, given.dtype) == ((81,), np.int32, (81,), np.bool_)
    assert sudoku.follows_rules(np.stack([sample["input_ids"] for sample in samples])).all()
    empty = [(~sample["prompt_mask"]).sum() for sample in samples]
    assert min(empty) == 20 and max(empty) >= 53
    for sample in samples[:30]:
        puzzle = np.where(sample["prompt_mask"], sample["input_ids"], 0).astype(np.int8)
        assert [found.tolist() for found in sudoku.solutions(puzzle)] == [sample["input_ids"].tolist()]


def test_stream_is_addressed_and_resumes(folder):
    whole = list(itertools.islice(stream(folder, seed=9), 300))
    first = stream(folder, seed=9)
    list(itertools.islice(first, 250))
    second = stream(folder, seed=9)
    second.load_state_dict(first.state_dict())
    for want, got in zip(whole[250:], second, strict=False):
        assert all(np.array_equal(got[name], want[name]) for name in ("index", "input_ids", "prompt_mask"))
    alone = stream(folder, seed=9).sample(299)
    assert (alone["input_ids"] == whole[299]["input_ids"]).all()
    assert any((stream(folder, seed=10).sample(0)["input_ids"] != whole[0]["input_ids"]).tolist())
    assert any((stream(folder, seed=9, split="heldout").sample(0)["input_ids"] != whole[0]["input_ids"]).tolist())


def test_samples_are_not_the_callers_to_spoil(folder):
    samples = stream(folder)
    samples.sample(0)["input_ids"][:] = 0
    assert samples.sample(0)["input_ids"].min() == 1


def test_a_stream_searches_nothing_and_draws_by_the_block(folder, monkeypatch):
    samples = stream(folder)
    drawn, scramble = [], sudoku.scramble
    monkeypatch.setattr(stream_of, "scramble", lambda rng, pairs: drawn.append(len(pairs)) or scramble(rng, pairs))
    for room in (puzzles, solver):
        monkeypatch.setattr(room, "search", None)  # to solve a puzzle takes a thousand times as long as to shuffle one
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        list(itertools.islice(samples, 4 * stream_of.BLOCK))
    finally:
        sys.setprofile(None)
    assert drawn == [stream_of.BLOCK] * 4
    assert events.count("call") < 6 * 4 * stream_of.BLOCK  # Python functions a sample, what a block costs included


def test_pool_grows_from_disk_and_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setenv("DLM_CACHE", str(tmp_path))
    made, make = [], puzzles.make_puzzle
    monkeypatch.setattr(puzzles, "make_puzzle", lambda *address: made.append(address) or make(*address))
    small, larger = sudoku.base_puzzles(2), sudoku.base_puzzles(3)
    assert (larger[:2] == small).all() and len(made) == 3
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:200])
    assert (sudoku.base_puzzles(2, folder=tmp_path) == small).all()
    spoiled = small.copy()
    spoiled[0, 1, 0] = spoiled[0, 1, 1]
    np.save(path, spoiled)
    assert (sudoku.base_puzzles(2, folder=tmp_path) == small).all()


def test_pool_without_a_writable_cache(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert sudoku.base_puzzles(1, folder=tmp_path / "file" / "cache").shape == (1, 2, 81)


def test_tokenizer_round_trip(tmp_path):
    sudoku.sudoku_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (sudoku.sudoku_tokenizer(), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))):
        assert tokenizer.get_vocab_size() == 11
        assert tokenizer.token_to_id("[EOS]") == sudoku.EOS_ID == 0
        assert tokenizer.token_to_id("[MASK]") == sudoku.MASK_ID == 10
        assert tokenizer.encode("5 3.\n0_[MASK]7[EOS]").ids == [5, 3, 10, 10, 10, 10, 7, 0]
        ids = sudoku.parse_puzzle(ANSWER).tolist()
        assert tokenizer.encode(ANSWER).ids == ids
        assert tokenizer.decode([*ids, 10, 0]) == ANSWER.replace(" ", "")
        assert tokenizer.decode([5, 10, 0], skip_special_tokens=False) == "5[MASK][EOS]"


def test_printed_grid_is_read_back():
    puzzle, answer = sudoku.parse_puzzle(KNOWN), sudoku.parse_puzzle(ANSWER)
    plain, marked = sudoku.grid_to_text(puzzle), sudoku.grid_to_text(answer, puzzle > 0)
    assert plain.splitlines()[0] == "5 3 . │ . 7 . │ . . ."
    assert marked.splitlines()[0] == "5' 3' 4  │ 6  7' 8  │ 9  1  2 "
    assert len({len(line) for line in marked.splitlines()}) == len({len(line) for line in plain.splitlines()}) == 1
    assert (sudoku.parse_puzzle(plain) == puzzle).all()
    assert (sudoku.parse_puzzle(marked) == answer).all()
    masked = np.where(puzzle == 0, sudoku.MASK_ID, puzzle)
    assert sudoku.sudoku_tokenizer().encode(plain).ids == masked.tolist()
    assert sudoku.grid_to_text(masked) == plain
    assert sudoku.grid_to_text(answer, puzzle > 0, color=True).startswith("\x1b[1m5\x1b[0m")


def test_check_solution():
    puzzle, answer = sudoku.parse_puzzle(KNOWN), sudoku.parse_puzzle(ANSWER)
    assert sudoku.check_solution(puzzle, answer)
    assert not sudoku.check_solution(puzzle, answer[:80])
    assert not sudoku.check_solution(puzzle, puzzle)
    relabelled = (answer % 9 + 1).astype(np.int8)  # every rule holds, the givens do not
    assert sudoku.check_solution(np.zeros(81, np.int8), relabelled)
    assert not sudoku.check_solution(puzzle, relabelled)
    for a, b in ((2, 11), (2, 3), (2, 20)):  # two cells exchanged break columns, rows or boxes
        wrong = answer.copy()
        wrong[[a, b]] = wrong[[b, a]]
        assert not sudoku.check_solution(np.zeros(81, np.int8), wrong)
    shifted = np.array([(r + c) % 9 + 1 for r in range(9) for c in range(9)], np.int8)  # rows and columns, not boxes
    assert not sudoku.check_solution(np.zeros(81, np.int8), shifted)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["0 cells", "81"]),
        (KNOWN[:-1], ["80 cells"]),
        (KNOWN.replace(" ", "\n").replace("8...6...3", "8...6..3"), ["80 cells", "row 4 has 8"]),
        (KNOWN.replace(" ", "\n").replace("4..8", "4.x8"), ["line 5, column 3", "'x'"]),
        ("[MASK]٣" + "." * 79, ["line 1, column 7"]),
        ("5" + KNOWN[1:8] + "5" + KNOWN[9:], ["has 5 twice", "row 1, column 1", "row 1, column 9"]),
    ],
)
def test_bad_puzzles(text, words):
    with pytest.raises(UserError) as caught:
        sudoku.parse_puzzle(text)
    assert all(word in str(caught.value) for word in words), caught.value


def test_bad_arguments(folder):
    refused(r"'test'.*train, heldout", stream, folder, split="test")
    refused(r"empty=\(60, 20\)", stream, folder, empty=(60, 20))
    refused("pool_size=0", sudoku.SudokuStream, pool_size=0)
    refused("empty=64", sudoku.generate_puzzles, 1, 64)
    refused("empty=-1", sudoku.make_puzzle, np.random.default_rng(0), -1)
