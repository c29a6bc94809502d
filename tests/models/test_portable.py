import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dlm
from dlm import LM
from dlm.models import AttentionSpec, ModelConfig, MoEConfig, convert, load, portable
from tests.refusals import refused

from . import tiny
from .test_converting import letters

CODE = Path(portable.__file__).parent
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8}


def converted(case: str, *kind: Any) -> LM:
    lm = tiny.model(case, mask_token_id=None)
    lm.tokenizer = letters(44)
    return convert(lm, *kind)


CASES: dict[str, Any] = {
    "bidirectional": lambda: tiny.model("dlm"),
    "block": lambda: tiny.model("dlm", attention="block_causal", block_length=4, num_key_value_heads=1),
    "causal": lambda: tiny.model("dlm", attention="causal", shifted_logits=True, qkv_bias=True, mlp_bias=True),
    "learned_tied": lambda: tiny.model("dlm-learned"),
    "mixture": lambda: tiny.model("dlm-moe"),
    "soft_mixture": lambda: tiny.model("dlm", moe=tiny.SOFT_MOE, tie_word_embeddings=True),
    "rotary_part_yarn": lambda: tiny.model("dlm", head_dim=8, rotary_dim=4, rope_scaling=YARN),
    "llama3": lambda: tiny.model("dlm", head_dim=8, rope_theta=5e5, rope_scaling=LLAMA3),
    "linear": lambda: tiny.model("dlm", rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "llama_converted": lambda: converted("llama"),
    "qwen3_to_blocks": lambda: converted("qwen3", "block_causal", 4),
    "llada2_as_dlm": lambda: tiny.model("llada2_moe"),
    "pico": lambda: load("pico", device="cpu"),
}


@pytest.fixture(scope="module")
def models() -> dict[str, LM]:
    return {name: make() for name, make in CASES.items()}


@pytest.fixture(scope="module")
def alone(models: dict[str, LM], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder above all saved ones, and what a process without `dlm` computed."""
    home = tmp_path_factory.mktemp("alone")
    for name, lm in models.items():
        dlm.save(lm, home / "saved" / name, family="dlm")
    torch.save(tiny.tokens(), home / "ids.pt")
    script = Path(__file__).with_name("transformers_alone.py")
    environment = os.environ | {"HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, script, home / "saved", home / "ids.pt", home / "out.pt"]
    subprocess.run(command, check=True, cwd=home, env=environment, stdin=subprocess.DEVNULL, timeout=300)
    return home, torch.load(home / "out.pt")


@pytest.mark.parametrize("name", CASES)
def test_same_logits_without_dlm(name, models, alone):
    lm, found = models[name], alone[1][name]
    ids, network = found["ids"], lm.network
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, -3:] = False
    assert (found["class"], found["odd"]) == ("DLMForMaskedLM", [])
    with torch.no_grad():
        logits = network(ids)
        close(found["logits"], logits)
        close(found["padded"][valid], network(ids, valid=valid)[valid])
        close(found["placed"], network(ids, torch.arange(3, 3 + ids.shape[1]).expand_as(ids)))
        if lm.config.attention == "bidirectional":  # whose padding on the left is seen by nobody in our code either
            close(found["left"][valid.flip(1)], network(ids, valid=valid.flip(1))[valid.flip(1)])
        taps: dict[int, torch.Tensor] = {}
        last = network.hidden(ids, taps=taps)
        states = [network.embedded(ids, torch.arange(ids.shape[1]).expand_as(ids)), *list(taps.values())[:-1], last]
        assert len(found["hidden"]) == len(states)
        for theirs, ours in zip(found["hidden"], states, strict=True):
            close(theirs, ours)
    assert found["left"].isfinite().all() and found["padded"].isfinite().all()
    rows, labels = (logits[:, :-1], found["labels"][:, 1:]) if lm.config.shifted_logits else (logits, found["labels"])
    close(found["loss"], F.cross_entropy(rows.flatten(0, 1), labels.flatten(), ignore_index=-100))


def close(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5 * max(1.0, ours.abs().max().item()))


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_saves_is_read_by_both(name, models, alone):
    home, found = alone
    lm, again = models[name], home / "again" / name
    assert {path.name for path in again.glob("*.py")} == set(portable.CODE)
    assert json.loads((again / "config.json").read_text())["auto_map"] == portable.AUTO_MAP
    for folder in (home / "saved" / name, again):
        back = load(folder, device="cpu", dtype="float32")
        assert back.config == lm.config.model_copy(update={"model_type": "dlm"})
        with torch.no_grad():
            close(back.network(found[name]["ids"]), lm.network(found[name]["ids"]))


def test_half_precision_keeps_the_choice_of_experts(alone):
    kinds = alone[1]["mixture"]["dtypes"]
    assert kinds.pop("model.layers.1.mlp.router.bias") == "torch.float32"
    assert set(kinds.values()) == {"torch.bfloat16"}
    assert all(entry["half"].isfinite().all() for entry in alone[1].values())


def test_the_chat_template_gives_the_same_ids(models, alone):
    lm, found = models["pico"], alone[1]["pico"]
    chat = [{"role": "user", "content": " a [MASK] of\n x=1\n"}, {"role": "assistant", "content": "ok"}]
    assert found["mask"] == lm.mask_id
    assert found["chat True"] == lm.chat(chat)
    assert found["ids True"] == lm.encode(lm.chat(chat))
    assert found["ids False"] == lm.encode(lm.require_tokenizer().apply_chat_template(chat, False))
    assert load(alone[0] / "again" / "pico", device="cpu").chat(chat) == lm.chat(chat)


def test_the_code_needs_torch_and_transformers_only():
    for name in portable.CODE:
        tree = ast.parse((CODE / name).read_text("utf-8"))
        roots = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        local = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level}
        roots |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level}
        assert roots <= {"math", "typing", "torch", "transformers"}
        assert local <= {"configuration_dlm"}


def test_the_code_knows_every_setting_of_a_network():
    from dlm.models.portable.configuration_dlm import DEFAULTS, DLMConfig
    from dlm.models.portable.modeling_dlm import DLMForMaskedLM

    inherited = {"model_type", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
    assert set(ModelConfig.model_fields) - inherited == {*DEFAULTS, "rope_theta", "rope_scaling"}
    text = inspect.getsource(sys.modules[DLMForMaskedLM.__module__])
    assert [key for key in MoEConfig.model_fields if f'"{key}"' not in text] == []
    with pytest.raises(ValueError, match="attention='both' is not known; use one of bidirectional, causal"):
        DLMConfig(attention="both")
    refused("needs block_length", DLMConfig, attention="block_causal", error=ValueError)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_it_trains_from_scratch_and_with_recomputed_layers():
    from dlm.models.portable.configuration_dlm import DLMConfig
    from dlm.models.portable.modeling_dlm import DLMForMaskedLM

    torch.manual_seed(0)
    model, ids = DLMForMaskedLM(DLMConfig(**tiny.config("dlm-moe").model_dump())).train(), tiny.tokens()
    assert abs(model.model.embed_tokens.weight.std() - 0.3) < 0.05
    model(ids, labels=ids).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert "model.layers.1.mlp.router.weight" in plain
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(inputs_embeds=model.get_input_embeddings()(ids), labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name in plain:
            torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-4, atol=1e-5)
    refused("either input_ids or inputs_embeds", model, error=ValueError)
    with pytest.raises(ValueError, match=r"attention_mask of shape \(1, 11\) should be \(2, 11\)"):
        model(ids, attention_mask=torch.ones(1, 11))
    assert isinstance(model(ids, return_dict=False), tuple)


def test_loading_runs_no_code_of_a_folder(tmp_path):
    dlm.save(tiny.model("dlm"), tmp_path / "m")
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    for name in portable.CODE:
        (tmp_path / "m" / name).write_text(trap)
    lm = load(tmp_path / "m", device="cpu")
    lm.save(tmp_path / "copy")  # code that lies beside a checkpoint goes along, unread
    assert (tmp_path / "copy" / "modeling_dlm.py").read_text() == trap
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["auto_map"] == portable.AUTO_MAP
    dlm.save(lm, tmp_path / "copy")
    assert (tmp_path / "copy" / "modeling_dlm.py").read_text() == (CODE / "modeling_dlm.py").read_text()
    assert not (tmp_path / "ran").exists()


def test_with_dlm_installed_its_own_class_reads_the_folder(tmp_path):
    pytest.importorskip("dlm.models.hf")
    from transformers import AutoModel

    lm, ids = tiny.model("dlm"), tiny.tokens()
    dlm.save(lm, tmp_path / "m")
    model = AutoModel.from_pretrained(tmp_path / "m")
    assert type(model).__module__ == "dlm.models.hf"
    model.save_pretrained(tmp_path / "copy")
    assert "auto_map" not in json.loads((tmp_path / "copy" / "config.json").read_text())  # there is no code beside it
    with torch.no_grad():
        close(load(tmp_path / "copy", device="cpu").network(ids), lm.network(ids))
    assert lm.network.attention == AttentionSpec("bidirectional")
