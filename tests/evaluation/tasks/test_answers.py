import pytest

from dlm.evaluation.answers import f1, normalise
from dlm.evaluation.questions import grade
from dlm.evaluation.task import Grade, Question
from dlm.evaluation.tasks import TASKS
from dlm.evaluation.tasks.mmlu import choice_of

GSM8K = [
    ("She has 40 + 105 = 145 points.\n#### 145", "145", True),
    ("\\boxed{145}", "145", True),
    ("first \\boxed{3}, no: \\boxed{145}", "145", True),
    ("The answer is {145}.", "145", True),
    ("put it in {answer}: 145", "145", True),
    ("{answer}", "145", False),
    ("145.00 dollars", "145", True),
    ("The answer is $1,450.", "1450", True),
    ("The answer is \\$1{,}450.00", "1450", True),
    ("So 1,450 minus 2 is what we want. The answer is 1,448, found in 2 steps.", "1448", True),
    ("The answer is 20%.", "20", True),
    ("The answer is 20 %", "0.2", True),
    ("The answer is -3 degrees", "-3", True),
    ("The answer is −3", "-3", True),
    ("The answer is 3", "-3", False),
    ("-$3", "-3", True),
    ("10-3", "3", True),
    ("The answer is 10 - 3 = 7.", "7", True),
    ("half, i.e. 1/2", "0.5", True),
    ("\\boxed{\\frac{7}{2}}", "3.5", True),
    ("3 1/2 hours", "3.5", True),
    ("<<48/2=24>>24 clips", "24", True),
    ("#### $18 per day", "18", True),
    ("**Answer:** 42", "42", True),
    ("The final answer is: **42**", "42", True),
    ("The answer to this question is 5 apples and 3 pears.", "5", True),
    ("\\boxed{x = 5}", "5", True),
    ("\\boxed{18\\text{ dollars}}", "18", True),
    ("#### 5\n\nQuestion: what is 2+2?\n#### 4", "5", True),
    ("<think>maybe 7? \\boxed{7}</think> It is 8.", "8", True),
    ("\\boxed{14", "14", True),  # cut off: the last number is all there is
    ("145", "1450", False),
    ("1450", "145", False),
    ("11111111101", "11111111100", False),
    ("no number at all", "0", False),
    ("", "0", False),
    ("Item 1. cost\n2. gain", "2", True),
    ("9" * 5000, "9", False),
]
MATH = [
    ("Thus $x=5$. The answer is $\\boxed{5}$.", "5", True),
    ("\\boxed{\\dfrac{11}{36}}", "\\frac{11}{36}", True),
    ("\\boxed{11/36}", "\\frac{11}{36}", True),
    ("\\boxed{\\frac1 4}", "\\frac{1}{4}", True),
    ("\\boxed{0.25}", "\\frac{1}{4}", True),
    ("\\boxed{\\frac{2}{8}}", "\\frac{1}{4}", True),
    ("\\boxed{-\\frac{1}{4}}", "\\frac{1}{4}", False),
    ("\\boxed{\\frac{-1}{4}}", "-\\frac{1}{4}", True),
    ("\\boxed{998.5}", "\\frac{1997}{2}", True),
    ("\\boxed{3\\frac{1}{2}}", "\\frac{7}{2}", True),
    ("\\boxed{30}", "30^\\circ", True),
    ("\\boxed{30^{\\circ}}", "30^\\circ", True),
    ("\\boxed{30°}", "30^\\circ", True),
    ("\\boxed{30 \\text{ degrees}}", "30^\\circ", True),
    ("\\boxed{11111111100}", "11,\\! 111,\\! 111,\\! 100", True),
    ("\\boxed{11,111,111,100}", "11,\\! 111,\\! 111,\\! 100", True),
    ("\\boxed{11111111101}", "11,\\! 111,\\! 111,\\! 100", False),
    ("\\boxed{(-\\infty,0]}", "(-\\infty, 0]", True),
    ("\\boxed{(-∞, 0]}", "(-\\infty, 0]", True),
    ("\\boxed{(-\\infty,0)}", "(-\\infty, 0]", False),
    ("\\boxed{6r^2 - 4r - 24}", "6r^2-4r-24", True),
    ("\\boxed{2(3r^{2}-2r-12)}", "6r^2-4r-24", True),
    ("\\boxed{6r^2+4r-24}", "6r^2-4r-24", False),
    ("\\boxed{2\\sqrt5}", "2 \\sqrt{5}", True),
    ("\\boxed{\\sqrt{20}}", "2 \\sqrt{5}", True),
    ("\\boxed{\\dfrac{20,000}{\\pi}}", "\\frac{20000}{\\pi}", True),
    ("\\boxed{\\frac{20000}{3.14159}}", "\\frac{20000}{\\pi}", False),
    ("\\boxed{5x-7y+11z+4=0}", "5x - 7y + 11z + 4 = 0", True),
    ("\\boxed{5x - 7y + 11z = -4}", "5x - 7y + 11z + 4 = 0", True),
    ("\\boxed{5x - 7y + 11z - 4 = 0}", "5x - 7y + 11z + 4 = 0", False),
    ("\\boxed{0 = 0}", "5x - 7y + 11z + 4 = 0", False),
    ("\\boxed{5.4}", "5.4 \\text{ cents}", True),
    ("\\boxed{5.4\\text{ cents}}", "5.4 \\text{ cents}", True),
    ("\\boxed{18.90}", "\\$18.90", True),
    ("\\boxed{\\$18.9}", "\\$18.90", True),
    ("\\boxed{(0, 9) \\cup (9, 36)}", "(0,9) \\cup (9,36)", True),
    ("\\boxed{(9,36)\\cup(0,9)}", "(0,9) \\cup (9,36)", True),
    ("\\boxed{(0,36)}", "(0,9) \\cup (9,36)", False),
    ("\\boxed{5r^5}", "5r^5", True),
    ("\\boxed{5r^{5}}", "5r^5", True),
    ("\\boxed{5r^{4}}", "5r^5", False),
    ("\\boxed{(3, \\pi/2)}", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
    ("\\boxed{(\\pi/2, 3)}", "\\left( 3, \\frac{\\pi}{2} \\right)", False),
    (
        "\\boxed{\\begin{pmatrix} \\frac{16}{49} \\\\ \\frac{48}{49} \\\\ \\frac{24}{49} \\end{pmatrix}}",
        "\\begin{pmatrix} 16/49 \\\\ 48/49 \\\\ 24/49 \\end{pmatrix}",
        True,
    ),
    ("\\boxed{\\begin{bmatrix}16/49\\\\48/49\\\\24/49\\end{bmatrix}}", "\\begin{pmatrix} 16/49 \\\\ 48/49 \\\\ 24/49 \\end{pmatrix}", True),
    ("\\boxed{\\begin{pmatrix}16/49 & 48/49 & 24/49\\end{pmatrix}}", "\\begin{pmatrix} 16/49 \\\\ 48/49 \\\\ 24/49 \\end{pmatrix}", False),
    ("\\boxed{x = 1, x = -2}", "-2, 1", True),
    ("\\boxed{1 \\text{ and } -2}", "-2,1", True),
    ("\\boxed{\\{1, -2\\}}", "-2,1", True),
    ("\\boxed{(-2, 1)}", "1,-2", False),
    ("\\boxed{\\left(1, -2\\right)}", "1,-2", True),
    ("\\boxed{(-2, 1)}", "\\{1, -2\\}", False),
    ("\\boxed{-2, 1}", "(1,-2)", False),
    ("\\boxed{x = 1, -2}", "(1,-2)", True),
    ("\\boxed{(0.5, 3)}", "\\left(\\frac12, 3\\right)", True),
    ("\\boxed{(3,4),(1,2)}", "(1,2),(3,4)", True),
    ("\\boxed{(1,2) \\cup (3,4)}", "(3,4) \\cup (1,2)", True),
    ("\\boxed{1}", "-2,1", False),
    ("\\boxed{1, 1}", "-2,1", False),
    ("\\boxed{1 \\pm \\sqrt{2}}", "1+\\sqrt{2}, 1-\\sqrt{2}", True),
    ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}", True),
    ("\\boxed{evelyn}", "\\text{Evelyn}", True),
    ("\\boxed{x = \\text{Evelyn}}", "\\text{Evelyn}", True),
    ("\\boxed{x = Evelyn}", "\\text{Evelyn}", True),
    ("\\boxed{\\textbf{evelyn} \\text{ km}}", "\\text{Evelyn}", True),
    ("\\boxed{\\text{Evelyn}}", "x = \\text{Evelyn} \\text{ km}", True),
    ("\\boxed{x = \\text{Eve}}", "\\text{Evelyn}", False),
    ("\\boxed{\\text{no}}", "\\text{no solution}", False),
    ("\\boxed{\\text{(A)}}", "A", True),
    ("\\boxed{p}", "q", False),
    ("\\boxed{2516}", "2516_8", True),
    ("\\boxed{2516_7}", "2516_8", False),
    ("\\boxed{50\\%}", "50", True),
    ("\\boxed{50\\%}", "50\\%", True),
    ("\\boxed{5\\%}", "50\\%", False),
    ("\\boxed{f(x) = x^2}", "x^2", True),
    ("\\boxed{y = 2x + 3}", "y=2x+3", True),
    ("\\boxed{3x}", "3x^2", False),
    ("\\boxed{2^{10}}", "1024", True),
    ("\\boxed{5!}", "120", True),
    ("\\boxed{\\binom{5}{2}}", "10", True),
    ("\\boxed{x²}", "x^2", True),
    ("\\boxed{½}", "\\frac12", True),
    ("{\\frac{1}{2}}", "\\frac{1}{2}", True),
    ("The final answer is $\\frac{1}{2}$. I hope it is correct.", "\\frac{1}{2}", True),
    ("The answer is 7.", "7", True),
    ("we get $x^2 = 4$, so $x = 2$", "2", True),
    ("So the sum of all of the positive divisors that were asked for is 28", "28", True),
    ("28", "28", True),
    ("", "28", False),
    ("\\boxed{}", "28", False),
    ("\\boxed{9^{9^{9^9}}}", "28", False),
    ("\\boxed{" + "(" * 500 + "1" + ")" * 500 + "}", "1", False),
    ("\\boxed{__import__('os').system('true')}", "28", False),
    ("\\boxed{1/0}", "28", False),
    ("\\boxed{2ab}", "2", False),
    ("\\boxed{2ab}", "2cd", False),
    ("\\boxed{2ba}", "2ab", True),
    ("\\boxed{x_{1}+x_2}", "x_1 + x_2", True),
    ("\\boxed{\\sin^2 x + \\cos^2 x}", "1", True),
    ("\\boxed{\\log_2 8}", "3", True),
    ("\\boxed{|{-3}|}", "3", True),
    ("\\boxed{3 + 4i}", "4i+3", True),
]  # fmt: skip
COLOURS = ("red", "green", "blue", "dark green")
COUNTS = ("3", "20", "23", "46")
SENTENCES = ("Accurate but not precise", "Precise but not accurate", "Both accurate and precise", "Neither of them")
LOGIC = ("H ≡ R", "H • R", "H ∨ ~R", "H ∨ R")
MMLU = [
    ("B", "1", COLOURS, True),
    ("B", "B", COLOURS, True),
    ("B", "green", COLOURS, True),
    ("(B)", "1", COLOURS, True),
    ("B. green", "1", COLOURS, True),
    ("b", "1", COLOURS, True),
    ("**B**", "1", COLOURS, True),
    ("\\boxed{B}", "1", COLOURS, True),
    ("\\boxed{\\text{B}}", "1", COLOURS, True),
    ("\\boxed{\\text{(B) green}}", "1", COLOURS, True),
    ("{1}", "1", COLOURS, True),
    ("{2}", "1", COLOURS, False),
    ("The answer is B.", "1", COLOURS, True),
    ("The correct answer is (B), because a leaf is so.", "1", COLOURS, True),
    ("The correct answer is option B", "1", COLOURS, True),
    ("Answer: green", "1", COLOURS, True),
    ("The answer is dark green.", "1", COLOURS, False),
    ("The answer is dark green.", "3", COLOURS, True),
    ("A leaf is green.", "1", COLOURS, True),
    ("A leaf is green.", "0", COLOURS, False),
    ("red or blue", "0", COLOURS, False),
    ("\\boxed{3}", "0", COUNTS, True),  # the text of the first choice, not the number of the last
    ("\\boxed{46}", "3", COUNTS, True),
    ("\\boxed{D}", "3", COUNTS, True),
    ("20", "1", COUNTS, True),
    ("both accurate and precise.", "2", SENTENCES, True),
    ("It is precise but not accurate, I think.", "1", SENTENCES, True),
    ("H ∨ R", "3", LOGIC, True),
    ("H ∨ R", "2", LOGIC, False),
    ("M", "3", ("G0", "G1", "G2", "M"), True),
    ("E", "0", COLOURS, False),
    ("", "0", COLOURS, False),
    ("I do not know", "0", COLOURS, False),
]
HOTPOT = [
    ("The answer is Levni Yilmaz.", "Levni Yilmaz", True, 1.0),
    ("levni  yilmaz", "Levni Yilmaz", True, 1.0),
    ("\\boxed{The Pac-12 Conference}", "Pac-12 Conference", True, 1.0),
    ("Answer: Philip K. Dick. He wrote it.", "Philip K. Dick", True, 1.0),
    ("Philip K. Dick wrote it.", "Philip K. Dick", False, 3 * 2 / 8),
    ("Talk That Talk\nand more", '"Talk That Talk"', True, 1.0),
    ("{Elvis’ Christmas Album}", "Elvis' Christmas Album", True, 1.0),
    ("Yes, they are.", "yes", False, 0.0),
    ("yes", "no", False, 0.0),
    ("no.", "no", True, 1.0),
    ("Claudio Javier López", "Claudio Javier López", True, 1.0),
    ("1998", "1998", True, 1.0),
    ("in 1998", "1998", False, 2 / 3),
    ("O", "O", True, 1.0),
    ("", "O", False, 0.0),
    ("the", "an", False, 0.0),
]


