"""[tokenizer]: how fast a tokenizer reads and writes text."""

import time
from collections.abc import Callable
from typing import Any

from dlm.bench.config import BenchConfig, TokenizerBenchSection
from dlm.bench.finding import Finding, Say, Table
from dlm.errors import UserError

HEADINGS = {
    "path": "tokenizer",
    "megabytes": "MB of text",
    "tokens": "tokens",
    "bytes_per_token": "bytes a token",
    "encode": "encode, MB/s",
    "encode_one": "encode one by one, MB/s",
    "decode": "decode, MB/s",
    "exact": "comes back",
}


def measure(config: BenchConfig, say: Say) -> Finding:
    """Encode in a batch and document by document, and decode."""
    from dlm.data.tokenizer import load_tokenizer
    from dlm.models.finding import find_tokenizer

    s = config.tokenizer or TokenizerBenchSection()
    tokenizer, texts = load_tokenizer(find_tokenizer(s.path)), _texts(s)
    size = sum(len(text.encode()) for text in texts) / 1e6
    say(f"{s.path}: {len(texts)} documents, {size:.2f} MB")
    ids = tokenizer.encode_batch(texts, special=False)
    row: dict[str, Any] = {
        "path": s.path,
        "megabytes": size,
        "tokens": sum(map(len, ids)),
        "bytes_per_token": 1e6 * size / sum(map(len, ids)),
        "encode": size / _fastest(lambda: tokenizer.encode_batch(texts, special=False), s.repeats),
        "encode_one": size / _fastest(lambda: [tokenizer.encode(text, special=False) for text in texts], s.repeats),
        "decode": size / _fastest(lambda: [tokenizer.decode(row) for row in ids], s.repeats),
        "exact": all(tokenizer.decode(row, skip_special=False) == text for row, text in zip(ids, texts, strict=True)),
    }
    table = Table(title="Tokenizer", headings=HEADINGS, rows=[row], text=f"The fastest of {s.repeats}.")
    return Finding(values={"tokenizer": row}, tables=[table])


def _texts(s: TokenizerBenchSection) -> list[str]:
    if s.file is not None:
        try:
            text = s.file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"tokenizer.file = {s.file}: cannot be read as UTF-8 text: {error}") from None
        texts = [text[: int(s.megabytes * 1e6)]]
    else:
        from dlm.data.lines import STDLIB
        from dlm.data.source import rows_of

        texts, room = [], s.megabytes * 1e6
        for row in rows_of(STDLIB, "heldout"):
            if room <= 0:
                break
            texts.append(row.value["text"])
            room -= len(row.value["text"].encode())
    if not "".join(texts):
        raise UserError(f"tokenizer.file = {s.file}: holds no text to encode")
    return texts


def _fastest(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
