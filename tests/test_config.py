import re
import types
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import dlm.config
from dlm.bench.config import BenchConfig
from dlm.cli.config import InferConfig
from dlm.config import check, load, to_toml
from dlm.data.config import DataConfig, TokenizerConfig
from dlm.errors import UserError
from dlm.evaluation.suite.config import EvalConfig
from dlm.fields import fields, members, type_name
from dlm.prepare.config import FillingsConfig, ResponsesConfig, TrajectoriesConfig
from dlm.serving.config import ServeConfig
from dlm.training.config import TrainConfig
from tests.refusals import refused, told


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Optim(Closed):
    lr: float = Field(1e-3, gt=0, description="Peak rate.")
    rule: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0


class Entry(Closed):
    text: str
    count: Annotated[int, Field(ge=1)] = 1


class Whole(Closed):
    name: str = "x"
    length: int | Literal["auto"] = "auto"
    flag: bool = True
    folder: Path | None = None
    color: Color = Color.RED
    weights: dict[str, float] = {}
    optim: Optim = Optim()
    entry: tuple[Entry, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> "Whole":
        if self.length == 13:
            raise ValueError("length = 13 brings bad luck: choose another")
        return self


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        Path(name).write_text(text)
        return name

    return write


def test_later_files_win_and_tables_merge(write):
    first = write("a.toml", 'name = "a"\n[optim]\nlr = 1\nrule = "muon"\n[weights]\nx = 1.0\n')
    second = write("b.toml", 'name = "b"\n[optim]\nlr = 2.5\n[weights]\ny = 2.0\n')
    config = load(Whole, [first, second])
    assert config == Whole(name="b", optim=Optim(lr=2.5, rule="muon"), weights={"x": 1.0, "y": 2.0})


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("name", "123", "123"),
        ("name", "true", "true"),
        ("name", "", ""),
        ("name", '"quoted"', "quoted"),
        ("name", "[not, toml", "[not, toml"),
        ("length", "64", 64),
        ("length", "auto", "auto"),
        ("flag", "false", False),
        ("folder", "a/b", Path("a/b")),
        ("folder", "none", None),
        ("color", "blue", Color.BLUE),
        ("optim.lr", "3e-4", 3e-4),
        ("optim.lr", "3", 3.0),
        ("optim.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("optim.clip", "none", None),
        ("weights.py", "0.5", 0.5),
        ("entry.0.count", "4", 4),
    ],
)
def test_overrides_take_the_type_of_their_field(write, key, text, expected):
    value: Any = load(Whole, [write("a.toml", '[[entry]]\ntext = "t"\n')], {key: text})
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else value[part] if isinstance(value, dict) else getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


BAD = [
    ('nmae = "a"', {}, 'a.toml: unknown key "nmae"; did you mean "name"?'),
    ("[optim]\nlearn = 1", {}, 'a.toml: unknown key "optim.learn"; known keys in [optim]: lr, rule, betas, clip'),
    ("lr = 1.0", {}, 'a.toml: unknown key "lr"; did you mean "optim.lr"?'),
    ('[optim]\nlr = "fast"', {}, 'a.toml: optim.lr = "fast": expected a number'),
    ("length = 1.5", {}, 'a.toml: length = 1.5: expected an integer or "auto"'),
    ('length = "aut"', {}, 'a.toml: length = "aut": expected an integer or "auto"; did you mean "auto"?'),
    ("flag = 1", {}, "a.toml: flag = 1: expected true or false"),
    ("name = 3", {}, "a.toml: name = 3: expected a string"),
    ('color = "rad"', {}, 'a.toml: color = "rad": expected "red" or "blue"; did you mean "red"?'),
    ("[optim]\nbetas = [0.9]", {}, "a.toml: optim.betas = [0.9]: expected a list of 2"),
    ("[optim]\nlr = -1.0", {}, "a.toml: optim.lr = -1.0: must be greater than 0"),
    ("optim = 3", {}, "a.toml: optim = 3: expected a table"),
    ("entry = 3", {}, "a.toml: entry = 3: expected a list"),
    ("[[entry]]\ncount = 2", {}, '"entry.0.text" is missing: give a string'),
    ('[[entry]]\ntext = "t"\ncount = 0', {}, "a.toml: entry.0.count = 0: must be greater than or equal to 1"),
    ("length = 13", {}, "a.toml: length = 13 brings bad luck: choose another"),
    ("", {"length": "13"}, "command line: length = 13 brings bad luck"),
    ("", {"optim.rule": "moun"}, 'command line: optim.rule = "moun": expected "adamw" or "muon"; did you mean "muon"?'),
    ("", {"entry.0.text": "t"}, "command line: --entry.0.text: there is no entry 0: the list has 0"),
    ("name = ", {}, "a.toml: not valid TOML: "),
]


