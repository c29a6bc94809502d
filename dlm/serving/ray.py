"""The same server as replicas of Ray Serve, and the same engine as actors of Ray Data. The one file that imports Ray."""

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from dlm.errors import UserError
from dlm.serving.batch_config import BatchConfig, RaySection
from dlm.serving.bulk import Part, Worker
from dlm.serving.config import ReplicaSection, ServeConfig

try:
    ray: Any = import_module("ray")
except ModuleNotFoundError:
    raise UserError("more than one engine needs Ray: pip install 'dlm[ray,serve]'") from None

NAME = "dlm"


def connect(section: RaySection, **options: Any) -> None:
    """Join the cluster, or start a Ray of this machine's own; once."""
    if not ray.is_initialized():
        own = {"include_dashboard": False} if section.address is None else {}
        try:
            ray.init(address=section.address, log_to_driver=False, logging_level="error", **own, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"ray.address = {section.address!r}: {str(error)[:300]}") from None


def deployment(config: ServeConfig) -> Any:
    """A Ray Serve application: `serve.run(deployment(config))`. Each replica loads the model and has its own queue."""
    serve: Any = import_module("ray.serve")

    limits, replicas, section = config.serve, config.replicas, config.ray
    settings = config.model_dump(mode="json", exclude_unset=True)

    @serve.ingress()
    class Replica:
        """One server."""

        def __init__(self) -> None:
            from dlm.config import check
            from dlm.serving.server import Server

            _use_threads(section)
            self.server = Server(check(ServeConfig, settings, "the deployment"))
            self.server.load()

        def __serve_build_asgi_app__(self) -> Any:
            from dlm.serving.app import app_of

            return app_of(self.server)

        def check_health(self) -> None:
            if self.server.failure is not None:
                raise RuntimeError(f"the engine has failed: {self.server.failure}")

        async def __del__(self) -> None:
            self.server.draining = True
            await asyncio.to_thread(self.server.close)

    return serve.deployment(
        Replica,
        name=NAME,
        max_ongoing_requests=limits.max_waiting + config.engine.max_num_requests,
        max_queued_requests=limits.max_waiting,
        ray_actor_options={"num_cpus": section.num_cpus, "num_gpus": section.num_gpus},
        graceful_shutdown_timeout_s=limits.grace,
        health_check_period_s=5,
        **_scaling(replicas),
    ).bind()


def _scaling(section: ReplicaSection) -> dict[str, Any]:
    """So many replicas, or between so many and so many, by how busy they are."""
    if section.most is None:
        return {"num_replicas": section.least}
    return {
        "autoscaling_config": {
            "min_replicas": section.least,
            "max_replicas": section.most,
            "target_ongoing_requests": section.busy,
        }
    }


def build(args: dict[str, Any]) -> Any:
    """`deployment` of a config by name, for a Serve config file: `args` are `config`, and `overrides` by dotted keys."""
    from dlm.config import load

    overrides = {name: str(value) for name, value in args.get("overrides", {}).items()}
    return deployment(load(ServeConfig, [args["config"]] if "config" in args else [], overrides))


def start(config: ServeConfig) -> str:
    """Run the deployment behind Ray's own HTTP proxy; returns its address when all replicas are there."""
    serve: Any = import_module("ray.serve")

    connect(config.ray)
    serve.start(http_options={"host": config.serve.host, "port": config.serve.port})
    serve.run(deployment(config), name=NAME, route_prefix="/")
    return f"http://{config.serve.host}:{config.serve.port}"


def stop() -> None:
    """End what `start` began, after what is under way."""
    serve: Any = import_module("ray.serve")

    serve.shutdown()
    ray.shutdown()


class Actor:
    """An engine for Ray Data: writes the parts it is given."""

    def __init__(self, config: BatchConfig) -> None:
        _use_threads(config.ray)
        self.worker = Worker(config)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        parts = [Part(**json.loads(text)) for text in batch["part"]]
        return {"rows": [self.worker.do(part) for part in parts]}


def fan_out(config: BatchConfig, parts: Sequence[Part]) -> Iterator[int]:
    """Have a pool of actors do the parts; yields the rows of each as it is done."""
    data: Any = import_module("ray.data")
    connect(config.ray)
    data.DataContext.get_current().enable_progress_bars = False
    items = data.from_items([{"part": json.dumps(asdict(part))} for part in parts], override_num_blocks=len(parts))
    done = items.map_batches(
        Actor,
        fn_constructor_args=(config,),
        batch_size=1,
        compute=data.ActorPoolStrategy(size=min(config.batch.actors, len(parts))),
        num_cpus=config.ray.num_cpus,
        num_gpus=config.ray.num_gpus or None,
    )
    for row in done.iter_rows():
        yield int(row["rows"])


def _use_threads(section: RaySection) -> None:
    """As many threads as it has CPUs: before torch starts them."""
    os.environ["OMP_NUM_THREADS"] = str(max(1, int(section.num_cpus)))
