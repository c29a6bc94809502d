"""`dlm-export`: a model as a folder that other programs read."""

from collections.abc import Sequence
from pathlib import Path

from dlm.errors import UserError
from dlm.models.families import FAMILIES

from .trace import Parser, run

DTYPES = ("float32", "bfloat16", "float16", "float64")


def _parser() -> Parser:
    parser = Parser(
        prog="dlm-export",
        description="Write a model as a folder that transformers reads. Causal models of family llama, qwen2 or qwen3 need "
        "no code; a folder of family dlm holds its own, for AutoModel.from_pretrained(OUT, trust_remote_code=True).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", nargs="?", metavar="FOLDER", help="the model: a folder, a bundled name or a hub id")
    add("--to", metavar="OUT", help="the folder to write; an earlier checkpoint there is replaced")
    add(
        "--family",
        metavar="NAME",
        choices=list(FAMILIES),
        help=f"the layout to write (default: the model's own, or dlm where that cannot express it): {', '.join(FAMILIES)}",
    )
    add(
        "--dtype",
        metavar="NAME",
        choices=DTYPES,
        help=f"the dtype of the weights (default: as stored): {', '.join(DTYPES)}",
    )
    add("--max-shard-size", type=float, default=5.0, metavar="GB", help="size of a weights file at most (5)")
    add("--adapter", metavar="FOLDER", help="an adapter that training left, to be merged into the weights")
    add("--overwrite", action="store_true", help="write into a folder that holds other files and no checkpoint")
    add("--version", action="store_true", help="print the version, and stop")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run("dlm-export", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    options, _ = _parser().parse(argv)
    if options.version:
        from dlm import __version__

        print(__version__)
        return 0
    if options.folder is None or options.to is None:
        raise UserError("which model, and where to? dlm-export FOLDER --to OUT")
    if not 0 < options.max_shard_size < 1e6:
        raise UserError(f"command line: --max-shard-size {options.max_shard_size:g}: a number of gigabytes above 0")
    import dlm
    from dlm.models.device import stored_dtype
    from dlm.models.finding import find
    from dlm.models.folder import check_folder
    from dlm.models.saving import readers

    out, source = Path(options.to), find(options.folder)
    if not options.overwrite:
        check_folder(out)  # before a large model is read
    if out.is_dir() and out.samefile(source):
        raise UserError(f"--to {out} is the folder that is read: give another")
    stored = stored_dtype(source)
    merging = options.adapter is not None or (source / "adapter_config.json").is_file()
    lm = dlm.load(options.folder, device="cpu", dtype="float32" if merging else stored, adapter=options.adapter)
    dlm.save(
        lm,
        out,
        options.family,
        dtype=options.dtype or stored,
        max_shard_size=int(options.max_shard_size * 1e9),
        overwrite=options.overwrite,
    )
    print(f"{out}: {readers(out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
