import pytest
from pydantic import BaseModel, ConfigDict

from dlm.cli import bench, infer, prepare, train
from dlm.cli.flags import Flag, model_flag
from dlm.cli.help import page
from dlm.cli.options import Command
from dlm.cli.prepare import SUBCOMMANDS, main
from tests.refusals import told


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    rate: float = 1.0
    fast: bool = False
    extra: dict[str, int] = {}


class Whole(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = "x"
    paths: tuple[str, ...] = ()
    fast: bool = True
    part: Section = Section()


COMMAND = Command(
    name="dlm-test",
    summary="Tests [markup].",
    config=Whole,
    flags=(
        Flag(name="--prompt", metavar="TEXT", repeatable=True, help="Words."),
        Flag(name="--input", metavar="FILE", help="A file."),
        model_flag("name"),
        Flag(name="--quick", sets="part.fast", help="Short."),
    ),
)


@pytest.mark.parametrize(
    ("argv", "overrides"),
    [
        (["--part.rate", "3e-4"], {"part.rate": "3e-4"}),
        (["--part.rate=-1"], {"part.rate": "-1"}),
        (["--part.rate", "-1"], {"part.rate": "-1"}),
        (["--name=--odd=x"], {"name": "--odd=x"}),
        (["--part.fast"], {"part.fast": "true"}),
        (["--part.no-fast"], {"part.fast": "false"}),
        (["--no-fast"], {"fast": "false"}),
        (["--part.fast", "false", "--name", "y"], {"part.fast": "false", "name": "y"}),
        (["--part.fast=true"], {"part.fast": "true"}),
        (["--quick"], {"part.fast": "true"}),
        (["--part.extra.key", "3"], {"part.extra.key": "3"}),
        (["--name", "a", "--name", "b"], {"name": "b"}),
        (["--paths", "a.txt", "--fast"], {"paths": "a.txt", "fast": "true"}),
        (["--paths", "a.txt", "b.txt", "--fast"], {"paths": '["a.txt", "b.txt"]', "fast": "true"}),
        (["--model", "pico"], {"name": "pico"}),
        (["--model", "pico", "--name", "y"], {"name": "y"}),
    ],
)
def test_overrides(argv, overrides):
    assert COMMAND.parse(argv).overrides == overrides


def test_flags_and_files():
    options = COMMAND.parse(["--config", "a", "--prompt", "x y", "--config=b.toml", "--prompt=z"])
    assert options.files == ["a", "b.toml"]
    assert options.given["--prompt"] == ["x y", "z"]
    assert options.value("--prompt") == "z"
    assert options.value("--input") is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--part.rat", "1"], 'unknown option --part.rat; did you mean "--part.rate"?'),
        (["--rate", "1"], 'unknown option --rate; did you mean "--part.rate"?'),
        (["--part", "x"], "--part is a section: its options are --part.rate, --part.fast, --part.extra (see dlm-test"),
        (["--part.no-rate"], "unknown option --part.no-rate"),
        (["--paths=a.txt", "b.txt"], 'unexpected word "b.txt"'),
        (["--part.rate"], "--part.rate needs a value"),
        (["--prompt", "--input", "x"], "--prompt needs a value (one that starts with -- is written --prompt=…)"),
        (["--input", "x", "--input", "y"], "--input is given twice"),
        (["--quick=yes"], "--quick takes no value"),
    ],
)
def test_mistakes(argv, message):
    told(message, COMMAND.parse, argv)


def test_status_and_streams(capsys):
    assert COMMAND.run(lambda config, options: None, ["--part.rate", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == 'dlm-test: command line: part.rate = "x": expected a number\n'

    def interrupted(config, options):
        raise KeyboardInterrupt

    assert COMMAND.run(interrupted, []) == 130


def test_print_config_is_the_config(capsys, tmp_path):
    assert COMMAND.run(lambda config, options: None, ["--part.rate", "2", "--print-config"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    seen = []
    COMMAND.run(lambda config, options: seen.append(config), ["--config", str(tmp_path / "printed.toml")])
    assert seen == [Whole(part=Section(rate=2.0))]


def test_help_lists_every_flag_and_field():
    text = "\n".join(page(COMMAND, width=80, color=False))
    for needed in ("Tests [markup].", "--prompt TEXT", "--model NAME", "Repeatable.", "--print-config", "[part]"):
        assert needed in text
    assert "--part.rate  a number = 1.0" in text
    assert "--part.fast / --part.no-fast  true or false = false" in text
    assert max(map(len, text.split("\n"))) <= 80


@pytest.mark.parametrize(
    ("main", "words", "key"),
    [
        (infer.main, [], "model.name"),
        (train.main, [], "train.init_from"),
        (prepare.main, ["trajectories"], "model.name"),
        (prepare.main, ["anchors"], "align.teacher"),
        (bench.main, [], "model.name"),
        (bench.main, ["infer"], "model.name"),
        (bench.main, ["tokenizer"], "tokenizer.path"),
    ],
    ids=["infer", "train", "trajectories", "anchors", "bench", "bench-infer", "bench-tokenizer"],
)
def test_every_command_that_loads_a_model_has_model(main, words, key, capsys):
    assert main([*words, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--model NAME" in shown and f"Short for --{key}." in shown
    assert main([*words, "--model", "sudoku", "--print-config"]) == 0
    short = capsys.readouterr().out
    assert main([*words, f"--{key}", "sudoku", "--print-config"]) == 0
    assert short == capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--help"]], ids=str)
def test_the_overview_names_every_subcommand(argv, capsys):
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}: " in shown for name in SUBCOMMANDS)


def test_an_unknown_subcommand_names_the_nearest(capsys):
    assert main(["anchor"]) == 2
    assert 'no such subcommand: "anchor"; did you mean "anchors"?' in capsys.readouterr().err


def test_anchors_reads_a_training_config(capsys):
    assert main(["anchors", "--help"]) == 0 and "--align.anchors" in capsys.readouterr().out
    assert main(["anchors", "--align.layers", "[1, 2]", "--print-config"]) == 0
    assert 'anchors_dtype = "bfloat16"' in capsys.readouterr().out
    assert main(["anchors"]) == 2 and "align.anchors is not set" in capsys.readouterr().err


def test_trajectories_reads_a_config_of_its_own(capsys):
    assert main(["trajectories", "--help"]) == 0 and "--trajectories.responses" in capsys.readouterr().out
    assert main(["trajectories", "--config", "prepare-trajectories", "--print-config"]) == 0
    assert 'responses = "forced"' in capsys.readouterr().out
    assert main(["trajectories", "--trajectories.sample", "3"]) == 2
    assert 'did you mean "--trajectories.samples"?' in capsys.readouterr().err
