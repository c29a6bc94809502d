"""Drafters: what they guess, how many tokens, what they read of the target; which drafts and settings are refused."""

import numpy as np
import pytest
import torch

import dlm
from dlm.inference.drafting.length import Length
from dlm.inference.drafting.lookup import LookupFirst
from dlm.inference.drafting.ngram import continuation
from dlm.models.draft import Draft

from . import speculative
from .requests import FAMILIES
from .speculative import Told, draft_of, plain, small, target, told
from .tiny import tiny_lm


def test_the_latest_longest_repetition_is_continued():
    text = np.array([1, 2, 3, 4, 9, 2, 3, 5, 5, 1, 2, 3])
    assert continuation(text, 3).tolist() == [4, 9, 2]  # three tokens agree, though two stood there later
    assert continuation(np.array([2, 3, 7, 2, 3, 8, 2, 3]), 2).tolist() == [8, 2]
    assert continuation(np.array([1, 2, 3]), 4).tolist() == []
    assert continuation(np.array([5, 5, 5]), 4).tolist() == [5]
    assert continuation(np.array([1]), 4).tolist() == []


def test_prompt_lookup_goes_before_a_draft_and_costs_no_forward(tmp_path):
    lm, given, settings = target(0), small(6), {"gen_length": 30}
    rest = told(lm, given, 0.3, **settings)
    results = dlm.generate(lm, given, draft=LookupFirst(rest), **settings)
    assert [result.tokens for result in results] == plain(lm, given, **settings)
    checks = sum(sum(count > 0 for count in result.drafted) for result in results)
    assert 0 < rest.proposed == sum(result.draft_nfe for result in results) < checks
    draft_of("dflash", lm, 1, block_size=5).save(tmp_path / "draft")
    results = dlm.generate(lm, given, draft=f"ngram+{tmp_path / 'draft'}", draft_length=4, **settings)
    assert [result.tokens for result in results] == plain(lm, given, **settings)
    assert 0 < sum(result.draft_nfe for result in results) < sum(len(result.accepted) for result in results)


def test_the_length_that_pays():
    clock = iter(float("inf") for _ in ())
    length = Length(8, lambda: next(clock))
    for rows in (1, 2, 4, 8):  # a row costs as much as a step: drafting never pays much
        length.target.add(rows, 1.0 * rows)
    for _ in range(400):
        length.learn(8, 1)
    assert [length.best() for _ in range(32)].count(0) == 30  # one token now and then: it may pay again
    cheap = Length(8)
    for rows in (1, 4, 9):
        cheap.target.add(rows, 1.0 + 0.01 * rows)
    for _ in range(400):
        cheap.learn(8, 9)
    assert cheap.best() == 8
    for _ in range(400):
        cheap.learn(8, 4)  # three are kept, the fourth never
    assert cheap.best() == 3


def test_a_crowd_drafts_less_than_one_request():
    """Every request's drafted rows cost the step more, and the others' tokens wait for them."""
    length = Length(8)
    for rows in (1, 4, 16, 64, 128):
        length.target.add(rows, 20.0 + 0.5 * rows)
    length.tried, length.kept = [1.0] * 8, [0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1]
    assert length.best() in (3, 4)  # 2.47 tokens in 22, or 2.53 in 22.5
    length.drafting = 64
    assert length.best() == 1  # 115 tokens in 84 rather than 64 in 52 or 146 in 116
    length.drafting, length.others = 1, 127  # one that drafts among many that have nothing to draft
    assert length.best() == 1  # 128.8 tokens in 84.5 rather than 128 in 84


def test_steps_are_timed_though_some_requests_have_nothing_to_draft():
    engine = dlm.Engine(target(0), draft="ngram")
    engine.generate(small(8), gen_length=20, draft_length="auto")
    length = engine.batch.strategies["speculative"].length
    assert length.target.n > 5 and length.draft.n > 0


LONE = {"gen_length": 4}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"draft_length": 4}, "draft_length is only read with a draft"),
        ({"verify": "reject"}, "verify is only read with a draft"),
        ({"draft": "ngram", "draft_length": 0}, "draft_length = 0.*at least 1"),
        ({"draft": "ngram", "draft_length": 99}, "draft_length = 99 is more than the 15"),
        ({"draft": "ngram", "draft_length": "long"}, "draft_length"),
        ({"draft": "ngram", "verify": "maybe"}, "verify"),
        ({"draft": "ngram", "verify": "reject", "draft_length": "auto", "temperature": 1.0}, "goes by the clock"),
        ({"draft": "ngram", "strategy": "multi_block"}, "does not go with a draft"),
        ({"draft": "ngram", "remask_threshold": 0.2}, "remask_threshold = 0.2 does not go with a draft"),
        ({"draft": "self"}, "is\ncausal|is causal: use"),
        ({"draft": "ngrams"}, "by name: ngram, self; did you mean .ngram"),
        ({"draft": 5}, "draft = 5: give a draft"),
        ({"draft": "ngram+ngram"}, "what follows 'ngram\\+' is a draft's folder"),
        ({"draft": "ngram+/no/such/folder"}, "no such folder"),
        ({"draft": "/no/such/folder"}, "no such folder"),
    ],
)
def test_mistakes_are_answered(settings, says):
    with pytest.raises(dlm.UserError, match=says):
        dlm.generate(target(0), [[1, 2]], **{**LONE, **settings})


