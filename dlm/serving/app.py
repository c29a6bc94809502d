"""The routes. Each reads a body, asks `Server`, and answers; nothing here decodes."""

import asyncio
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from dlm.diffusion.unmask import RULES
from dlm.errors import UserError
from dlm.serving.answer import Answer, encoded
from dlm.serving.ask import checked, refused
from dlm.serving.complaint import complaint
from dlm.serving.echo import piece
from dlm.serving.gate import Gate
from dlm.serving.page import TRACE_POLICY, page
from dlm.serving.refusal import Refusal
from dlm.serving.schema import ChatBody, Common, CompletionBody, DetokenizeBody, TokenizeBody
from dlm.serving.server import Server, known_model
from dlm.serving.stored import stored

T = TypeVar("T")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII, whatever characters the value has."""
    return Response(encoded(value), status, headers, "application/json")


def app_of(server: Server) -> FastAPI:
    """The ASGI application of a server, which its caller loads and closes."""
    app = FastAPI(
        title="dlm",
        version=version("dlm"),
        description="Diffusion language models behind OpenAI's interface.",
        redoc_url=None,
    )
    _add_errors(app)
    _add_answers(app, server)
    _add_tokens(app, server)
    _add_state(app, server)
    _add_traces(app, server)
    app.add_middleware(Gate, server=server)
    if origins := server.config.serve.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


def _add_errors(app: FastAPI) -> None:
    def answered(refusal: Refusal) -> Response:
        return json_response(refusal.body(), refusal.status, refusal.headers())

    @app.exception_handler(Refusal)
    async def _(request: Request, refusal: Refusal) -> Response:
        request.scope.setdefault("dlm", {})["error"] = refusal.message
        return answered(refusal)

    @app.exception_handler(UserError)
    async def _(request: Request, error: UserError) -> Response:
        return answered(refused(error))

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        refusal = complaint(error.errors())
        request.scope.setdefault("dlm", {})["error"] = refusal.message
        return answered(refusal)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path[:200]}"
        known = "/v1/chat/completions, /v1/completions, /v1/models, /docs"
        words = {404: f"{where}: no such route; there are {known}", 405: f"{where}: this route has another method"}
        refusal = Refusal(error.status_code, words.get(error.status_code, str(error.detail)))
        return json_response(refusal.body(), refusal.status, {**refusal.headers(), **(error.headers or {})})


def _add_answers(app: FastAPI, server: Server) -> None:
    async def answer(request: Request, body: Common) -> Response:
        server.require_open()
        known_model(server, body.model)
        server.runner.require_room()
        ask = await _in_worker(server, partial(checked, server.lm, server.config, body))
        if server.config.serve.log_text:
            request.scope["dlm"]["prompt"] = getattr(body, "prompt", None) or [m.plain for m in body.messages]  # type: ignore[attr-defined]
        return Answer(server, ask, request.scope["dlm"].get("owner"))

    @app.post("/v1/completions", tags=["OpenAI"])
    async def completions(request: Request, body: CompletionBody) -> Any:
        """Continue a prompt; with `suffix` or `infill`, fill its holes."""
        return await answer(request, body)

    @app.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(request: Request, body: ChatBody) -> Any:
        """Answer a conversation, through the model's chat template."""
        return await answer(request, body)


def _add_tokens(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text or a conversation, as lm-eval's and vLLM's clients ask for them."""
        known_model(server, body.model)
        lm = server.lm

        def encode() -> list[int]:
            tokenizer, text = lm.require_tokenizer(), body.prompt or ""
            if body.messages is not None:
                messages = [message.plain for message in body.messages]
                text = tokenizer.apply_chat_template(messages, body.add_generation_prompt)
            ids = tokenizer.encode(text)
            return tokenizer.begun(ids) if ids and body.add_special_tokens else ids

        ids = await _in_worker(server, encode)
        found = {"count": len(ids), "max_model_len": lm.config.context_length, "tokens": ids}
        strings = [piece(lm, token) for token in ids] if body.return_token_strs else None
        return json_response({**found, "token_strs": strings})

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        known_model(server, body.model)
        lm, size = server.lm, server.lm.config.vocab_size
        for token in body.tokens:
            if token >= size:
                raise Refusal(400, f"tokens: {token} lies outside the vocabulary of {size} tokens", param="tokens")
        text = await _in_worker(server, partial(lm.decode, body.tokens, skip_special=False))
        return json_response({"prompt": text})

    @app.get("/tokenizer_info", tags=["tokens"])
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template."""
        tokenizer = server.lm.require_tokenizer()
        names = tokenizer.template_names
        facts = {**{name: text or None for name, text in names.items()}, "chat_template": tokenizer.chat_template}
        return json_response({"tokenizer_class": "dlm", "vocab_size": tokenizer.vocab_size, **facts})


def _add_state(app: FastAPI, server: Server) -> None:
    def described() -> dict[str, Any]:
        lm = server.lm
        return {
            "id": server.config.served_name,
            "object": "model",
            "created": server.created,
            "owned_by": "dlm",
            "max_model_len": lm.config.context_length,
            "dlm": {
                "family": lm.config.model_type,
                "attention": lm.config.attention,
                "infills": lm.mask_id is not None and lm.config.attention != "causal",
                "traces": server.store is not None,
                "needs_key": server.keys.needed,
                "rules": {name: _settings_of(name) for name in RULES},
                "max_tokens": server.config.serve.max_tokens,
                "sampler": server.config.sampler.model_dump(mode="json", exclude={"seed", "num_samples"}),
            },
        }

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """The served model."""
        return json_response({"object": "list", "data": [described()]})

    @app.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str) -> Response:
        """One model by its id."""
        known_model(server, name)
        return json_response(described())

    @app.get("/health", tags=["state"])
    async def health() -> Response:
        """200 while the server can answer at all."""
        if server.failure is not None:
            raise Refusal(500, f"the engine has failed: {type(server.failure).__name__}")
        return json_response({"status": "alive"})

    @app.get("/ready", tags=["state"])
    async def ready() -> Response:
        """200 when the model is loaded and requests are taken, else 503."""
        server.require_open()
        return json_response({"status": "ready", "model": server.config.served_name})

    @app.get("/metrics", tags=["state"])
    async def metrics() -> Response:
        """Counts and times for Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        content, headers = page()
        return Response(content, headers=headers)


def _add_traces(app: FastAPI, server: Server) -> None:
    async def of(name: str, owner: str | None) -> Any:
        """The trace of that name, if it is this key's."""
        if server.store is None:
            raise Refusal(404, "this server keeps no traces: it was started without --trace.enabled")
        return await asyncio.get_running_loop().run_in_executor(None, stored, server.store, name, owner)

    @app.get("/v1/traces/{name}", tags=["traces"])
    async def trace(request: Request, name: str) -> Response:
        """The steps of a recorded request, readable with the key that asked for it."""
        from dlm.trace.view import described

        return json_response(described(await of(name, request.scope["dlm"].get("owner"))))

    @app.get("/v1/traces/{name}/page", tags=["traces"])
    async def trace_page(request: Request, name: str) -> Response:
        """The same as a page that needs nothing else."""
        from dlm.trace import view

        return Response(view.page(await of(name, request.scope["dlm"].get("owner"))), headers=TRACE_POLICY)


def _settings_of(rule: str) -> dict[str, Any]:
    """The settings a rule reads, with their defaults."""
    return {name: getattr(RULES[rule], name) for name in RULES[rule].settings()}


async def _in_worker(server: Server, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(server.worker, work)
