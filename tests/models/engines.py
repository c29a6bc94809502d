"""What other engines' own sources read of a checkpoint, against our tables and the names we write. Runs none of their code.

python -m tests.models.engines sglang-*.whl lmdeploy-*.whl     # `pip download --no-deps sglang lmdeploy` fetches them
"""

import ast
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from dlm.models.engines import ENGINES, Served
from tests.models import tiny

FILES = {
    ("sglang", "SDARForCausalLM"): "sglang/srt/models/sdar.py",
    ("sglang", "LLaDA2MoeModelLM"): "sglang/srt/models/llada2.py",
    ("lmdeploy", "SDARForCausalLM"): "lmdeploy/pytorch/models/sdar.py",
}
FAMILY = {"SDARForCausalLM": "sdar", "LLaDA2MoeModelLM": "llada2_moe"}
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def main(wheels: list[str]) -> int:
    wrong: list[str] = []
    for wheel in wheels:
        name, version, *_ = Path(wheel).name.split("-")
        engine, archive = ENGINES[name], zipfile.ZipFile(wheel)
        fixed = dict(_fixed(name, archive))
        for architecture, served in engine.architectures.items():
            source = archive.read(FILES[name, architecture]).decode()
            found = [
                *_constants(served, fixed, architecture),
                *_keys(served, source),
                *_names(source, FAMILY[architecture]),
            ]
            wrong += [f"{name} {architecture}: {problem}" for problem in found]
            print(f"{name} {version}, {architecture}: {len(found)} differences (the table is of {engine.version})")
    print("\n".join(wrong))
    return 1 if wrong else 0


def _fixed(name: str, archive: zipfile.ZipFile) -> Iterator[tuple[str, dict]]:
    """Mask and block length by architecture, as the engine has them in its code."""
    if name == "sglang":
        for node in ast.walk(ast.parse(archive.read("sglang/srt/dllm/config.py"))):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "DLLM_PARAMS":
                assert isinstance(node.value, ast.Dict)
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    try:
                        yield ast.literal_eval(key), ast.literal_eval(value)
                    except ValueError:  # another family's, computed
                        continue
    else:
        text = archive.read("lmdeploy/pytorch/configurations/sdar.py").decode()
        found = re.search(r"dllm_mask_token = (\d+)", text)
        assert found is not None
        yield "SDARForCausalLM", {"mask_id": int(found[1]), "block_size": None}


def _constants(served: Served, fixed: dict, architecture: str) -> Iterator[str]:
    ours = {"mask_id": served.mask_token_id, "block_size": served.block_length}
    if fixed.get(architecture) != ours:
        yield f"{fixed.get(architecture)} in its code, {ours} in our table"


def _keys(served: Served, source: str) -> Iterator[str]:
    """Keys of the table that its model does not read, which would be a table of something else."""
    read = {
        node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and _is_config(node.value)
    }
    yield from (f"its model never reads config.{key}" for key in served.keys if key not in read)


def _is_config(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", None)) in ("config", "hf_config")


def _names(source: str, family: str) -> Iterator[str]:
    """Parts of the names of our weights that no module of its model has."""
    tree = ast.parse(source)
    known = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "self"
    }
    known |= {"weight", "bias"} | set(re.findall(r"""["'](\w+)["']""", source))
    with tempfile.TemporaryDirectory() as folder:
        tiny.model(family).save(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as weights:
            names = list(weights.keys())
    parts = {FUSED.get(part, part) if FUSED.get(part) in known else part for name in names for part in name.split(".")}
    yield from (
        f"no module of its model is called {part}"
        for part in sorted(parts)
        if not part.isdecimal() and part not in known
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
