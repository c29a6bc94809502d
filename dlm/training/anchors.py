"""A teacher's states of training sequences on disk, one file each: written by `dlm-prepare anchors`, read by [align] and [draft]."""

import json
import shutil
import sys
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlm.atomic import replacing, write_text
from dlm.data.loader import BatchLoader
from dlm.data.source import build_stream
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError
from dlm.models.device import DTYPES, pick_device
from dlm.models.settings import read_json
from dlm.training.config import TrainConfig
from dlm.training.masking.view import documents
from dlm.training.start import starting_point
from dlm.training.teacher import LiveTeacher, States, teacher_name, weights_of

MANIFEST = "anchors.json"
COMMAND = "dlm-prepare anchors --config FILE"
COLUMNS = (TextColumn("[bold]sequences"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


@dataclass(frozen=True)
class Cache:
    """The settings of stored states: their folder, and the model that they are of."""

    key: str
    """The setting that names the folder."""
    folder: str | None
    dtype: str
    model_key: str
    model: str | None
    layers_key: str
    apart: bool
    """Whether the model read each document of a row by itself."""


def cache_of(config: TrainConfig) -> Cache:
    """The states of [align]'s teacher or, where a draft is trained, of its target."""
    if config.objective.masking == "draft":
        d, apart = config.draft, config.objective.documents == "apart"
        return Cache("draft.states", d.states, d.states_dtype, "draft.target", d.target, "draft.target_layers", apart)
    c = config.align
    teacher = teacher_name(config)
    return Cache("align.anchors", c.anchors, c.anchors_dtype, "align.teacher", teacher, "align.layers", False)


class Anchors:
    """A teacher whose states were computed before: they are read from a folder."""

    def __init__(self, config: TrainConfig, layers: tuple[int, ...]) -> None:
        cache = cache_of(config)
        assert cache.folder is not None
        self.folder, self.layers = Path(cache.folder).expanduser(), layers
        manifest = read_json(self.folder / MANIFEST)
        if not manifest:
            raise UserError(f"{cache.key} = {cache.folder!r} holds no {MANIFEST}: write it with {COMMAND}")
        self.identity, self.width = manifest["weights"], manifest["hidden_size"]
        if cache.model is not None and weights_of(cache.model) != self.identity:
            raise UserError(
                f"{self.folder} holds states of {manifest['teacher']!r} with weights {self.identity}, which {cache.model!r} has "
                f"not: set {cache.model_key} to that model, or write its states into an empty folder with {COMMAND}"
            )
        if not set(layers) <= set(manifest["layers"]):
            raise UserError(
                f"{self.folder} holds layers {manifest['layers']}, but {cache.layers_key} asks for {list(layers)}: "
                f"write them into an empty folder with {COMMAND}"
            )
        if manifest.get("apart", False) != cache.apart:
            raise UserError(
                f"{self.folder} holds states of documents {'apart' if manifest.get('apart') else 'joined'}, but "
                f"objective.documents = {config.objective.documents!r}: write them into an empty folder with {COMMAND}"
            )
        if manifest["length"] != config.train.length:
            raise UserError(
                f"{self.folder} holds sequences of {manifest['length']} tokens, but train.length = {config.train.length}"
            )

    def compile(self) -> None:
        """Nothing: states on disk need no compiling."""

    def states(self, input_ids: Int[Tensor, "b l"], positions: Int[Tensor, "b l"] | None = None) -> States:
        """A function that reads states of these sequences from their files."""
        files = [self._open(key) for key in keys(input_ids)]

        def read(layer: int, sequences: Tensor, positions: Tensor) -> Tensor:
            counts = sequences.bincount(minlength=len(files)).tolist()
            name = str(layer)
            rows = [f.get_tensor(name)[p] for f, p in zip(files, positions.cpu().split(counts), strict=True)]
            return torch.cat(rows).to(input_ids.device)

        return read

    def _open(self, key: str) -> Any:
        path = place(self.folder, key)
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise UserError(f"{path} is missing: write the anchors of this run's sequences with {COMMAND}") from None
        except SafetensorError as error:
            raise UserError(f"{path} is not a whole file ({error}): delete it and run {COMMAND}") from None


def keys(input_ids: Int[Tensor, "b l"]) -> list[str]:
    """Each sequence's name: the hash of its ids."""
    return [blake2b(row.tobytes(), digest_size=16).hexdigest() for row in input_ids.cpu().int().numpy()]


def place(folder: Path, key: str) -> Path:
    """A sequence's file, in one of 256 folders."""
    return folder / key[:2] / f"{key}.safetensors"


@dataclass(frozen=True)
class Written:
    """What `write_anchors` returns: the sequences that the run will see, and the files written by this call."""

    sequences: int
    written: int


def write_anchors(config: TrainConfig) -> Written:
    """Run the teacher over the sequences that training with `config` will see, in their order, into align.anchors, or
    a draft's target into draft.states.

    Files appear whole and are never written twice, so a stopped run goes on where it was. A batch of which any file is
    missing is computed as a whole, as training would: the numbers do not depend on where a run was stopped.
    """
    cache, t = cache_of(config), config.train
    if cache.folder is None:
        raise UserError(f"{cache.key} is not set: name the folder that the teacher's states go into")
    folder, device = Path(cache.folder).expanduser(), pick_device(t.device)
    teacher, tokenizer, end = _teacher(config, device)
    _begin(folder, teacher, cache, t.length)
    loader = BatchLoader(build_stream(config.data, tokenizer, t.length, "train", t.seed), t.batch_size)
    total, dtype = t.steps * t.batch_size, DTYPES[cache.dtype]
    each = len(teacher.layers) * t.length * teacher.width * dtype.itemsize / 1e6
    free = shutil.disk_usage(folder).free / 1e6
    print(
        f"{folder}: {total:,} sequences of {each:,.3f} MB: {total * each:,.1f} MB at most, {free:,.0f} MB are free",
        file=sys.stderr,
    )
    console = Console(stderr=True)
    written = 0
    with Progress(*COLUMNS, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("anchors", total=total)
        for batch in islice(loader, t.steps):
            for ids in batch["input_ids"].split(t.micro_batch_size or t.batch_size):
                written += _write(folder, teacher, ids.to(device), dtype, end if cache.apart else None)
                bar.advance(task, len(ids))
    return Written(total, written)


def _teacher(config: TrainConfig, device: torch.device) -> tuple[LiveTeacher, Tokenizer | None, int | None]:
    """The model whose states are written, the data's tokenizer, and the token that ends a document."""
    if config.objective.masking == "draft":
        from dlm.training.drafting.start import new_draft

        draft = new_draft(config, device)
        assert config.draft.target is not None
        target = draft.target
        return LiveTeacher(target, config.draft.target, draft.config.target_layer_ids), target.tokenizer, target.eos_id
    student = starting_point(config)
    return LiveTeacher.of(config, student, device), student.tokenizer, None


def _begin(folder: Path, teacher: LiveTeacher, cache: Cache, length: int) -> None:
    """Write the manifest, or check that it is the same; delete what a killed process left half written."""
    manifest = {
        "teacher": cache.model,
        "weights": teacher.identity,
        "layers": list(teacher.layers),
        "hidden_size": teacher.width,
        "dtype": cache.dtype,
        "length": length,
    } | ({"apart": True} if cache.apart else {})
    found = read_json(folder / MANIFEST)
    other = [
        f"{key} {found.get(key)}, not {value}" for key, value in manifest.items() if found and found.get(key) != value
    ]
    if other:
        raise UserError(f"{cache.key} = {str(folder)!r} holds states of {'; '.join(other)}: give an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for half in folder.glob("??/.*.safetensors.*"):
        half.unlink()
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _write(
    folder: Path, teacher: LiveTeacher, ids: Int[Tensor, "b l"], dtype: torch.dtype, end: int | None = None
) -> int:
    """Write the missing files of these sequences; returns how many. `end` is the token that parts documents."""
    paths = [place(folder, key) for key in keys(ids)]
    if all(path.exists() for path in paths):
        return 0
    outputs = teacher.outputs(ids, None if end is None else documents(ids, end, opens=False))
    written = 0
    for row, path in enumerate(paths):
        if path.exists():  # a batch may hold a sequence twice
            continue
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary:
            states = {str(layer): outputs[layer][row].to("cpu", dtype).contiguous() for layer in teacher.layers}
            save_file(states, temporary)
        written += 1
    return written
