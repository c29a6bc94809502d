"""HarnessLM as lm-eval sees it, beside lm-eval's own `hf` on the same causal checkpoint."""

import json

import pytest

pytest.importorskip("lm_eval", reason="needs the extra `eval`")
pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own

import lm_eval  # noqa: E402
import tokenizers  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers  # noqa: E402

import dlm  # noqa: E402
from dlm.errors import UserError  # noqa: E402
from dlm.evaluation import HarnessLM  # noqa: E402
from tests.inference.tiny import EOS, text_lm  # noqa: E402

PAIRS = [("ab", "cd"), ("ab", "ef"), ("", "abc"), ("some context ", "and more"), ("ab", "c")]


def asked(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_likelihoods_are_those_of_dlm_score():
    lm = text_lm(seed=2, spread=0.5)
    model = HarnessLM(lm, draws=8, early=False)
    found = model.loglikelihood([asked("loglikelihood", *pair) for pair in PAIRS])
    given = [PAIRS[0], PAIRS[1], ([EOS], lm.encode("abc")), PAIRS[3], PAIRS[4]]
    expected = [dlm.score(lm, [pair], draws=8)[0] for pair in given]
    assert [-value for value, _ in found] == pytest.approx([score.nats for score in expected], rel=1e-5)
    assert [row["error"] for row in model.tally.records["likelihood"]] == pytest.approx(
        [s.error for s in expected], rel=1e-4
    )
    undecided = [row["undecided"] for row in model.tally.records["likelihood"]]
    assert undecided[2] is undecided[3] is None and undecided[0] == undecided[1] == undecided[4]
    backwards = HarnessLM(lm, draws=8, early=False).loglikelihood([asked("loglikelihood", *p) for p in PAIRS[::-1]])
    assert backwards[::-1] == found


def test_greedy_answers_are_marked():
    lm = text_lm(seed=1, spread=0.5)
    model = HarnessLM(lm)
    (written,) = dlm.generate(lm, [lm.encode("abcde")], gen_length=4, steps=4, block_length=4)
    requests = [
        ((("abcde"), ""), lm.encode("abcde"), list(written.tokens)),
        (("abcde", ""), lm.encode("abcde"), [1, 2, 3, 4]),
    ]
    assert [greedy for _, greedy in model._loglikelihood_tokens(requests)] == [True, False]


def test_a_task_at_temperature_0_is_not_sampled_as_the_model_recommends():
    plain, advised = (text_lm(seed=1, spread=0.5) for _ in range(2))
    advised.generation["dlm"] = {"generate": {"temperature": 1.0}}
    requests = [asked("generate_until", "abcd", {"max_gen_toks": 8, "until": []})]
    assert HarnessLM(advised).generate_until(requests) == HarnessLM(plain).generate_until(requests)
    assert HarnessLM(advised, temperature=1.0).generate_until(requests) != HarnessLM(plain).generate_until(requests)


def test_a_wrong_setting_is_said_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr("dlm.evaluation.harness.load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UserError, match="stepz"):
        HarnessLM("tiny", stepz=3)


def test_generation_ends_where_the_task_says():
    lm = text_lm(seed=1, spread=0.5)
    model = HarnessLM(lm, steps=8, block_length=4, batch_size=2)
    kinds = [
        {"max_gen_toks": 6},
        {"max_gen_toks": 8, "until": ["\n\n"]},
        {"max_gen_toks": 5, "do_sample": True, "temperature": 0.8},
    ]
    requests = [asked("generate_until", "abc", kind) for kind in kinds]
    texts = model.generate_until(requests)
    (eight,) = dlm.generate(lm, "abc", gen_length=8, steps=8, block_length=4)
    assert texts[0] == lm.decode(eight.tokens[:6]) and eight.text.startswith(texts[1])
    stop = eight.text[2:4]
    (cut,) = model.generate_until([asked("generate_until", "abc", {"max_gen_toks": 8, "until": [stop]})])
    assert cut == eight.text[: eight.text.index(stop)]
    assert HarnessLM(lm, steps=8, block_length=4).generate_until(requests[::-1])[::-1] == texts
    summary = model.tally.summary()
    assert (
        summary["nfe"] > 0
        and summary["tpf"] == summary["tokens"] / summary["nfe"]
        and 0 <= summary["length_stops"] <= 1
    )


def test_long_contexts_lose_their_beginning_and_are_counted():
    lm = text_lm(seed=1, max_position_embeddings=32)
    model = HarnessLM(lm, draws=4, steps=4)
    long = "x" * 40 + "abcdefghij"
    short = long[-28:]
    pair = [asked("loglikelihood", context, "abcd") for context in (long, short)]
    values = model.loglikelihood(pair)
    assert values[0] == values[1] and model.tally.truncated == 1
    texts = model.generate_until([asked("generate_until", c, {"max_gen_toks": 8}) for c in (long, long[-24:])])
    assert texts[0] == texts[1] and model.tally.truncated == 2
    with pytest.raises(UserError, match="leave no room for a prompt in a context of 32"):
        model.generate_until([asked("generate_until", "a", {"max_gen_toks": 32})])
    (rolled,) = model.loglikelihood_rolling([asked("loglikelihood_rolling", long)])
    windows = model._windows(long)
    assert len(windows) == 2 and sum(len(answer) for _, answer in windows) == 50 and rolled < 0


def _bytes():
    """A tokenizer of bytes, with a mask: hf's softmax is over all tokens, and so is ours."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["[MASK]", "<|endoftext|>"])
    return backend


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A causal checkpoint that transformers reads, and tasks as local files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(0)
    shape = {
        "vocab_size": 258,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
    }
    LlamaForCausalLM(
        LlamaConfig(**shape, eos_token_id=EOS, bos_token_id=EOS, initializer_range=0.3, max_position_embeddings=128)
    ).save_pretrained(folder / "m")
    PreTrainedTokenizerFast(tokenizer_object=_bytes(), eos_token="<|endoftext|>").save_pretrained(folder / "m")
    data = {
        "mc": [{"q": f"question {i}", "choices": ["yes", "no way", f"{i}"], "answer": i % 3} for i in range(5)],
        "gen": [{"q": f"question {i}:", "a": "x"} for i in range(3)],
        "roll": [{"text": "a text that is longer than the window of the model, " * 5}, {"text": "short"}],
    }
    more = {
        "mc": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]",
        "gen": "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: ['\\n'], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]",
        "roll": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: bits_per_byte}]",
    }
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        head = f"task: dlm_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / name}.jsonl}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + more[name] + "\n")
    return folder


def results(model, folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    names = ["dlm_mc", "dlm_gen", "dlm_roll"]
    return lm_eval.simple_evaluate(model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, log_samples=True)


@pytest.mark.slow
def test_a_causal_checkpoint_gives_what_lm_eval_s_own_hf_gives(causal, monkeypatch):
    theirs = results(get_model("hf")(pretrained=str(causal / "m"), device="cpu", dtype="float32"), causal, monkeypatch)
    ours = results(get_model("dlm")(pretrained=str(causal / "m"), device="cpu"), causal, monkeypatch)
    for task in theirs["results"]:
        for a, b in zip(theirs["samples"][task], ours["samples"][task], strict=True):
            if task == "dlm_gen":
                assert a["filtered_resps"] == b["filtered_resps"]
            else:
                flat = [[float(v) for v in _numbers(s["resps"])] for s in (a, b)]
                assert flat[1] == pytest.approx(flat[0], abs=1e-3)
    for name in ("acc,none", "acc_norm,none"):
        assert ours["results"]["dlm_mc"][name] == theirs["results"]["dlm_mc"][name]
    config = ours["config"]
    assert config["model_family"] == "llama" and config["undecided"] == 0.0 and config["tpf"] == 1.0


def _numbers(value):
    """All numbers in nested lists, the verdicts too."""
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in _numbers(part)]
    return [value == "True" if value in ("True", "False") else value]


def test_a_task_of_lm_eval_in_the_suite(causal, tmp_path, monkeypatch):
    from dlm.config import check
    from dlm.evaluation.suite.config import EvalConfig
    from dlm.evaluation.suite.report import table
    from dlm.evaluation.suite.run import evaluate_all

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    task = {"kind": "lm_eval", "tasks": ["dlm_mc"], "include": str(causal), "draws": 4}
    values = {"eval": {"models": [str(causal / "m")], "workers": 1, "limit": 3}, "task": [task]}
    config = check(EvalConfig, {**values, "output": {"file": str(tmp_path / "o.json")}}, "test")
    found = evaluate_all(config).values
    whole = (tmp_path / "o.json").read_bytes()
    assert found["runs"][0]["metrics"]["lm_eval"]["dlm_mc"]["metrics"]["sample_len"] == 3
    assert "acc " in table(found) and "undecided 0 %" in table(found)
    (tmp_path / "o.json").unlink()
    evaluate_all(config)
    assert (tmp_path / "o.json").read_bytes() == whole


def test_chat_templates_and_names(causal):
    model = HarnessLM(text_lm())
    messages = [{"role": "user", "content": "hi"}]
    assert model.apply_chat_template(messages) == model.lm.chat(messages)
    assert model.tokenizer_name.startswith("tiny-") and model.fingerprint in model.tokenizer_name
    assert model.chat_template(True) == model.lm.tokenizer.chat_template and model.chat_template(False) is None
    assert get_model("dlm") is HarnessLM and model.device == model.lm.device
    assert (
        HarnessLM.create_from_arg_string(f"lm={causal / 'm'},draws=4", {"batch_size": 2, "device": "cuda:0"}).draws == 4
    )


def test_what_it_refuses():
    lm = text_lm()
    for settings, says in (
        ({"lm": None}, "give one model"),
        ({"lm": lm, "draws": 1}, "draws = 1 must be at least 2"),
        ({"lm": lm, "stepz": 3}, 'unknown key "stepz"'),
        ({"lm": lm, "threshold": 0.5}, "threshold = 0.5 is only read"),
    ):
        with pytest.raises(UserError) as caught:
            HarnessLM(**settings)
        assert says in str(caught.value)
