import pickle

import pytest
import torch
import torch.nn.functional as F

from dlm.models import load
from tests.refusals import refused

from . import tiny

hf = pytest.importorskip("dlm.models.hf")


@pytest.mark.parametrize("case", ["dlm-moe", "Dream"])
def test_weights_begin_where_torch_allocates_however_they_are_read(case, tmp_path):
    from transformers import AutoModelForMaskedLM

    tiny.model(case).save(tmp_path)
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path).network
    for network in (load(tmp_path, device="cpu").network, theirs):
        assert {tensor.data_ptr() % 64 for tensor in network.state_dict().values()} == {0}
    ours = tiny.model(case).network
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))


STRETCHED = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}
CASES = {case: {} for case in ("dlm", "dlm-moe", "dlm-learned", "llada", "llada-gqa", "sdar", "Fast_dLLM_Qwen")}


@pytest.mark.parametrize(("case", "fields"), [*CASES.items(), ("Dream", {}), ("Dream", STRETCHED)], ids=str)
def test_auto_classes_there_and_back(case, fields, tmp_path):
    from transformers import AutoConfig, AutoModelForMaskedLM

    lm, ids = tiny.model(case, **fields), tiny.tokens()
    lm.save(tmp_path / "a")
    assert AutoConfig.from_pretrained(tmp_path / "a").shape() == lm.config
    model, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.save_pretrained(tmp_path / "b")
    with torch.no_grad():
        expected = lm.network(ids)
        tiny.near(model(ids).logits, expected)
        back = load(tmp_path / "b", dtype="float32", device="cpu")
        tiny.near(back.network(ids), expected)
    for ours, theirs in zip(lm.network.parameters(), back.network.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert back.config == lm.config
    assert back.settings["architectures"] == [type(model).__name__]


def test_device_map_and_dtype(tmp_path):
    from transformers import AutoModel

    tiny.model("dlm").save(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model(tiny.tokens()).logits.shape == (2, 11, 48)
    assert model.get_input_embeddings() is model.network.embed
    assert type(pickle.loads(pickle.dumps(model.config))) is hf.DLMConfig


@pytest.mark.parametrize("case", ["dlm", "Dream"])
def test_loss_of_labels(case):
    lm, ids = tiny.model(case), tiny.tokens()
    model = hf.wrap(lm)
    labels = torch.where(ids == 40, torch.full_like(ids, 5), -100)
    output = model(ids, labels=labels, attention_mask=torch.ones_like(ids))
    rows = labels != -100
    logits = lm.network(ids)
    if lm.config.shifted_logits:
        logits = torch.cat((logits[:, :1], logits[:, :-1]), 1)
    torch.testing.assert_close(output.loss, F.cross_entropy(logits[rows], labels[rows]))
    assert isinstance(model(ids, return_dict=False), tuple)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_wrapped_models_share_weights_and_train():
    lm, ids = tiny.model("llada2_moe"), tiny.tokens()
    model = hf.wrap(lm)  # its checkpoints are read by dlm.load only: here it is a dlm
    assert model.config.model_type == "dlm"
    assert model.network is lm.network
    assert hf.unwrap(model).network is lm.network
    model.gradient_checkpointing_enable()
    model.train()
    model(ids, labels=ids).loss.backward()
    assert lm.network.embed.weight.grad is not None
    refused("Linear holds no dlm network", hf.unwrap, torch.nn.Linear(1, 1))


def test_from_scratch_is_initialised():
    model = hf.DLMForMaskedLM(hf.DLMConfig(**tiny.config("dlm").model_dump()))
    assert abs(model.network.embed.weight.std() - 0.3) < 0.02
    assert (model.network.norm.weight == 1).all()


@pytest.mark.filterwarnings("ignore")
def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    lm, ids = tiny.model("llada"), tiny.tokens()
    recipe = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
    model = peft.get_peft_model(hf.wrap(lm), recipe)
    model(ids, labels=ids).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 2 * 3 * 2
    with torch.no_grad():
        expected = model.eval()(ids).logits
        merged = hf.unwrap(model.merge_and_unload())
        merged.save(tmp_path)
        found = load(tmp_path, dtype="float32", device="cpu").network(ids)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
