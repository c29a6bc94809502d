import json
from importlib.resources import files

import pytest

import dlm
from dlm.errors import UserError
from dlm.inference.config import MOST, EngineConfig
from dlm.inference.memory import page_count
from dlm.models import ModelConfig
from dlm.models.families import config_from_hub
from tests.inference.requests import FAMILIES
from tests.inference.tiny import likes, text_lm, tiny_lm
from tests.refusals import refused


@pytest.mark.parametrize("family", ["llada", "sdar", "llama"])
def test_a_prompt_beyond_the_context_is_refused_unless_it_is_allowed(family):
    lm = tiny_lm(max_position_embeddings=16, **FAMILIES[family])
    assert len(dlm.generate(lm, [[1] * 8], gen_length=8)[0].tokens) == 8
    with pytest.raises(UserError) as caught:
        dlm.generate(lm, [[1], [1] * 9], gen_length=8)
    assert str(caught.value) == (
        "prompt 1 has 9 tokens; with gen_length = 8 that is 17 positions, and model 'tiny' was made for 16 positions: make "
        "it shorter, or let it run on beyond what the model was trained for with --allow-long (allow_long=True)"
    )
    assert len(dlm.generate(lm, [[1] * 9], gen_length=8, allow_long=True)[0].tokens) == 8
    engine = dlm.Engine(lm)
    with pytest.raises(UserError, match="prompt 0 has 20 tokens; with gen_length = 4 that is 24 positions, .* for 16"):
        engine.add_request([1] * 20, gen_length=4)
    assert not engine.has_work
    engine.add_request([1] * 20, gen_length=4, allow_long=True)
    assert [event.result for event in engine.stream() if event.result is not None]


def test_holes_beyond_the_context_are_refused():
    lm = tiny_lm(max_position_embeddings=16)
    assert len(dlm.infill(lm, [[1] * 15 + [63]])[0].tokens) == 1
    refused("prompt 0 has 17 tokens, and model 'tiny' was made for 16 positions", dlm.infill, lm, [[1] * 16 + [63]])
    assert len(dlm.infill(lm, [[1] * 16 + [63]], allow_long=True)[0].tokens) == 1
    refused("prompt 0 has 65537 tokens, and model 'tiny' was made for 2048", dlm.infill, text_lm(), "a[MASK:65536]")


@pytest.mark.parametrize("family", ["llada", "sdar", "llama"])
def test_an_open_ended_text_ends_with_the_context(family):
    lm = likes(tiny_lm(max_position_embeddings=16, **FAMILIES[family]), 7, 50.0)
    result = dlm.generate(lm, [[1, 2, 3, 4, 5]], gen_length="auto", block_length=4)[0]
    assert (len(result.tokens), result.finish_reason) == (11, "length")
    assert len(dlm.generate(lm, [[1] * 5], gen_length="auto", max_gen_length=4, block_length=4)[0].tokens) == 4
    longer = dlm.generate(lm, [[1] * 5], gen_length="auto", block_length=4, max_gen_length=16, allow_long=True)[0]
    assert len(longer.tokens) == 16
    with pytest.raises(UserError, match="prompt 0 has 16 tokens and leaves no room to continue it, .* made for 16"):
        dlm.generate(lm, [[1] * 16], gen_length="auto", block_length=4)


def test_a_learned_table_has_no_row_beyond_its_end():
    lm = tiny_lm(position_embedding="learned", max_position_embeddings=16)
    refused("has learned only 16", dlm.generate, lm, [[1] * 9], gen_length=8, allow_long=True)
    lm = tiny_lm(position_embedding="learned", max_position_embeddings=18, **FAMILIES["sdar"])
    with pytest.raises(UserError, match=r"that is 20 positions, and model 'tiny' has learned only 18"):
        dlm.generate(lm, [[1] * 10], gen_length=8)  # its last block would reach past the table
    assert len(dlm.generate(lm, [[1] * 5], gen_length="auto")[0].tokens) == 11


