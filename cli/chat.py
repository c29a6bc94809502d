"""`dlm-infer --chat`: a conversation, line by line. Knows no template: the tokenizer has it."""

import sys
from typing import Any

from dlm.errors import UserError
from dlm.inference.config import SamplerConfig

from .config import InferConfig, JobConfig
from .decode import decode
from .jobs import name_of
from .show import Printer, draft_of, lm_of, recording
from .streams import standard_input, unicode


def chat(config: InferConfig) -> None:
    """Read a line, answer it, remember both, until the end of input.

    On a terminal, Ctrl-C during an answer ends that answer alone, and the line it was for is forgotten.
    """
    lm = lm_of(config.model)
    if lm.tokenizer is None:
        raise UserError(f"model {config.model.name} has no tokenizer, so no chat template: --chat needs both")
    draft = draft_of(config.draft.model, lm)
    stream = standard_input()
    if stream.isatty():
        print("Ctrl-C ends an answer, Ctrl-D the conversation.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    sampler = _open_ended(lm, config.sampler)
    with Printer(config.output, echo=False) as printer, recording(config.trace) as printer.store:
        while (line := _read(stream)) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            turn = JobConfig(
                prompt=lm.chat(messages),
                request_id=name_of(len(messages) // 2, config),
                model=config.model,
                sampler=sampler,
            )
            try:
                answer = decode(lm, [turn], printer, config.engine, said=line, draft=draft)[0]
            except KeyboardInterrupt:
                if not stream.isatty():
                    raise
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer.text})


def _open_ended(lm: Any, sampler: SamplerConfig) -> SamplerConfig:
    """Without a length in the config, a model that writes from left to right ends its answers by itself."""
    if "gen_length" in sampler.model_fields_set or lm.config.attention != "causal":
        return sampler
    return sampler.model_copy(update={"gen_length": "auto"})


def _read(stream: Any) -> str | None:
    """The user's next line; None at the end of input. The mark is shown to a human only."""
    if stream.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = stream.readline()
    return unicode(line.rstrip("\n"), "standard input") if line else None
