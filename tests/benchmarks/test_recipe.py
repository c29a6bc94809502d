"""benchmarks/recipe.py: every row is a run that can be made, and its tables are means of what was found."""

from argparse import Namespace

import pytest

from dlm.evaluation.bound import measure_bound

WHERE = {"train.out": "runs/x", "train.schedule": "wsd"}


@pytest.fixture
def recipe(script):
    return script("recipe")


def test_every_row_is_a_config(recipe):
    for name, row in recipe.RECIPES.items():
        from_model = bool(row.get("start"))
        settings = {k: v for k, v in row.items() if not (from_model and k.startswith("model."))} | WHERE
        settings |= {"train.init_from": "pico-causal"} if from_model else {"train.tokenizer": "pico-causal"}
        if row["objective.masking"] == "trajectory":
            settings |= {"data.source": "traces", "data.paths": "x.db", "data.pack": "row"}
        found = recipe.config(settings, 200, row["decay"])
        assert (found.train.steps, found.train.warmup_steps) == (200, 10), name
        assert found.train.decay_steps == max(1, 200 * row["decay"]), name
        assert found.objective.masking == row["objective.masking"], name
        assert row.get("start", "pico-causal") in {*recipe.RECIPES, "pico-causal", ""}, name
    assert not set(recipe.PRETRAINING) & set(recipe.CONVERSIONS)
    assert len({recipe.slug(name) for name in recipe.RECIPES}) == len(recipe.RECIPES)


def test_a_table_has_means_over_seeds_best_first(recipe):
    """Errors are of the deviation that all rows of several seeds have together: (0.1² / 2) ^ ½ here."""
    facts = {
        "parameters": 5e6,
        "tokens": 6e5,
        "flops_a_token": 3e7,
        "cpu_seconds": 300,
        "bytes": 1000,
        "machine": "a CPU",
        "precision": "bf16",
    }
    rates = [{"hits": hits, "total": 100} for hits in (2, 4)]
    found = [
        facts | {"name": "random masking", "bits_per_byte": 1.8, "exact": rates[0], "parses": rates[0]},
        facts | {"name": "random masking", "bits_per_byte": 1.9, "exact": rates[1], "parses": rates[1]},
        facts | {"name": "block diffusion, blocks of 4", "bits_per_byte": 1.5},
        facts | {"name": "baseline: 8k, 4 layers", "bits_per_byte": 1.0},
    ]
    rows = recipe.table(found, recipe.CONVERSIONS).splitlines()[2:]
    assert rows[0] == "| block diffusion, blocks of 4 | 5.00 M | 0.60 M | 1.500 ± 0.071 | 1 | – | – | 5.0 |"
    assert rows[1].startswith("| random masking | 5.00 M | 0.60 M | 1.850 ± 0.050 | 2 | 3.0 % (1.4–6.4) |")
    assert len(rows) == 2
    text = recipe.written(found)
    assert "whole windows: 1,000 bytes, by tokenizer. a CPU, bf16. No run trained with more than 1.8e+13 FLOPs." in text
    assert "(rows with several: 1)" in text and "from 0.200 bits on" in text and "One seed a row" in text


def few(measure):
    """`measure_bound` of eight sequences, whatever is asked."""
    return lambda lm, data, **asked: measure(lm, data, **(asked | {"sequences": 8}))


def test_a_run_trains_on_its_budget_and_is_scored(recipe, tmp_path, monkeypatch):
    """A tiny conversion from a tiny model: as many steps as its FLOPs buy, and lines filled in."""
    small = recipe.BASELINE | {"train.batch_size": 2, "train.length": 32, "model.num_hidden_layers": 1, "start": ""}
    small |= {
        "model.hidden_size": 64,
        "model.intermediate_size": 64,
        "vocabulary": None,
        "objective.documents": "apart",
    }
    small |= {"model.num_attention_heads": 1, "model.num_key_value_heads": 1}
    second = recipe.RANDOM | {"start": "first", "train.batch_size": 2, "train.length": 32, "share": 0.5}
    monkeypatch.setattr(recipe, "RECIPES", {"first": small, "second": second})
    monkeypatch.setattr(recipe, "LINES", 4)
    monkeypatch.setattr("dlm.evaluation.bound.measure_bound", few(measure_bound))
    options = Namespace(out=tmp_path, flops=2e9, threads=1, precision="fp32")
    for name in ("first", "second"):
        recipe.run(name, 0, options)
    first, second = (recipe.json.loads((tmp_path / f"{n}-0/result.json").read_text()) for n in ("first", "second"))
    assert first["steps"] == int(2e9 / (first["flops_a_token"] * 64)) and first["tokens"] == 64 * first["steps"]
    assert second["steps"] == int(1e9 / (second["flops_a_token"] * 64))
    assert "exact" not in first and second["exact"]["total"] == 4
    assert first["bits_per_byte"] > 1 and second["bits_per_byte"] > 1
