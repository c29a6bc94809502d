"""`dlm-tokenizer`: learn a byte-level BPE tokenizer from the data a config names. Knows no algorithm."""

from collections.abc import Sequence

from dlm.data.config import TokenizerConfig

from .options import Command, Options

COMMAND = Command(
    name="dlm-tokenizer",
    summary="Learn a byte-level BPE tokenizer; writes tokenizer.json, vocab.json and merges.txt.",
    config=TokenizerConfig,
)


def main(argv: Sequence[str] | None = None) -> int:
    return COMMAND.run(_work, argv)


def _work(config: TokenizerConfig, options: Options) -> None:
    from dlm.data.tokenizer_training import train_tokenizer

    tokenizer = train_tokenizer(config)
    print(
        f"{config.output}: {tokenizer.vocab_size} tokens, mask {tokenizer.mask_token_id}, end of text {tokenizer.eos_token_id}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
