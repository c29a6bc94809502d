"""`dlm-export`: a model as a folder that other programs read."""

from collections.abc import Sequence
from pathlib import Path

from dlm.errors import UserError
from dlm.models.engines import ENGINES, require_served
from dlm.models.families import FAMILIES

from .flags import Flag, Word, one_of
from .options import Command, Options

DTYPES = ("float32", "bfloat16", "float16", "float64")


COMMAND = Command(
    name="dlm-export",
    summary="Write a model as a folder that transformers reads. Causal models of family llama, qwen2 or qwen3 need no "
    "code; a folder of family dlm holds its own, for AutoModel.from_pretrained(OUT, trust_remote_code=True).",
    words=(Word("FOLDER", "The model: a folder, a GGUF file, a bundled name or a hub id.", required=False),),
    flags=(
        Flag("--to", "OUT", "The folder to write; an earlier checkpoint there is replaced."),
        Flag(
            "--family",
            "NAME",
            "The layout to write (default: the model's own, or dlm where that cannot express it): "
            f"{', '.join(FAMILIES)}.",
            kind=one_of(FAMILIES),
        ),
        Flag(
            "--dtype",
            "NAME",
            f"The dtype of the weights (default: as stored): {', '.join(DTYPES)}.",
            kind=one_of(DTYPES),
        ),
        Flag(
            "--for",
            "ENGINE",
            "Refuse what this engine would not serve, or decode wrongly, and say how to start it: "
            f"{', '.join(ENGINES)}.",
            kind=one_of(ENGINES),
        ),
        Flag("--max-shard-size", "GB", "Size of a weights file at most (5).", kind=float),
        Flag("--adapter", "FOLDER", "An adapter that training left, to be merged into the weights."),
        Flag("--overwrite", help="Write into a folder that holds other files and no checkpoint."),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    return COMMAND.run(_work, argv)


def _work(options: Options) -> None:
    name, to, adapter = next(iter(options.words), None), options.value("--to"), options.value("--adapter")
    gigabytes, overwrite = options.value("--max-shard-size", 5.0), "--overwrite" in options.given
    engine = options.value("--for")
    if name is None or to is None:
        raise UserError("which model, and where to? dlm-export FOLDER --to OUT")
    if not 0 < gigabytes < 1e6:
        raise UserError(f"command line: --max-shard-size {gigabytes:g}: a number of gigabytes above 0")
    import dlm
    from dlm.data.gguf import is_gguf
    from dlm.models.device import stored_dtype
    from dlm.models.finding import find
    from dlm.models.folder import check_folder
    from dlm.models.saving import readers

    out, source = Path(to), find(name)
    if not overwrite:
        check_folder(out)  # before a large model is read
    if out.is_dir() and out.samefile(source):
        raise UserError(f"--to {out} is the folder that is read: give another")
    stored = stored_dtype(source)
    merging = adapter is not None or (source / "adapter_config.json").is_file()
    dtype = options.value("--dtype", stored)
    if merging:
        stored = "float32"
    elif is_gguf(source):  # unpacked directly to the dtype that is written
        stored = dtype
    lm = dlm.load(name, device="cpu", dtype=stored, adapter=adapter)
    dlm.save(
        lm,
        out,
        options.value("--family"),
        dtype=dtype,
        max_shard_size=int(gigabytes * 1e9),
        overwrite=overwrite,
        engine=engine,
    )
    print(f"{out}: {readers(out)}")
    if engine is not None:
        print(f"{engine}: {require_served(out, engine)}")


if __name__ == "__main__":
    raise SystemExit(main())
