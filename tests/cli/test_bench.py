import json

import pytest
import tomli

from dlm.bench import run
from dlm.bench.finding import Finding, Table
from dlm.cli import bench
from dlm.errors import UserError


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run `dlm-bench` in an empty folder: (exit status, standard output, standard error, configs seen by section)."""
    seen = {}

    def fake(name):
        def section(config, say):
            say(f"measuring {name}")
            seen[name] = config
            table = Table(title=name, headings={"a": "a"}, rows=[{"a": 1}])
            return Finding(values={name: {"done": True}}, tables=[table])

        return section

    for name in run.SECTIONS:
        monkeypatch.setitem(run.SECTIONS, name, fake(name))
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        seen.clear()
        return bench.main(list(argv)), *capsys.readouterr(), dict(seen)

    return call


def test_flags_become_keys(command):
    infer = {"dataset": "d.jsonl", "num-samples": "20", "source": "mmlu", "max-tokens": "64", "block-length": "16"}
    argv = [word for name, value in infer.items() for word in (f"--{name}", value)]
    argv += ["--denoising-steps=8", "--skip-vanilla", "--skip-sample", "5", "--output", "o.json"]
    status, _, err, seen = command("infer", *argv)
    assert status == 0, err
    s = seen["infer"].infer
    assert (s.dataset, s.num_samples, s.source, s.max_tokens) == ("d.jsonl", 20, "mmlu", 64)
    assert (s.block_length, s.denoising_steps, s.skip_vanilla, s.skip_sample) == (16, 8, True, 5)
    assert str(seen["infer"].output.file) == "o.json"


def test_tables_are_printed_and_the_file_written(command, tmp_path):
    status, out, err, _ = command("tokenizer")
    assert status == 0
    assert "tokenizer" in out and "measuring" not in out
    assert err == "measuring tokenizer\nwritten: bench.json\n"
    assert json.loads((tmp_path / "bench.json").read_text())["tokenizer"] == {"done": True}


def test_sections_present_are_run(command, tmp_path):
    (tmp_path / "my.toml").write_text("[train]\nsteps = 3\n[infer]\n[load]\n")
    assert list(command("--config", "my.toml")[-1]) == ["infer", "load", "train"]
    assert list(command("infer", "--config", "my.toml")[-1]) == ["infer", "load"]
    assert list(command("train", "--config", "my.toml")[-1]) == ["train"]
    assert list(command("tokenizer", "--config", "my.toml")[-1]) == ["tokenizer"]


def test_the_shipped_config(command):
    seen = command("--config", "bench")[-1]
    assert list(seen) == ["infer", "load", "train", "tokenizer"]
    seen = command("infer", "--config", "bench", "--num-samples", "20")[-1]
    assert seen["infer"].infer.num_samples == 20


def test_print_config_shows_what_the_flags_mean(command):
    status, out, _, seen = command("infer", "--num-samples", "7", "--print-config")
    assert (status, seen) == (0, {})
    assert tomli.loads(out)["infer"]["num_samples"] == 7


def test_an_earlier_result_survives_a_later_failure(command, tmp_path, monkeypatch):
    def fails(config, say):
        raise UserError("no such thing")

    monkeypatch.setitem(run.SECTIONS, "load", fails)
    (tmp_path / "my.toml").write_text("[infer]\n[load]\n")
    status, out, err, _ = command("--config", "my.toml")
    assert status == 2 and "infer" in out and "no such thing" in err
    assert "infer" in json.loads((tmp_path / "bench.json").read_text())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to measure: say which (infer, load, train, tokenizer, serve)"),
        (["infr"], 'no such subcommand: "infr"; did you mean "infer"?'),
        (["infer", "train"], 'unexpected word "train"'),
        (["infer", "--num-samples", "x"], 'infer.num_samples = "x": expected an integer'),
        (["infer", "--num-samples", "0"], "infer.num_samples = 0: must be greater than or equal to 1"),
        (
            ["infer", "--max-tokens", "100", "--block-length", "32"],
            "max_tokens = 100 is not a multiple of block_length = 32",
        ),
        (["infer", "--num-sample", "3"], 'unknown option --num-sample; did you mean "--num-samples"?'),
        (["infer", "--output", "none/b.json"], "output.file = none/b.json: no such folder: none"),
        (["load", "--load.rates", "[0.0]"], "rates = [0.0]: each must be above 0"),
    ],
)
def test_mistakes(command, argv, message):
    status, out, err, seen = command(*argv)
    assert (status, out, seen) == (2, "", {})
    assert err.startswith("dlm-bench: ") and message in err
