"""What every test shares: one thread, no network, reproducible examples, GPU tests only where there is a GPU."""

import os
import tempfile

# Before torch or a tokenizer starts its threads; several test workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch.compile takes what it compiled for AVX-512 for what it would compile under ATEN_CPU_CAPABILITY=avx2, and gives NaN.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/torchinductor-{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}-{os.environ.get('USER', '')}",
)

import pytest
from hypothesis import HealthCheck, settings

# A shared machine is slow at times: no deadlines. Derandomised: a red run stays red.
settings.register_profile("dlm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dlm")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "outside" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("outside"):
                item.add_marker(pytest.mark.skip(reason="runs under `bash scripts/test --outside`"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
