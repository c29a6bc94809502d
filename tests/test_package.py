"""The package as users meet it: its names, its wheel, its start-up. Knows no subsystem."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomli

import dlm
from tests.inference.tiny import text_lm

ROOT = Path(__file__).parent.parent
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())


def test_public_names():
    names = "load load_draft save available generate infill score train Engine Generation TraceStore LM Transformer ModelConfig"
    assert dlm.__all__ == [*names.split(), "UserError", "__version__"]
    assert len(dlm.__all__) <= 18


@pytest.mark.parametrize("name", dlm.__all__)
def test_every_public_name_exists(name):
    assert getattr(dlm, name) is not None


def test_version_is_the_projects():
    assert dlm.__version__ == PROJECT["project"]["version"]


def test_every_package_is_shipped():
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "dlm").rglob("__init__.py")}
    assert sorted(found | {"dlm.cli", "dlm.configs"}) == PROJECT["tool"]["setuptools"]["packages"]


def run(code: str, *argv: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True, text=True).stdout


HEAVY = "('torch', 'transformers', 'datasets', 'accelerate')"
REPORT = f"import sys, atexit; atexit.register(lambda: print('loaded:', [m for m in {HEAVY} if m in sys.modules]))\n"
LIGHT_STARTS = [
    "import dlm; dir(dlm); dlm.UserError",
    "import dlm.config, dlm.inference.config, dlm.data.config, dlm.training.config, dlm.models.config",
    *(
        f"from dlm.cli.{name} import main; main(['--help'])"
        for name in ("infer", "train", "prepare", "tokenizer", "bench", "replay", "trace", "export", "serve", "batch")
    ),
    *(
        f"from dlm.cli.{name} import main; main(['--print-config'])"
        for name in ("infer", "train", "tokenizer", "bench", "serve", "batch")
    ),
    "from dlm.cli.infer import main; assert main(['--config', 'quickstart', '--print-config']) == 0",
    "from dlm.cli.prepare import main; assert main(['trajectories', '--print-config']) == 0",
]


@pytest.mark.parametrize("code", LIGHT_STARTS)
def test_starts_without_torch(code):
    assert run(REPORT + code).endswith("loaded: []\n")


@pytest.mark.slow
def test_wheel_claims_one_name_and_carries_its_data(tmp_path):
    copy = tmp_path / "copy"
    for folder in ("dlm", "cli", "configs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("bundled", "__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    (copy / "dlm/bundled/tiny").mkdir(parents=True)
    (copy / "dlm/bundled/tiny/config.json").write_text("{}")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"dlm"}
    for needed in ("py.typed", "cli/infer.py", "configs/quickstart.toml", "bundled/tiny/config.json", "data/config.py"):
        assert f"dlm/{needed}" in names
    shipped = {
        path.name
        for folder in ("configs", "configs/dflash", "configs/eval", "configs/latent")
        for path in (ROOT / folder).glob("*.toml")
    }
    assert shipped == {name.split("/")[-1] for name in names if re.match(r"dlm/configs/.*\.toml", name)}


def test_the_readmes_python_runs_twice(tmp_path, monkeypatch):
    readme = (ROOT / "README.md").read_text("utf-8")
    code = readme.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    load = dlm.load  # of the one that the bundled draft is for; the others are stood in for
    monkeypatch.setitem(vars(dlm), "load", lambda name: load(name) if name == "pico-causal" else text_lm())
    for _ in range(2):
        exec(compile(code, "README.md", "exec"), {})
    with dlm.TraceStore("runs/traces.db") as store:
        assert "first" in store
