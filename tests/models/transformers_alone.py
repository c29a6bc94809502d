"""Run as a program: what transformers makes of saved folders in a process where `dlm` cannot be imported.

    python transformers_alone.py FOLDERS IDS OUT

Each folder in FOLDERS is read by one Auto class, IDS holds the token ids, and OUT gets what the models compute.
"""

import sys
from itertools import cycle
from pathlib import Path

sys.modules["dlm"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer  # noqa: E402

folders, ids, out = Path(sys.argv[1]), torch.load(sys.argv[2]), Path(sys.argv[3])
found = {}
classes = cycle((AutoModel, AutoModelForMaskedLM, AutoModelForCausalLM))
for folder, auto in zip(sorted(folders.iterdir()), classes, strict=False):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model, report = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True, dtype=torch.float32)
    model.eval()
    mine = ids if config.vocab_size < 1000 else ids * 7
    labels = torch.where(mine % 2 == 0, mine, -100)
    valid = torch.ones_like(mine)
    valid[1, -3:] = 0
    with torch.no_grad():
        full = model(mine, labels=labels, output_hidden_states=True)
        entry = {"class": type(model).__name__, "odd": [str(name) for kind in report.values() for name in kind]}
        entry |= {"ids": mine, "labels": labels, "logits": full.logits, "loss": full.loss}
        entry |= {"hidden": list(full.hidden_states), "padded": model(mine, attention_mask=valid).logits}
        entry |= {"left": model(mine, attention_mask=valid.flip(1)).logits}
        entry |= {"placed": model(mine, position_ids=torch.arange(3, 3 + mine.shape[1])[None]).logits, "dtypes": {}}
    model.save_pretrained(out.parent / "again" / folder.name)
    half = auto.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    entry["half"] = half(mine).logits.detach()
    entry["dtypes"] = {name: str(tensor.dtype) for name, tensor in half.state_dict().items()}
    if (folder / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        tokenizer.save_pretrained(out.parent / "again" / folder.name)
        chat = [{"role": "user", "content": " a [MASK] of\n x=1\n"}, {"role": "assistant", "content": "ok"}]
        entry["mask"] = tokenizer.mask_token_id
        for prompt in (True, False) if tokenizer.chat_template else ():
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
            entry[f"chat {prompt}"] = text
            given = tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            entry[f"ids {prompt}"] = list(given)
    found[folder.name] = entry
torch.save(found, out)
