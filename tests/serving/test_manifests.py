"""The files for Docker and Kubernetes say what we read: their syntax, their options, their ports."""

from pathlib import Path

import pytest
import yaml

from dlm.cli.serve import COMMAND
from dlm.config import load
from dlm.serving.config import ServeConfig

DOCKER = Path(__file__).parent.parent.parent / "docker"


def read(name: str) -> dict:
    return yaml.safe_load((DOCKER / name).read_text())


def test_compose():
    services = read("compose.yaml")["services"]
    server = services["server"]
    assert (DOCKER / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    words = [word.replace("${MODEL:-pico}", "pico") for word in server["command"]]
    options = COMMAND.parse(words)
    config = load(ServeConfig, options.files, options.overrides)
    assert config.serve.host == "0.0.0.0" and config.served_name == "pico"
    assert server["ports"] == [f"127.0.0.1:{config.serve.port}:{config.serve.port}"]
    assert int(server["stop_grace_period"].removesuffix("s")) > config.serve.grace
    targets = yaml.safe_load(read("compose.yaml")["configs"]["prometheus"]["content"])["scrape_configs"][0]
    assert targets["static_configs"][0]["targets"] == [f"server:{config.serve.port}"]


def test_kuberay():
    manifest = read("kuberay.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    module, _, function = application["import_path"].partition(":")
    source = (DOCKER.parent / f"{module.replace('.', '/')}.py").read_text()
    assert f"def {function}(" in source
    args = application["args"]
    config = load(ServeConfig, [args["config"]], args["overrides"])
    assert (config.replicas.least, config.replicas.most) == (1, 4)
    (workers,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["maxReplicas"] >= config.replicas.most
    cpus = workers["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
    assert float(cpus) >= config.ray.num_cpus
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > config.serve.grace


@pytest.mark.parametrize("most", [1, 0])
def test_replicas_that_make_no_sense(most):
    with pytest.raises(ValueError, match="replicas"):
        load(ServeConfig, [], {"replicas.least": "2", "replicas.most": str(most)})
