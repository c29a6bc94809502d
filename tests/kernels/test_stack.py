"""The C kernels keep nothing on the stack whose size depends on a shape: threads of OpenMP may have little of it."""

import os
import subprocess
import sys

import pytest

from dlm.kernels.c import native

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])

STACK_KIB = 128
WORK = """
import torch
from dlm.kernels import Spans, reference
from dlm.kernels.c import native

def product(w):
    return native.Product(w.data_ptr(), None, None, *w.shape, w.stride(0))

def on_three_threads(kernel, *given):
    torch.set_num_threads(3)
    found = kernel(*given)
    torch.set_num_threads(1)  # torch's own kernels may need more stack
    return found

torch.manual_seed(0)
with torch.inference_mode():
    for e in (64, 128, 256):
        spans = Spans.of([range(90, 110), range(33)], [110, 33], [list(range(4)), list(range(4, 6))])
        q, pages = torch.randn(53, 8, e), torch.randn(6, 32, 4, e)
        given = q, pages, pages, spans, 8
        torch.testing.assert_close(on_three_threads(native.paged_attention, *given), reference.paged_attention(*given))
    many = Spans.of([[0]] * 30000, [1] * 30000, [[0]] * 30000)
    page = pages[:, :, :1, :4].contiguous()
    on_three_threads(native.paged_attention, torch.ones(30000, 1, 4), page, page, many, None)
    weight, x = torch.randn(700, 1500), torch.randn(40, 1500)
    found = on_three_threads(native.linear, product(weight), x)
    torch.testing.assert_close(found, x @ weight.T, rtol=0, atol=1e-3)
    small = product(weight[:, :512])
    on_three_threads(native.gated, small, small, x[:, :512])
    on_three_threads(lambda x: native.confidence(x, mask_id=3), torch.randn(9, 50000))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets the stack of Linux's threads")
def test_threads_with_little_stack_compute_all_shapes():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_STACKSIZE": f"{STACK_KIB}k", "DLM_NATIVE": "1"}
    limited = ["bash", "-c", 'ulimit -s 512 && exec "$@"', "bash", sys.executable, "-c", WORK]
    done = subprocess.run(limited, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