def test_drafts_of_other_models_are_refused(tmp_path):
    lm, other = target(0), target(2)
    draft = draft_of("dflash", lm, 0, block_size=5)
    with pytest.raises(dlm.UserError, match="another copy of a model"):
        dlm.generate(other, [[1]], draft=draft, **LONE)
    with pytest.raises(dlm.UserError, match=r"draft_length = 5 is more than the 4.*block_size = 5"):
        dlm.generate(lm, [[1]], draft=draft, draft_length=5, **LONE)
    diffusion = tiny_lm(1)
    with pytest.raises(
        dlm.UserError, match=r"what a causal model writes next, and 'tiny' \(llada\) is\s*bidirectional"
    ):
        dlm.generate(diffusion, [[1]], draft="ngram", **LONE)
    with pytest.raises(dlm.UserError, match="64 tokens and model 'tiny' 40"):
        dlm.generate(lm, [[1]], draft=diffusion, **LONE)
    with pytest.raises(dlm.UserError, match="is causal: a model that drafts"):
        dlm.generate(lm, [[1]], draft=other, **LONE)
    with pytest.raises(dlm.UserError, match="cache = \"dual\" only approximates|cache = 'dual'.*approximates"):
        dlm.generate(diffusion, [[1]], draft="self", cache="dual", **LONE)
    engine = dlm.Engine(lm)
    with pytest.raises(dlm.UserError, match="the engine has none"):
        engine.add_request([1], draft=True, **LONE)


def loop(lm, draft: Draft, prompt: list[int], gen_length: int, length: int) -> tuple[list[int], list[int]]:
    """Greedy DFlash by the paper, everything computed anew at each step: the text, and what each verification added."""

    @torch.no_grad()
    def favourites(text):
        taps: dict[int, torch.Tensor] = {}
        hidden = lm.network.hidden(torch.tensor([text]), taps=taps)
        return lm.network.head(hidden)[0].argmax(-1).tolist(), draft.features(taps)

    text, end, accepted = list(prompt), len(prompt) + gen_length, []
    text.append(favourites(text)[0][-1])
    while len(text) < end:
        anchor = len(text) - 1
        rows = min(length + 1, end - anchor)
        block = [text[-1], *[draft.config.mask_token_id] * (rows - 1)]
        with torch.no_grad():
            positions = torch.arange(anchor, anchor + rows)[None]
            context = favourites(text[:-1])[1]
            hidden = draft(torch.tensor([block]), positions, context, torch.arange(anchor)[None])
            logits = draft.logits(hidden)[0, 1:]
            if (selector := draft.candidate_selector) is None:
                drafts = logits.argmax(-1).tolist()
            else:
                drafts, before = [], text[-1]
                values, tokens = selector.candidates(logits)
                for i in range(rows - 1):
                    scores = selector.scores(torch.tensor(before), hidden[0, i + 1], values[i], tokens[i])
                    before = int(tokens[i][scores.argmax()])
                    drafts.append(before)
        answers = favourites([*text, *drafts])[0][anchor:]
        count = next((i for i, (a, b) in enumerate(zip(drafts, answers, strict=False)) if a != b), rows - 1) + 1
        count = min(count, end - len(text))
        accepted.append(count)
        text += answers[:count]
    return text[len(prompt) :], accepted


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "sliding"])
def test_blocks_are_drafted_and_kept_as_in_a_loop_without_caches(kind):
    """Of a vocabulary so small that random drafts are often right. z-lab's own package gives the same."""
    shape = {**FAMILIES["llama"], "vocab_size": 12, "num_hidden_layers": 5}
    lm = tiny_lm(7, spread=0.4, **shape)
    more = {"dflash": {}, "dflash2": speculative.SECOND, "sliding": {"windows": (6, None), "causal": (True, False)}}
    draft = Draft.fresh(
        lm, num_layers=2, block_size=6, mask_token_id=11, generator=torch.Generator().manual_seed(5), **more[kind]
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "projection" in name or "codebook" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    draw = np.random.default_rng(1)
    kept = 0
    for length in (2, 4, 5, 5):
        prompt, size = draw.integers(0, 11, draw.integers(2, 20)).tolist(), int(draw.integers(2, 24))
        (result,) = dlm.generate(lm, [prompt], draft=draft, draft_length=length, gen_length=size, page_size=8)
        assert (result.tokens, result.accepted) == loop(lm, draft, prompt, size, length)
        kept += sum(result.accepted) - len(result.accepted)
    assert kept > 0


class Spy(Told):
    """Keeps what it is shown of the target."""

    taps = (3, 0, 2)

    def absorb(self, scheduled, forward) -> None:
        layout = forward.layout
        for position, row in zip(layout.host_positions.tolist(), forward.taps, strict=True):
            self.seen[position] = row.clone()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_tapped_layers_are_the_network_s_own(kernels):
    """In their order, the last one among them, and of the tokens that were kept."""
    lm = target(0)
    spy = Spy(0.5, 40)
    settings = {"gen_length": 9, "kernels": kernels}
    spy.texts, spy.seen = {"0": plain(lm, [[5, 6, 7]], **settings)[0]}, {}
    (result,) = dlm.generate(lm, [[5, 6, 7]], draft=spy, **settings)
    text = [5, 6, 7, *result.tokens]
    taps: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        lm.network.hidden(torch.tensor([text]), taps=taps)
    for position in range(len(text) - 1):
        expected = torch.stack([taps[layer][0, position] for layer in spy.taps])
        torch.testing.assert_close(spy.seen[position], expected, rtol=1e-4, atol=2e-4)
