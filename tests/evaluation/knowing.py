"""Models that know the answer: what they score is known beforehand. Tiny, deterministic, and slow to no one."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dlm.data.tokenizer import Tokenizer
from dlm.models import LM, ModelConfig, Transformer
from dlm.sudoku import sudoku_tokenizer
from tests.inference.tiny import EOS, MASK, byte_tokenizer

SHAPE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}


class Knowing(Transformer):
    """Sure of the text that agrees with all that is shown; `texts` are token ids, the first that agrees counts."""

    def know(self, texts: Sequence[Sequence[int]], height: float = 20.0) -> "Knowing":
        self.texts, self.height = [torch.tensor(text) for text in texts], height
        return self

    def hidden(
        self, input_ids: Tensor, positions=None, valid=None, *_: object, output_rows=None, **__: object
    ) -> Tensor:
        """Logits at once; one packed row of whole texts, or a padded batch."""
        if input_ids.ndim == 1:
            assert positions is not None
            starts = (positions == 0).nonzero()[:, 0].tolist()
            lengths = [end - start for start, end in pairwise([*starts, len(positions)])]
            packed = torch.cat([self._look(ids) for ids in input_ids.split(lengths)])
            return packed if output_rows is None else packed[output_rows]
        lengths = input_ids.shape[1] * torch.ones(len(input_ids)) if valid is None else valid.sum(-1)
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, length in enumerate(lengths.int().tolist()):
            logits[row, :length] = self._look(input_ids[row, :length])
        return logits

    def head(self, hidden: Tensor) -> Tensor:
        return hidden

    def _look(self, ids: Tensor) -> Tensor:
        shown = ids != self.config.mask_token_id
        text = next(t for t in self.texts if len(t) == len(ids) and bool((t == ids)[shown].all()))
        logits = torch.zeros(len(ids), self.config.vocab_size)
        logits[torch.arange(len(ids)), text] = self.height
        return logits


def sudoku_lm(solutions: Sequence[Sequence[int]]) -> LM:
    """Solves the puzzles of these solutions; a wrong "solution" is filled in just as surely."""
    tokenizer = Tokenizer(sudoku_tokenizer(), {"mask_token": "[MASK]", "eos_token": "[EOS]"})
    config = ModelConfig(**SHAPE, intermediate_size=8, vocab_size=11, mask_token_id=10, eos_token_id=0)
    return LM(Knowing(config).know(solutions).eval(), tokenizer, "knowing")


def text_lm(windows: Sequence[Sequence[int]]) -> LM:
    """Fills windows of bytes."""
    config = ModelConfig(**SHAPE, intermediate_size=8, vocab_size=258, mask_token_id=MASK, eos_token_id=EOS)
    return LM(Knowing(config).know(windows).eval(), byte_tokenizer(), "knowing")
