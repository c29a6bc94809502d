import json

import numpy as np
import pytest

from dlm.errors import UserError
from dlm.trace import TraceStore
from dlm.trace.facts import digest
from tests.refusals import refused
from tests.trace.synthetic import anything, run


@pytest.fixture
def varied(store):
    rng = np.random.default_rng(0)
    for i in range(30):
        made = anything(rng, 60, 12, name=f"t{i}")
        made.trace.context = {"model": f"m{i % 2}"}
        store.put(made.trace)
    store.flush()
    return store


@pytest.mark.parametrize("scheme", ["", "memory://exported"])
def test_there_and_back(varied, tmp_path, scheme):
    url = scheme or str(tmp_path / "out")
    assert varied.export(url, rows=7) == 30
    with TraceStore(tmp_path / "back.db") as back:
        assert back.import_(url) == 30
        for trace in varied:
            assert digest(back[trace.request_id]) == digest(trace)
            np.testing.assert_array_equal(back[trace.request_id].states(), trace.states())
    if scheme:
        import fsspec

        fsspec.filesystem("memory").rm("/exported", recursive=True)


def test_an_export_goes_on_where_it_stopped(varied, tmp_path):
    out = tmp_path / "out"
    assert varied.export(str(out), rows=10) == 30
    assert varied.export(str(out)) == 0
    files = sorted(out.rglob("*.parquet"))
    assert len(files) == 3 and all(file.parent.name.startswith("day=") for file in files)
    files[-1].unlink()  # as if it had been killed before the last
    (files[-1].parent / ".half.tmp").write_bytes(b"PAR1")
    varied.put(run(np.random.default_rng(1), 5, 2, name="new").trace)
    assert varied.export(str(out)) == 11
    with TraceStore(tmp_path / "back.db") as back:
        assert back.import_(str(out)) == 31


def test_two_exports_at_once_are_one_import(varied, tmp_path, monkeypatch):
    out, records = tmp_path / "out", varied.database.records
    with TraceStore(varied.path) as other:

        def meanwhile(after=-1):
            monkeypatch.undo()
            other.export(str(out), rows=12)
            varied.put(run(np.random.default_rng(1), 5, 2, name="new").trace).result()
            return records(after)

        monkeypatch.setattr(varied.database, "records", meanwhile)
        assert varied.export(str(out), rows=7) == 31
    with TraceStore(tmp_path / "back.db") as back:
        assert back.import_(str(out)) == 31
        assert sorted(trace.request_id for trace in back) == sorted(trace.request_id for trace in varied)


def test_datasets_reads_it(varied, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = varied.to_dataset(model="m0")
    assert len(rows) == 15
    first = varied[rows[0]["request_id"]]
    assert rows[0]["tokens"] == first.tokens.tolist() and rows[0]["steps"] == first.steps.tolist()
    varied.export(str(tmp_path / "out"))
    files = [str(file) for file in (tmp_path / "out").rglob("*.parquet")]
    read = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert read["request_id"] == [f"t{i}" for i in range(30)]


def test_an_altered_row_is_refused(varied, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    varied.export(str(tmp_path / "out"))
    (file,) = (tmp_path / "out").rglob("*.parquet")
    rows = pq.ParquetFile(file).read().to_pylist()
    rows[3]["num_steps"] += 1
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(file)), file)
    with TraceStore(tmp_path / "back.db") as back, pytest.raises(UserError, match="row 3: trace 't3' is not what was"):
        back.import_(str(tmp_path / "out"))


def test_d3llm_lines(store, tmp_path):
    made = run(np.random.default_rng(2), 12, 4, prompt=4, name="3")
    prompt, states = made.canvases[0][:4].tolist(), [canvas.tolist() for canvas in made.canvases]
    steps, final = made.trace.steps[4:].tolist(), states[-1][4:]
    lines = [
        {"idx": 0, "prompt_ids": prompt, "trajectory": states, "nfe": 4},
        {"idx": 1, "prompt_ids": prompt, "trajectory": [state[4:] for state in states]},
        {"idx": 2, "prompt_ids": prompt, "trajectory": [state[4:] for state in states[1:]]},
        {"idx": 3, "prompt_ids": prompt, "step_map": steps, "token_ids": final},
    ]
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert store.import_(str(file), mask_id=3) == 4
    filled = made.trace.steps.max() + 1
    for i in range(4):
        np.testing.assert_array_equal(store[str(i)].states()[: filled + 1], made.padded()[: filled + 1])
    assert store["0"].meta == {"idx": 0, "nfe": 4}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"idx": 1}', "x.jsonl line 1: not a trajectory"),
        ("x.jsonl", "nonsense", "not a trajectory"),
        ("x.parquet", "nonsense", "not a Parquet file"),
        ("x.txt", "", "no traces there"),
    ],
)
def test_what_is_no_export(store, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    refused(message, store.import_, str(tmp_path / name))
