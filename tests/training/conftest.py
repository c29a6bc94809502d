from pathlib import Path

import pytest

from dlm.training.loop import train
from tests.training.runs import config


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a causal model in `ar`, of a few steps of the causal objective."""
    folder = tmp_path_factory.mktemp("base")
    train(config(folder, "ar", objective__masking="causal", train__steps="4", eval__sequences="0"))
    return folder
