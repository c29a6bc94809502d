"""`dlm-infer --chat`: a conversation, line by line. Knows no template: the tokenizer has it."""

import sys
from typing import Any

from dlm.errors import UserError

from .config import InferConfig, JobConfig
from .decode import decode
from .jobs import name_of
from .show import Printer, draft_of, lm_of, recording
from .streams import standard_input, unicode


def chat(config: InferConfig) -> None:
    """Read a line, answer it, remember both, until the end of input."""
    lm = lm_of(config.model)
    if lm.tokenizer is None:
        raise UserError(f"model {config.model.name} has no tokenizer, so no chat template: --chat needs both")
    draft = draft_of(config.draft.model, lm)
    stream = standard_input()
    if stream.isatty():
        print("Ctrl-D ends the conversation.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    with Printer(config.output, echo=False) as printer, recording(config.trace) as printer.store:
        while (line := _read(stream)) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            turn = JobConfig(
                prompt=lm.chat(messages),
                request_id=name_of(len(messages) // 2, config),
                model=config.model,
                sampler=config.sampler,
            )
            answer = decode(lm, [turn], printer, config.engine, said=line, draft=draft)[0]
            messages.append({"role": "assistant", "content": answer.text})


def _read(stream: Any) -> str | None:
    """The user's next line; None at the end of input. The mark is shown to a human only."""
    if stream.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = stream.readline()
    return unicode(line.rstrip("\n"), "standard input") if line else None