def graded(text: str, gold: str, source: str, choices=()) -> Grade:
    return grade(text, Question(question="?", answer=gold, source=source, choices=tuple(choices)))


@pytest.mark.parametrize(("text", "gold", "verdict"), GSM8K)
def test_gsm8k(text, gold, verdict):
    assert graded(text, gold, "gsm8k").correct is verdict


@pytest.mark.parametrize(("text", "gold", "verdict"), MATH)
def test_math(text, gold, verdict):
    assert graded(text, gold, "math500").correct is verdict


@pytest.mark.parametrize(("text", "gold", "choices", "verdict"), MMLU)
def test_mmlu(text, gold, choices, verdict):
    assert graded(text, gold, "mmlu", choices).correct is verdict


@pytest.mark.parametrize(("text", "gold", "verdict", "score"), HOTPOT)
def test_hotpotqa(text, gold, verdict, score):
    found = graded(text, gold, "longbench_hotpotqa")
    assert (found.correct, found.score) == (verdict, pytest.approx(score))


def test_a_line_of_code():
    assert graded("  return x  \n\nmore", "return x", "stdlib") == Grade(True, 1.0, "return x")
    assert not graded("return y", "return x", "stdlib").correct


def test_squad_normalisation_and_f1():
    assert normalise("The  Quick, brown-ish «fox»!") == "quick brownish fox"
    assert f1("a b b", "b b c") == pytest.approx(2 * 2 / 6)
    assert f1("", "") == 0.0


def test_every_grader_survives_noise():
    noise = ["\\boxed{" * 50, "{" * 300, "$" * 99, "####", "answer is", "\\frac{", "(((", "\x00", *"²%-=|_\\"]
    for name in TASKS:
        for text in noise:
            assert not graded(text, "7", name, "abcdefgh").correct


def test_choices_of_datasets_are_numbered():
    assert choice_of("3", COUNTS, numbered=True) == 3
    assert choice_of("3", COUNTS) == 0
    assert choice_of("7", COUNTS, numbered=True) is None
