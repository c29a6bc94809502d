"""What traces and steps tell of drafts, and that traces are verified without them."""

import pytest

import dlm
from dlm.replay import fork, verify
from dlm.trace.events import ACCEPT, REJECT

from .speculative import draft_of, small, target, told


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trace_is_verified_and_forked_without_its_draft(temperature, tmp_path):
    lm, given = target(1), small(4)
    settings = {"gen_length": 20, "temperature": temperature, "seed": 4}
    drafter = told(lm, given, 0.7, **settings)
    with dlm.TraceStore(tmp_path / "t.db", keep=("tokens", "digests")) as store:
        names = [str(i) for i in range(4)]
        results = dlm.generate(lm, given, draft=drafter, trace=store, request_ids=names, **settings)
        store.flush()
        for name, prompt, result in zip(names, given, results, strict=True):
            trace = store[name]
            kinds = [event.kind for event in trace.events()]
            kept = sum(result.accepted) - len(result.accepted)  # each verification's last token is the target's own,
            assert kinds.count(ACCEPT) - kept in (0, 1)  # unless a draft ended the text
            assert kinds.count(ACCEPT) + kinds.count(REJECT) == sum(result.drafted)
            trace.check()  # each state is the canvas that the engine had
            assert verify(lm, trace).identical
            assert trace.tokens[len(prompt) :][: len(result.tokens)].tolist() == result.tokens
            again = fork(lm, trace, trace.num_steps // 2)  # goes on without drafts
            assert again.tokens.tolist()[: len(prompt) + len(result.tokens)] == [*prompt, *result.tokens]


def test_a_trace_of_rejection_asks_for_its_draft(tmp_path):
    lm = target(1)
    draft = draft_of("dflash", lm, 1, block_size=5)
    with dlm.TraceStore(tmp_path / "t.db") as store:
        settings = {"gen_length": 12, "temperature": 1.0, "verify": "reject"}
        dlm.generate(lm, [[1, 2, 3]], draft=draft, trace=store, request_ids=["a"], **settings)
        store.flush()
        with pytest.raises(dlm.UserError, match='verify = "reject".*give that draft'):
            verify(lm, store["a"])
        assert verify(lm, store["a"], draft=draft).identical


def test_steps_tell_what_was_kept_and_refused():
    lm, given = target(1), small(1)
    events = []
    drafter = told(lm, given, 0.6, gen_length=16)
    (result,) = dlm.generate(lm, given, draft=drafter, gen_length=16, on_step=events.append)
    kept = sum(int(event.drafted.sum()) for event in events if event.drafted is not None)
    refused = sum(int((event.refused >= 0).sum()) for event in events if event.refused is not None)
    assert kept + refused == sum(result.drafted)
    assert kept - (sum(result.accepted) - len(result.accepted)) in (0, 1)
    for event in events:
        if event.refused is not None:
            assert not (event.drafted & (event.refused >= 0)).any()
            assert (event.canvas[(event.refused >= 0) & ~event.committed] == 0).all()
