"""`dlm-serve`: a model behind OpenAI's HTTP interface, with a live page."""

from collections.abc import Sequence

from dlm.serving.config import ServeConfig

from .flags import Flag, model_flag
from .options import Command, Options

COMMAND = Command(
    name="dlm-serve",
    summary="Serve a model: OpenAI's routes under /v1, a live page at /, /docs, /health, /ready and /metrics. Prints its URL "
    "when it takes requests; ends on SIGTERM or Ctrl-C, after what is under way.",
    config=ServeConfig,
    flags=(
        model_flag("model.name"),
        Flag(name="--host", metavar="ADDRESS", sets="serve.host", help="Short for --serve.host."),
        Flag(name="--port", metavar="N", sets="serve.port", help="Short for --serve.port."),
        Flag(name="--trace", sets="trace.enabled", help="Record every step: /v1/traces/ID shows them, with its page."),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    return COMMAND.run(_work, argv)


def _work(config: ServeConfig, options: Options) -> int:
    from dlm.errors import UserError

    try:
        from dlm.serving.run import serve, serve_replicas
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "prometheus_client"):
            raise
        raise UserError(f'the server needs {error.name}: pip install "dlm[serve]"') from None
    return serve_replicas(config, _say) if config.replicas.least else serve(config, _say)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
