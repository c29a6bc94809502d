"""`dlm-infer --url`: the same jobs, decoded by a server. Loads no model."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from dlm.errors import UserError
from dlm.serving.client import Client

from .config import InferConfig, JobConfig
from .jobs import collect, has_holes
from .options import Options
from .streams import standard_input, to_json, unicode


def decode_there(url: str, config: InferConfig, options: Options) -> None:
    """Send each job to the server at this address, or chat with it, and print the answers."""
    for name in ("engine", "trace", "draft"):
        if (given := getattr(config, name).model_fields_set) and name in config.model_fields_set:
            raise UserError(f"[{name}] {sorted(given)[0]} is the server's own with --url: set it where dlm-serve runs")
    client = Client(url)
    model = config.model.name if "name" in config.model.model_fields_set else client.model()
    if "--chat" in options.given:
        return _chat(client, model, config)
    jobs = collect(config, options)
    if any(job.sudoku is not None for job in jobs):
        raise UserError("--url: a server fills in texts; a Sudoku is solved where its model is: leave --url out")
    file = options.value("--output")
    sink = None if file is None else open(file, "w", encoding="utf-8")  # noqa: SIM115
    try:
        for job in jobs:
            _show(_answer(client, model, job, job.sampler.num_samples), job, config, sink)
    finally:
        if sink is not None:
            sink.close()


def _answer(client: Client, model: str, job: JobConfig, samples: int) -> dict[str, Any]:
    body = (
        {"model": model, "prompt": job.prompt, "infill": True}
        if has_holes(job)
        else {"model": model, "prompt": job.prompt}
    )
    return client.post("/v1/completions", {**body, **_settings(job), **({"n": samples} if samples > 1 else {})})


def _settings(job: JobConfig) -> dict[str, Any]:
    """The job's sampler settings as fields of a request; always with a seed, since the server would draw one."""
    given = job.sampler.model_dump(mode="json", include=job.sampler.model_fields_set - {"num_samples"})
    ends = ("gen_length", "max_gen_length", "stop") if has_holes(job) else ()
    found = {name: value for name, value in given.items() if value is not None and value != [] and name not in ends}
    return {**found, "seed": job.sampler.seed}


def _show(answer: dict[str, Any], job: JobConfig, config: InferConfig, sink: Any) -> None:
    facts = answer.get("dlm", {})
    for choice in answer["choices"]:
        own = {**facts, **(facts["choices"][choice["index"]] if "choices" in facts else {})}
        own.pop("choices", None)
        if sink is not None or config.output.json_lines:
            name = job.request_id if len(answer["choices"]) == 1 else f"{job.request_id}/{choice['index']}"
            line = {
                "prompt": job.prompt,
                "request_id": name,
                "text": choice["text"],
                "finish_reason": choice["finish_reason"],
            }
            line |= own
            print(to_json(line) if sink is None else json.dumps(line, ensure_ascii=False), file=sink, flush=True)
            continue
        print(choice["text"], flush=True)
        if not config.output.quiet:
            print(
                f"{own.get('nfe', '?')} NFE · {own.get('tpf', '?')} TPF · seed {own.get('seed', '?')}", file=sys.stderr
            )


def _chat(client: Client, model: str, config: InferConfig) -> None:
    """Chat with the server, and print each answer while it comes."""
    stream, messages = standard_input(), []
    job = JobConfig(prompt="", sampler=config.sampler)
    while line := _line(stream):
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        text = ""
        for part in _parts(client, {"model": model, "messages": messages, **_settings(job)}):
            text += part
            print(part, end="", flush=True)
        print(flush=True)
        messages.append({"role": "assistant", "content": text})


def _line(stream: Any) -> str:
    if stream.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return unicode(stream.readline(), "standard input")


def _parts(client: Client, body: dict[str, Any]) -> Iterator[str]:
    for chunk in client.stream("/v1/chat/completions", body):
        if chunk["choices"]:
            yield chunk["choices"][0]["delta"].get("content") or ""
