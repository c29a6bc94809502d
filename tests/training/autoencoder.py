"""A model from outside the package that is no `Transformer`: it squeezes byte rows through a few numbers and draws them back."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file
from torch import nn

from dlm.config import check
from dlm.data.tokenizer import load_tokenizer
from dlm.diffusion.rng import Purpose, uniform
from dlm.training.trainable import TRAINABLES, Trainable

TRAINABLES["autoencoder"] = "tests.training.autoencoder:Autoencoder"  # the one line


class Settings(BaseModel):
    """[trainable.own]"""

    model_config = ConfigDict(extra="forbid")
    latent: int = 4


class Net(nn.Module):
    def __init__(self, vocabulary: int, length: int, latent: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.encode = nn.Linear(8 * length, latent)
        self.decode = nn.Linear(latent, length * vocabulary)

    def forward(self, ids: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self.encode(self.embed(ids).flatten(1))
        return latent, self.decode(latent + noise).unflatten(1, (ids.shape[1], -1))


class Objective(nn.Module):
    """Reconstruction under noise, and small latents: two parts, averaged over the global batch."""

    def __init__(self, network: Net, seed: int) -> None:
        super().__init__()
        self.network, self.seed = network, seed

    def forward(self, batch):
        place = torch.arange(self.network.encode.out_features)
        address = {"sample": batch.index[:, None], "step": batch.step, "position": place}
        latent, logits = self.network(batch.input_ids, uniform(Purpose.TIME, seed=self.seed, **address).float() - 0.5)
        nats = F.cross_entropy(logits.flatten(0, 1), batch.input_ids.flatten(), reduction="sum")
        share = 1 / batch.samples
        return {"text": nats * share / batch.input_ids.shape[1], "latent": 0.01 * latent.square().sum() * share}


class Autoencoder(Trainable):
    exact = True

    def __init__(self, network, tokenizer, seed):
        self.network, self.tokenizer, self.seed = network, tokenizer, seed
        self.batches = 0

    @classmethod
    def start(cls, config, a):
        own, t = check(Settings, config.trainable.own, "[trainable.own]"), config.train
        tokenizer = load_tokenizer(Path(t.tokenizer))
        torch.manual_seed(t.seed)
        return cls(Net(tokenizer.vocab_size, t.length, own.latent), tokenizer, t.seed)

    def matrices(self):
        return {"hidden": [self.network.encode.weight], "embed": [self.network.embed.weight], "head": [self.network.decode.weight]}  # fmt: skip

    def objective(self, ranges):
        return Objective(self.network, self.seed)

    def nats(self, ids, answer, index, draws, seed):
        _, logits = self.network(ids, torch.zeros(()))
        return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").sum(-1, keepdim=True)

    def numbers(self):
        self.batches += 1
        return {"batches": self.batches}

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]

    def save(self, config):
        save_file(dict(self.network.state_dict()), Path(config.train.out) / "model.safetensors")
        (Path(config.train.out) / "config.json").write_text(json.dumps({"length": config.train.length}))


def load(folder: Path) -> Net:
    """What `save` wrote."""
    weights = load_file(folder / "model.safetensors")
    net = Net(len(weights["embed.weight"]), json.loads((folder / "config.json").read_text())["length"], len(weights["encode.weight"]))  # fmt: skip
    net.load_state_dict(weights)
    return net
