"""What an engine computes with: one path, and the weights as they were when it started or was reloaded."""

from contextlib import AbstractContextManager

import torch

from dlm.errors import UserError
from dlm.inference.config import EngineConfig
from dlm.inference.forward import Forward
from dlm.inference.fused import FusedLayers, forget, frozen_layers
from dlm.inference.graphs import Graphs, cuda_graphs
from dlm.inference.layout import Layout
from dlm.inference.memory import tensor_bytes
from dlm.inference.transfers import Transfers
from dlm.kernels.paths import PATHS, Path, computing_with, find
from dlm.models import fingerprint
from dlm.models.lm import LM
from dlm.models.packing import pack
from dlm.models.transformer import Transformer


class Compute:
    """Makes an engine's forwards, and checks that the weights have not changed since it was made."""

    def __init__(self, lm: LM, config: EngineConfig) -> None:
        self.lm, self.deterministic = lm, config.deterministic
        self.path = find(config.kernels, lm.device, lm.dtype)
        self.transfers = Transfers(lm.device)
        self.records = records_steps(lm, config, self.path)
        self.graphs = self.recorder(lm.network)
        self._freeze()

    def reload(self) -> None:
        """Take the weights as they are now, whatever was written to them and how."""
        forget(self.lm.network)
        fingerprint.forget(self.lm.network)
        if self.graphs is not None:
            self.graphs.clear()
        self._freeze()

    def check(self) -> None:
        """Raise UserError where the weights changed since; see `weights_state` for what is seen."""
        if fingerprint.weights_state(self.lm.network) != self.state:
            raise UserError("the model's weights changed since this engine started: call engine.reload()")

    def forward(self, layout: Layout) -> Forward:
        """The network over one layout."""
        return Forward(self.lm.network, layout, self.path, self.fused, self.deterministic)

    def recorder(self, network: Transformer) -> Graphs | None:
        """Records steps of a network, the model's or its draft's; None where none are recorded."""
        return Graphs(network, self.path, self.deterministic, cuda_graphs()) if self.records else None

    def running(self) -> AbstractContextManager[None]:
        """Enter it around a step: kernels then take this path."""
        return computing_with(self.path)

    def _freeze(self) -> None:
        network = self.lm.network
        if not network.training:
            pack(network)
        self.state = fingerprint.weights_state(network)
        frozen = frozen_layers(network, self.state, self.path.unit) if self.path.whole_layers else None
        if frozen is None and self.path.whole_layers and self.lm.dtype != torch.float32:
            self.path = PATHS["torch"]  # C's single kernels are for floats
        self.fused = None if frozen is None else FusedLayers(network, frozen)
        own = {x.data_ptr() for x in network.parameters()} if frozen is not None else set()
        self.copied = tensor_bytes(x for x in (frozen.kept if frozen is not None else ()) if x.data_ptr() not in own)
        """Bytes of weights in the layout that C reads, beside the network's own."""


def records_steps(lm: LM, config: EngineConfig, path: Path) -> bool:
    """Whether steps are recorded and replayed."""
    return config.cuda_graphs and path.paged and lm.device.type == "cuda" and lm.network.group is None
