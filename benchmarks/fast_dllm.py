"""Fast-dLLM's two samplers from a checkout of it, on its own network with our weights."""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Job

from dlm.models import LM


def jobs(checkout: Path, lm: LM, prompt: list[int], **numbers: Any) -> dict[str, Job]:
    """Cache -> a call of its sampler; it returns what was written, and the number of forward passes."""
    sys.path.insert(0, str(checkout / "llada"))
    import generate as theirs  # type: ignore
    from model.configuration_llada import LLaDAConfig  # type: ignore
    from model.modeling_llada import LLaDAModelLM  # type: ignore
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        lm.save(folder)
        config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
        skipped = ("architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version")
        settings = LLaDAConfig(**{k: v for k, v in config.items() if k not in skipped})
        settings.init_device, settings.flash_attention, settings.use_cache = "cpu", False, True
        network = LLaDAModelLM(settings, init_params=False).float().eval()
        network.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    network = network.to(device=lm.device, dtype=lm.dtype)
    ids = torch.tensor([prompt], device=lm.device)

    def run(sampler: Callable[..., tuple[torch.Tensor, int]]) -> tuple[list[int], int]:
        out, forwards = sampler(network, ids, mask_id=lm.mask_id, **numbers)
        return out[0, len(prompt) :].tolist(), forwards

    samplers = {"prefix": theirs.generate_with_prefix_cache, "dual": theirs.generate_with_dual_cache}
    return {cache: partial(run, sampler) for cache, sampler in samplers.items()}