def test_what_is_long_is_replayed_as_it_was(tmp_path):
    lm = tiny_lm(max_position_embeddings=16)
    with dlm.TraceStore(tmp_path / "t.db") as store:
        settings = {"gen_length": 8, "trace": store, "allow_long": True}
        dlm.generate(lm, [[1] * 12], request_ids=["a"], **settings)
        trace = store["a"]
    assert dlm.replay.verify(lm, trace).identical
    sampler = {key: value for key, value in trace.context["sampler"].items() if key != "allow_long"}
    trace.context = {**trace.context, "sampler": sampler}  # as recorded before there was such a setting
    assert dlm.replay.verify(lm, trace).identical
    child = dlm.replay.fork(lm, trace, step=4, seed=2)
    assert dlm.replay.verify(lm, child).identical


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 64),
        ({"rope_type": "default"}, 64),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 2.5}, 160),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}, 64),
    ],
)
def test_the_context_of_a_stretched_rotation(scaling, context):
    assert ModelConfig(max_position_embeddings=64, rope_scaling=scaling).context_length == context


@pytest.mark.parametrize(
    ("family", "context"), [("qwen2", 32_768), ("qwen3", 32_768), ("llama", 2048), ("llada", 1024)]
)
def test_a_checkpoint_that_does_not_say_has_its_familys_context(family, context, tmp_path):
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llada = {"d_model": 32, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 48, "mask_token_id": 63}
    hub = {"model_type": family, "intermediate_size": 48, **shape, **(llada if family == "llada" else {})}
    assert config_from_hub(hub).context_length == context


def test_the_bundled_models_say_how_long_they_are():
    contexts = {}
    for name in ("pico", "sudoku"):
        file = files("dlm") / "bundled" / name / "config.json"
        contexts[name] = config_from_hub(json.loads(file.read_text())).context_length
    assert contexts == {"pico": 2048, "sudoku": 81}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gen_length", 10**9),
        ("gen_length", MOST + 1),
        ("max_gen_length", 10**18),
        ("steps", 10**9),
        ("block_length", 10**9),
        ("num_samples", 10**9),
        ("max_active_blocks", 10**18),
        ("max_post_edit_steps", 10**18),
        ("seed", 2**70),
        ("page_size", 10**9),
        ("num_pages", 10**12),
        ("max_num_requests", 10**18),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("cfg_scale", float("inf")),
        ("memory_fraction", float("nan")),
    ],
)
def test_absurd_numbers_are_refused(name, value, monkeypatch):
    lm = tiny_lm(max_position_embeddings=MOST)
    monkeypatch.setattr(dlm.inference.engine, "PagePool", None)  # no memory is asked for
    refused(rf"{name} = ", dlm.generate, lm, [[1, 2]], **{"gen_length": 8, name: value})


def test_more_pages_than_the_machine_has_memory_are_refused():
    lm = tiny_lm()
    with pytest.raises(UserError, match=r"2000000000 pages of 32 positions take .* GiB, and cpu has .* GiB in all"):
        page_count(lm, EngineConfig(num_pages=2_000_000_000))
    assert page_count(lm, EngineConfig(num_pages=7)) == 7


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 10**18}, "batch_size = 1000000000000000000 must be a number from 1 to"),
        ({"batch_size": "8"}, "batch_size = '8' must be a number"),
        ({"page_size": 0}, r"generate\(\): page_size = 0: must be greater than or equal to 1"),
        ({"page_size": "x"}, 'page_size = "x": expected an integer'),
        ({"request_ids": "first"}, "request_ids = 'first': give a list of texts"),
        ({"request_ids": 3}, "request_ids = 3: give a list of texts"),
        ({"request_ids": [[1]]}, "give a list of texts"),
        ({"trace": "runs/traces.db"}, "trace = 'runs/traces.db': give a dlm.TraceStore"),
    ],
)
def test_arguments_of_the_wrong_kind_are_told(given, message):
    refused(message, dlm.generate, tiny_lm(), [[1, 2]], gen_length=4, **given)
