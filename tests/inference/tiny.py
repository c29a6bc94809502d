"""Tiny random models that mean nothing but differ everywhere, and a tokenizer of bytes."""

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from dlm.data.tokenizer import Tokenizer
from dlm.models import LM, ModelConfig, Transformer

MASK, EOS = 256, 257


def byte_tokenizer(mask: str = "[MASK]") -> Tokenizer:
    """256 bytes, the mask and <|endoftext|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([mask, "<|endoftext|>"])
    tokenizer = Tokenizer(backend)
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id) == (MASK, EOS)
    return tokenizer


def tiny_lm(seed: int = 0, spread: float = 0.3, tokenizer: Tokenizer | None = None, **fields) -> LM:
    """`spread` makes the model sure of itself; the mask is never its favourite."""
    shape = {"model_type": "llada", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    shape |= {"mask_token_id": 63, "mask_in_softmax": True, "initializer_range": spread}
    network = Transformer(ModelConfig(**{**shape, **fields}))
    network.initialise(torch.Generator().manual_seed(seed))
    if network.config.mask_token_id is not None and network.lm_head is not None:
        with torch.no_grad():
            network.lm_head.weight[network.config.mask_token_id] *= 0.01
    return LM(network.eval(), tokenizer, "tiny")


def text_lm(**fields) -> LM:
    """A tiny model that reads text."""
    return tiny_lm(tokenizer=byte_tokenizer(), vocab_size=258, mask_token_id=MASK, eos_token_id=EOS, **fields)


def likes(lm: LM, token: int, height: float) -> LM:
    """The same model, but the logit of `token` is `height` everywhere."""

    def lift(module, inputs, logits):
        logits = logits.clone()
        logits[..., token] = height
        return logits

    lm.network.lm_head.register_forward_hook(lift)
    return lm