@pytest.mark.parametrize(("text", "overrides", "message"), BAD)
def test_mistakes_are_explained(write, text, overrides, message):
    with pytest.raises(UserError) as error:
        load(Whole, [write("a.toml", text)], overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)  # one mistake, one line


def test_every_mistake_gets_a_line_and_the_right_file(write):
    files = [write("a.toml", "flag = 1"), write("b.toml", 'length = "x"')]
    refused(r"^b\.toml: length = .*\na\.toml: flag = 1: .*$", load, Whole, files)


@pytest.mark.parametrize(
    ("name", "message"),
    [("quickstrat", 'did you mean "quickstart"?'), ("no/such.toml", "no such config file (shipped configs: ")],
)
def test_missing_files(name, message):
    told(message, load, Whole, [name])


def test_unreadable_files(tmp_path):
    (tmp_path / "a.toml").write_bytes(b'name = "\xff"')
    refused("not a text file", load, Whole, [tmp_path / "a.toml"])
    refused("no such config file", load, Whole, [tmp_path])


@pytest.mark.parametrize("name", ["quickstart", "quickstart.toml", "configs/quickstart.toml"])
def test_shipped_configs_are_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(load(InferConfig, [name]).job) == 4


@pytest.mark.parametrize("name", dlm.config.shipped())
def test_every_shipped_config_is_valid(name):
    classes = {"quickstart": InferConfig, "bench": BenchConfig, "prepare-trajectories": TrajectoriesConfig}
    classes |= {"serve": ServeConfig, "smollm2-responses": ResponsesConfig, "pico-fillings": FillingsConfig}
    classes |= dict.fromkeys(("dflash/responses", "dflash/pico-responses"), TrajectoriesConfig)
    if name.startswith("eval/"):
        classes[name] = EvalConfig
    load(classes.get(name, TokenizerConfig if name.endswith("tokenizer") else TrainConfig), [name])


def test_every_config_that_a_card_names_is_shipped():
    cards = sorted((Path(dlm.__file__).parent / "bundled").glob("*/README.md"))
    named = {name for card in cards for name in re.findall(r"--config (\S+)", card.read_text("utf-8"))}
    assert len(cards) == 5 and "dflash/pico" in named
    assert named <= set(dlm.config.shipped())


def test_jobs_inherit_and_override_the_shared_sections():
    table = {
        "sampler": {"steps": 64, "seed": 3},
        "job": [{"prompt": "a", "sampler": {"seed": 4}}, {"prompt": "b", "model": {"name": "sudoku"}}],
    }
    first, second = check(InferConfig, table, "test").job
    assert (first.sampler.steps, first.sampler.seed, first.model.name) == (64, 4, "pico")
    assert (second.sampler.steps, second.sampler.seed, second.model.name) == (64, 3, "sudoku")


def test_a_shared_mistake_is_told_once():
    with pytest.raises(UserError) as error:
        check(InferConfig, {"sampler": {"seed": "x"}, "job": [{"prompt": "a"}, {"prompt": "b"}]}, "test")
    assert str(error.value) == 'test: sampler.seed = "x": expected an integer'


