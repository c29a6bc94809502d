"""What the evaluation suite is checked against: data sets' own solutions, and lm-eval's own `hf` model.

    python benchmarks/evaluation.py programs humaneval=HumanEval.jsonl.gz mbpp=sanitized-mbpp.json infilling=SingleLine.jsonl.gz
    python benchmarks/evaluation.py cost
    python benchmarks/evaluation.py hf --model FOLDER --questions questions.jsonl --text text.txt    # extra `eval`

programs: how many canonical solutions pass, and how many empty ones. cost: what a program costs beyond its own time. hf: a
causal checkpoint through `HarnessLM` and through lm-eval's `hf`: questions with `choices` scored, and answered greedily;
text rolled over.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from dlm.evaluation.programs import read_problems
from dlm.evaluation.sandbox import Sandbox

TIMEOUT = 20.0
PIECE, PIECES = 900, 4


def programs(files: list[str]) -> None:
    with Sandbox() as sandbox:
        for entry in files:
            kind, _, path = entry.partition("=")
            problems = read_problems(path, kind)  # pyright: ignore[reportArgumentType]
            for what in ("canonical", "empty"):
                sources = [p.program(p.solution if what == "canonical" else "") for p in problems]
                found = sandbox.run_all(sources, TIMEOUT)
                print(f"{kind}: {sum(v.passed for v in found)} of {len(found)} {what} solutions pass", flush=True)
                wrong = [(p.name, v.reason) for p, v in zip(problems, found, strict=True) if not v.passed]
                if what == "canonical" and wrong:
                    print(*wrong, sep="\n")


OWN = """
import time
started = time.perf_counter()
def sieve(n):
    found = [True] * n
    for i in range(2, int(n**0.5) + 1):
        for j in range(i * i, n, i):
            found[j] = False
    return [i for i in range(2, n) if found[i]]
assert len(sieve(60000)) == 6057
print(time.perf_counter() - started)
"""
"""A program that says how long it took itself."""


def cost(count: int = 200) -> None:
    """Wall-clock time of a program in a sandbox that is running, less what the program itself took; one at a time."""
    with Sandbox(1) as sandbox:
        sandbox.run("")
        for name, source in (("an empty program", ""), ("a program of some milliseconds", OWN)):
            found = []
            for _ in range(count):
                started = time.perf_counter()
                verdict = sandbox.run(source, TIMEOUT)
                found.append(1000 * (time.perf_counter() - started - float(verdict.output or 0)))
            found.sort()
            print(f"{name}: {found[count // 2]:.1f} ms beyond its own time (90 %: {found[count * 9 // 10]:.1f})")


YAML = "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
ASKED = 'doc_to_text: "Question: {{question}}\\nAnswer:"\n'
TASKS = {
    "choices": f"output_type: multiple_choice\n{ASKED}doc_to_choice: '{{{{choices}}}}'\ndoc_to_target: answer\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "written": f"output_type: generate_until\n{ASKED}doc_to_target: '{{{{answer}}}}'\n"
    "generation_kwargs: {until: ['\\n\\n', 'Question:'], max_gen_toks: 48}\nmetric_list: [{metric: exact_match}]\n",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: bits_per_byte}]\n",
}  # fmt: skip


def hf(model: str, questions: str, text: str, limit: int) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from dlm.evaluation import HarnessLM
    from dlm.evaluation.questions import load_questions

    rows = [
        {"question": q.question, "choices": list(q.choices), "answer": int(q.answer)}
        for q in load_questions(questions)
        if q.choices and q.answer.isdecimal()
    ][:limit]
    whole = Path(text).read_text("utf-8")
    data = {"choices": rows, "written": rows[: limit // 2]}
    data["rolling"] = [{"text": whole[i * 5000 :][:PIECE]} for i in range(PIECES)]
    with tempfile.TemporaryDirectory() as folder:
        for name, task in TASKS.items():
            file = Path(folder, f"{name}.jsonl")
            file.write_text("\n".join(map(json.dumps, data[name])))
            Path(folder, f"{name}.yaml").write_text(YAML.format(name=f"local_{name}", file=file) + task)
        manager = TaskManager(include_path=folder, include_defaults=False)
        tasks = [f"local_{name}" for name in TASKS]
        ours = HarnessLM(model, device="cpu", dtype="float32")
        theirs = {"pretrained": model, "device": "cpu", "dtype": "float32"}
        found: list[Any] = [
            lm_eval.simple_evaluate(
                model=lm, model_args=arguments, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True
            )
            for lm, arguments in ((ours, None), ("hf", theirs))
        ]
    for task in tasks:
        pairs = list(zip(*(one["samples"][task] for one in found), strict=True))
        if task == "local_written":
            print(f"{task}: {sum(a['resps'] == b['resps'] for a, b in pairs)} of {len(pairs)} texts are the same")
            continue
        worst = max(
            abs(x - y) for a, b in pairs for x, y in zip(_numbers(a["resps"]), _numbers(b["resps"]), strict=True)
        )
        print(f"{task}: {len(pairs)} items, largest difference of log-likelihoods {worst:.1e}")
    for name in ("acc,none", "acc_norm,none"):
        print(f"{name}: ours {found[0]['results'][tasks[0]][name]:.3f}, hf {found[1]['results'][tasks[0]][name]:.3f}")


def _numbers(value: Any) -> list[float]:
    """All numbers in nested lists, the verdicts too."""
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in _numbers(part)]
    return [float(value == "True") if value in ("True", "False") else float(value)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("programs", "cost", "hf"))
    parser.add_argument("files", nargs="*", help="programs: KIND=FILE")
    parser.add_argument("--model")
    parser.add_argument("--questions")
    parser.add_argument("--text")
    parser.add_argument("--limit", type=int, default=12)
    options = parser.parse_args(argv)
    if options.what == "programs":
        programs(options.files)
    elif options.what == "cost":
        cost()
    else:
        hf(options.model, options.questions, options.text, options.limit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
