"""The settings that a model's own generation_config.json recommends: they hold where a call says nothing.

They stand under "dlm", apart for the two things that are done with a model:

    {"dlm": {"generate": {"temperature": 1.0, "rule": "random"}, "infill": {"temperature": 0.0}}}
"""

from collections.abc import Mapping
from typing import Any

from dlm import config as toml
from dlm.errors import UserError, nearest
from dlm.inference.checks import CHECKS
from dlm.inference.config import SamplerConfig
from dlm.inference.readers import FILLS, SAMPLER_READERS
from dlm.models.lm import LM
from dlm.reading import unread

KEY, KINDS = "dlm", ("generate", "infill")
CALLERS = ("gen_length", "max_gen_length", "allow_long", "stop", "seed", "num_samples")
"""Settings that say what is asked for, which no model can know."""


def recommended(lm: LM, kind: str) -> SamplerConfig:
    """What the model recommends for "generate" or "infill", with the settings it names in `model_fields_set`.

    Raises UserError where the file names a setting that does not exist, is not the model's to choose, or has a wrong value.
    """
    where = f"model {lm.name!r}, generation_config.json, {KEY}"
    table = lm.generation.get(KEY, {})
    if not isinstance(table, Mapping):
        raise UserError(f'{where} = {table!r:.60}: expected an object with "generate" and "infill"')
    for name, values in table.items():
        if name not in KINDS:
            raise UserError(f"{where}.{name}: unknown{nearest(name, KINDS)} (known: {', '.join(KINDS)})")
        if not isinstance(values, Mapping):
            raise UserError(f"{where}.{name} = {values!r:.60}: expected an object of sampler settings")
    values: Mapping[str, Any] = table.get(kind, {})
    for name in CALLERS:
        if name in values:
            raise UserError(f"{where}.{kind}.{name} = {values[name]!r:.60}: is for each call to say; leave it out")
    found = toml.check(SamplerConfig, dict(values), f"{where}.{kind}") if values else SamplerConfig()
    if (problem := unread(found, SAMPLER_READERS, values)) is not None:
        raise UserError(f"{where}.{kind}: {problem}")
    require_check(found, f"{where}.{kind}")
    return found


def with_recommended(lm: LM, settings: SamplerConfig, kind: str) -> SamplerConfig:
    """`settings`, and in the place of what it leaves open what the model recommends, as far as the call's own choices read it.

    A recommended block length that does not divide the call's gen_length is left out, too.
    """
    found = recommended(lm, kind)
    names = found.model_fields_set - settings.model_fields_set
    length = settings.gen_length
    if isinstance(length, int) and found.block_length is not None and length % found.block_length:
        names -= {"block_length"}
    merged = settings.model_copy(update={name: getattr(found, name) for name in names})
    ignored = [name for name in names & SAMPLER_READERS.keys() if not SAMPLER_READERS[name].reads(merged)]
    return merged.model_copy(update={name: SamplerConfig.model_fields[name].get_default() for name in ignored})


def require_check(settings: SamplerConfig, where: str) -> None:
    """Raises UserError for settings of a check where there is none, once it is known what the model recommends."""
    for name in FILLS:
        value = getattr(settings, name)
        if settings.check == "none" and value != SamplerConfig.model_fields[name].default:
            raise UserError(
                f"{where}: {name} = {value} is only read with a check of filled holes, and there is none: give a check, as "
                f'in check = "{next(iter(CHECKS))}", or leave {name} out'
            )
