"""Dream (arXiv 2508.15487): Qwen2 that sees both ways, its logits still of the next token."""

from dlm.models.families.family import Family
from dlm.models.families.qwen2 import read_qwen2, write_qwen2
from dlm.models.families.shape import QWEN_NAMES

FAMILY = Family(
    "DreamModel",
    read_qwen2,
    write_qwen2,
    (QWEN_NAMES,),
    shifted_logits=True,
    mask_in_softmax=True,
    mask_token_id=151666,
)