class Lists(Closed):
    names: tuple[str, ...] = ()
    kinds: tuple[Literal["a", "b"], ...] | None = None
    mixed: Literal["all"] | tuple[int, ...] = "all"
    steps: int = Field(100, ge=1)
    tenth: int = Field(default_factory=lambda given: given["steps"] // 10, description="Of the steps.")


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("names", "my.txt", ("my.txt",)),
        ("names", "2024", ("2024",)),
        ("names", '["a", "b"]', ("a", "b")),
        ("kinds", "b", ("b",)),
        ("kinds", "none", None),
        ("mixed", "all", "all"),
    ],
)
def test_a_string_stands_for_a_list_of_one(key, text, expected):
    assert getattr(load(Lists, overrides={key: text}), key) == expected
    assert check(Lists, {"names": "a"}, "test").names == ("a",)
    refused("kinds = .*expected a list", load, Lists, overrides={"kinds": "c"})


def test_a_default_may_follow_another_field():
    assert check(Lists, {"steps": 50}, "test").tenth == 5 and check(Lists, {"tenth": 7}, "test").tenth == 7
    assert next(field.default for field in fields(Lists) if field.key == "tenth") == 10
    with pytest.raises(UserError) as error:
        check(Lists, {"steps": 0}, "test")
    assert str(error.value) == "test: steps = 0: must be greater than or equal to 1"


class Group(Closed):
    rate: float = 1.0
    decay: float = 0.0


class Groups(Closed):
    hidden: Group = Group(decay=0.1)


def test_a_partial_table_keeps_the_defaults_of_its_place():
    assert check(Groups, {"hidden": {"rate": 2.0}}, "test") == Groups(hidden=Group(rate=2.0, decay=0.1))
    assert {field.key: field.default for field in fields(Groups)} == {"hidden.rate": 1.0, "hidden.decay": 0.1}


def test_fields_walk_sections_and_lists():
    found = {field.key: field for field in fields(Whole)}
    assert list(found)[:3] == ["name", "length", "flag"]
    assert {"optim.lr", "entry.N.text", "weights"} <= set(found)
    assert found["optim.lr"].description == "Peak rate."
    assert found["entry.N.text"].default is ...
    assert found["flag"].is_flag
    assert type_name(found["length"].annotation) == 'an integer or "auto"'


def values(annotation: Any) -> st.SearchStrategy:
    """Anything of this type; constraints are left to the class, which refuses."""
    return st.one_of([_values(member) for member in members(annotation)])


PLAIN = {Any: st.integers() | st.text(max_size=4), bool: st.booleans(), int: st.integers(0, 4096)}
PLAIN |= {float: st.floats(0, 1) | st.floats(allow_nan=False)}
PLAIN |= {str: st.text(max_size=8).filter(lambda text: text != dlm.config.NOTHING), Path: st.just(Path("a/b"))}
PLAIN |= {types.NoneType: st.none()}


def _values(member: Any) -> st.SearchStrategy:
    kind, inner = get_origin(member) or member, get_args(member)
    if kind is Literal:
        return st.sampled_from(inner)
    if kind is tuple and inner[-1] is not ...:
        return st.tuples(*map(values, inner))
    if kind in (tuple, list):
        return st.lists(values(inner[0]), max_size=3).map(kind)
    if kind is dict:
        return st.dictionaries(st.text(max_size=5), values(inner[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return configs(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    return PLAIN[kind]


@st.composite
def configs(draw: st.DrawFn, cls: type[BaseModel]) -> BaseModel:
    """A config with a few fields set, if the class takes them together, else its defaults."""
    required = [name for name, info in cls.model_fields.items() if info.is_required()]
    optional = [name for name in cls.model_fields if name not in required]
    chosen = required + (draw(st.lists(st.sampled_from(optional), unique=True, max_size=3)) if optional else [])
    try:
        return cls(**{name: draw(values(cls.model_fields[name].annotation)) for name in chosen})
    except ValidationError:
        assume(False)
        raise


@pytest.mark.parametrize("cls", [Whole, InferConfig, DataConfig, TokenizerConfig, TrainConfig])
def test_printed_configs_reproduce_themselves(cls, tmp_path):
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(configs(cls))
    def round_trip(config):
        file = tmp_path / "printed.toml"
        file.write_text(to_toml(config), encoding="utf-8", newline="")
        assert load(cls, [file]) == config

    round_trip()
