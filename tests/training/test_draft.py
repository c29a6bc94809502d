"""Training a draft: who sees what, what is asked and what it counts, and that decoding does as training did."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask

import dlm
from dlm.inference.drafting.dflash import DFlash
from dlm.models.draft import Draft
from dlm.training.anchors import write_anchors
from dlm.training.batch import Batch
from dlm.training.drafting.config import DraftConfig
from dlm.training.drafting.objective import block_states, decayed, total_of
from dlm.training.drafting.start import new_draft
from dlm.training.drafting.tau import walked
from dlm.training.loop import train
from dlm.training.masking.draft import DraftMasking
from dlm.training.run import Run
from dlm.training.teacher import LiveTeacher
from tests.inference.speculative import SECOND, target
from tests.refusals import refused
from tests.training.runs import config, rows

EOS, B = 3, 5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target in `ar`, which has learned a little."""
    folder = tmp_path_factory.mktemp("base")
    more = {"train__steps": "40", "train__lr": "0.01", "eval__sequences": "0"}
    train(config(folder, "ar", objective__masking="causal", **more))
    return folder


def draft_of(seed: int = 0, **more) -> Draft:
    draft = Draft.fresh(target(seed), num_layers=2, block_size=B, mask_token_id=39, generator=torch.Generator().manual_seed(seed), **more)  # fmt: skip
    for name, parameter in draft.named_parameters():  # so that every part has its say
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return draft


def text(rows: int = 3, length: int = 40, seed: int = 0) -> Batch:
    """Random rows with ends of documents, padding at the end of one and a prompt at the beginning of another."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 39, (rows, length), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.12] = EOS
    ids[1, -6:] = EOS
    answer = torch.ones_like(ids, dtype=torch.bool)
    answer[2, :7] = False
    return Batch(ids, answer, torch.arange(5, 5 + rows), 2, rows)


def allowed_by_hand(ids: list[int], anchors: list[int], apart: bool, room: int | None = None) -> list[list[bool]]:
    """Row by row and key by key, from the words of the rule alone."""
    table = []
    for block, anchor in enumerate(anchors):
        begin = 0
        while apart and EOS in ids[begin:anchor]:
            begin = ids.index(EOS, begin) + 1
        for _ in range(B):
            states = [begin <= p < anchor for p in range(len(ids))]
            blocks = [[other == block and (room is None or anchors[other] + i < room) for i in range(B)] for other in range(len(anchors))]  # fmt: skip
            table.append(states + [seen for block_ in blocks for seen in block_])
    return table


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("room", [None, 40])
def test_a_block_sees_the_states_before_its_anchor_in_its_document_and_itself(apart, room):
    batch, draft = text(), draft_of()
    blocks = DraftMasking(draft, 6, apart, seed=1).blocks(batch, room=room)
    table = blocks.allowed()
    for row in range(3):
        anchors = blocks.anchors[row].tolist()
        assert len(set(anchors)) == 6 and table[row].tolist() == allowed_by_hand(batch.input_ids[row].tolist(), anchors, apart, room)  # fmt: skip
    b, q, k = table.shape
    assert torch.equal(create_mask(blocks.sight(), b, 1, q, k, device="cpu")[:, 0], table)  # as FlexAttention asks it


@pytest.mark.parametrize("apart", [True, False])
def test_what_is_asked_ends_with_the_answer_and_the_text_and_positions_are_the_documents(apart):
    batch, draft = text(), draft_of()
    masking = DraftMasking(draft, 100, apart, seed=1)
    anchors, used = masking.draw(batch)
    blocks = masking.blocks(batch)
    for row, ids in enumerate(batch.input_ids.tolist()):
        answer = batch.answer[row].tolist()
        fit = [a for a in range(39) if answer[a] and answer[a + 1] and ids[a] != EOS]
        assert anchors[row][used[row]].tolist() == fit
        for n, a in enumerate(blocks.anchors[row].tolist()):
            wanted = []
            for k in range(1, B):
                if a not in fit or a + k >= 40 or EOS in ids[a + 1 : a + k]:
                    break
                wanted.append(ids[a + k])
            assert blocks.targets[row, n][blocks.asked[row, n]].tolist() == wanted
            assert blocks.asked[row, n].tolist() == [k < len(wanted) for k in range(B - 1)]
            begin = max((p + 1 for p in range(a) if ids[p] == EOS), default=0) if apart else 0
            mine = slice(n * B, n * B + B)
            assert blocks.positions[row, mine].tolist() == list(range(a - begin, a - begin + B))
            assert blocks.input_ids[row, mine].tolist() == [ids[a], *[39] * (B - 1)]


def test_no_more_is_asked_than_can_be_drafted():
    """Behind a token that the draft cannot draft nothing of its block is ever kept."""
    batch, few = text(), draft_of(tokens=range(0, 40, 3))
    every, blocks = (DraftMasking(draft, 100, True, seed=1).blocks(batch) for draft in (draft_of(), few))
    lists = (x.view(-1, B - 1).tolist() for x in (every.targets, every.asked, blocks.asked))
    for tokens, wanted, asked in zip(*lists, strict=True):
        known = [token % 3 == 0 for token in tokens]
        assert asked == [wanted[k] and all(known[: k + 1]) for k in range(B - 1)]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@torch.no_grad()  # on a CPU it has no gradients
def test_flex_attention_s_mask_gives_the_states_of_the_table(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    from dlm.models import streams

    monkeypatch.setattr(streams, "_compiled", lambda: flex_attention)  # eagerly: any device does that
    batch, draft = text(), draft_of()
    for apart in (True, False):
        blocks = DraftMasking(draft, 6, apart, seed=1).blocks(batch)
        features = torch.randn(3, 40, 2 * draft.config.network.hidden_size)
        seen = (blocks.input_ids, blocks.positions, features, blocks.context_positions)
        torch.testing.assert_close(draft(*seen, blocks.block_mask(), B), draft(*seen, blocks.allowed(), B))


def test_anchors_are_drawn_anew_each_step_and_are_the_samples_own():
    batch, masking = text(), DraftMasking(draft_of(), 6, False, seed=1)
    anchors, _ = masking.draw(batch)
    one, _ = masking.draw(batch.rows(1, 2))
    assert torch.equal(one[0], anchors[1])
    later, _ = masking.draw(Batch(batch.input_ids, batch.answer, batch.index, 3, 3))
    assert not torch.equal(later, anchors)


@pytest.mark.parametrize(
    "more", [{}, SECOND, {"windows": (6, None), "causal": (True, False)}], ids=["1", "2", "sliding"]
)
def test_no_gradient_reaches_states_at_or_behind_the_anchor(more):
    batch, draft = text().rows(0, 1), draft_of(**more)
    masking = DraftMasking(draft, 8, False, seed=1)
    for anchor in (9, 20):
        blocks = masking.blocks(batch, torch.tensor([[anchor]]))
        features = torch.randn(1, 40, 2 * draft.config.network.hidden_size, requires_grad=True)
        block_states(draft, blocks, features).square().sum().backward()
        size = features.grad[0].abs().sum(-1)
        assert (size[anchor:] == 0).all() and (size[anchor - 3 : anchor] > 0).all()


@pytest.mark.parametrize(
    "more", [{}, SECOND, {"windows": (6, None), "causal": (True, False)}], ids=["1", "2", "sliding"]
)
def test_training_computes_the_logits_of_decoding_block_by_block(more, monkeypatch):
    draft = draft_of(**more)
    seen, kind = [], "_run" if draft.config.plain else "_run_apart"
    run = getattr(DFlash, kind)

    def spied(self, layout, *more):
        hidden, logits, x = run(self, layout, *more)
        seen.append((int(layout.host_positions[0]), logits.clone()))
        return hidden, logits, x

    monkeypatch.setattr(DFlash, kind, spied)
    prompt = [7, 8, 9, 10, 11, 12, 13]
    (result,) = dlm.generate(draft.target, [prompt], draft=draft, gen_length=24)
    ids = torch.tensor([prompt + result.tokens])
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros(1, dtype=torch.long), 0, 1)
    masking = DraftMasking(draft, 4, False, seed=0)
    source = LiveTeacher.__new__(LiveTeacher)
    source.hidden = draft.target.network.hidden
    taps = source.outputs(ids)
    assert len(seen) > 3
    for anchor, logits in seen:
        blocks = masking.blocks(batch, torch.tensor([[anchor]]), room=len(prompt) + 24)
        ours = draft.logits(block_states(draft, blocks, draft.features(taps)))[0, 0]
        torch.testing.assert_close(logits, ours[: len(logits)], rtol=1e-5, atol=1e-5)


def test_weights_are_those_of_the_formulas():
    asked = torch.tensor([[[True, True, True, False], [True, False, False, False], [False] * 4]])
    weight = decayed(asked, DraftConfig(loss_decay=2.0))[0, 0]
    assert weight.tolist() == pytest.approx([math.exp(-(k - 1) / 2) for k in (1, 2, 3, 4)])
    assert [DraftConfig().decay(b) for b in (16, 10, 8, 4)] == [7, 5, 4, 2]
    assert float(total_of(asked, DraftConfig(loss_decay=2.0))) == pytest.approx(2 + math.exp(-0.5) + math.exp(-1))
    assert float(total_of(asked, DraftConfig(weighting="dpace"))) == 2


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize(("micro", "vocabulary"), [("1", "none"), ("4", "none"), ("4", "60")])
def test_the_loss_is_that_of_a_loop_over_tokens(base, tmp_path, weighting, micro, vocabulary, capsys):
    more = {"draft__weighting": weighting, "train__micro_batch_size": micro, "draft__vocabulary": vocabulary}
    run = Run(ours(base, tmp_path, "loop", **more))
    assert ("60 of" in capsys.readouterr().out) == (vocabulary == "60")
    batch = run._batch()
    draft, masking = run.network, run.model.masking
    blocks = masking.blocks(batch)
    logits = draft.logits(block_states(draft, blocks, run.model.states(batch.input_ids, blocks.context_positions)))
    log_q = logits.log_softmax(-1).detach()
    total = divisor = 0.0
    for b, n in blocks.asked.any(-1).nonzero().tolist():
        costs = [-float(log_q[b, n, k, blocks.targets[b, n, k]]) for k in range(int(blocks.asked[b, n].sum()))]
        if weighting == "decay":
            weights = [math.exp(-k / 2) for k in range(len(costs))]
            divisor += sum(weights)
        else:
            reach = [math.prod(0.5 * math.exp(-c) + 0.5 for c in costs[: j + 1]) for j in range(len(costs))]
            weights = [sum(reach[k:]) for k in range(len(costs))]
            divisor += 1
        total += sum(w * c for w, c in zip(weights, costs, strict=True))
    run.loader.load_state_dict({**run.loader.state_dict()})
    again = Run(ours(base, tmp_path, "again", **more))
    parts, _ = again.optimiser_step()
    assert parts["draft"] == pytest.approx(total / divisor, rel=1e-5)


def ours(base, folder, out: str, **more: str):
    """A config that trains a tiny draft for `base`/ar."""
    small = {"objective__masking": "draft", "draft__target": str(base / "ar"), "draft__block_length": "4"}
    small |= {"draft__num_anchors": "6", "draft__target_layers": "[0,1]", "draft__tau_prompts": "3"}
    small |= {"draft__tau_length": "10", "train__lr": "0.01", "train__out": str(folder / out)}
    return config(base, out, **(small | more))


@pytest.mark.parametrize("second", [False, True])
def test_a_draft_trains_is_resumed_exactly_and_decodes_as_training_says(base, tmp_path, second):
    more = {f"draft__{name}": str(value) for name, value in SECOND.items()} if second else {}
    more |= {"train__ema": "0.5", "eval__every": "10", "train__steps": "20", "checkpoint__every": "7"}
    straight = train(ours(base, tmp_path, "straight", **more))
    assert sum(straight.losses[-3:]) < 0.9 * sum(straight.losses[:3])
    assert straight.figures["tau_gap"] == 0 and straight.figures["tau"] >= 1
    lines = [line for line in rows(straight.folder) if "tau" in line]
    assert [line["step"] for line in lines] == [10, 20] and lines[1]["tau"] == straight.figures["tau"]

    stopped = Run(ours(base, tmp_path, "stopped", **more))
    for _ in range(9):
        stopped.optimiser_step()
    stopped.save_checkpoint()
    resumed = train(ours(base, tmp_path, "stopped", **more))
    assert resumed.losses == straight.losses[9:] and resumed.figures == straight.figures
    lm = dlm.load(base / "ar", device="cpu")
    one, two = (dlm.load_draft(result.folder, lm) for result in (straight, resumed))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert one.config.selects == second and one.config.block_size == 4 and one.config.target_layer_ids == (0, 1)
    (plain,), (fast,) = (dlm.generate(lm, ["def f"], gen_length=12, **more) for more in ({}, {"draft": one}))
    assert plain.tokens == fast.tokens and fast.tau >= 1
    went_on = train(ours(base, tmp_path, "more", train__init_from=str(straight.folder), draft__block_length="none", draft__target_layers="[]"))  # fmt: skip
    assert went_on.losses[0] < straight.losses[0]


def test_cached_states_give_the_losses_of_live_ones(base, tmp_path):
    for documents in ("joined", "apart"):
        more = {"objective__documents": documents, "train__steps": "4", "eval__sequences": "0"}
        live = train(ours(base, tmp_path, f"live-{documents}", **more))
        folder = {"draft__states": str(tmp_path / documents), "draft__states_dtype": "float32"}
        done = write_anchors(ours(base, tmp_path, "unused", **more, **folder))
        assert 0 < done.written <= done.sequences == 16
        cached = train(ours(base, tmp_path, f"cached-{documents}", **more, **folder))
        assert cached.losses == pytest.approx(live.losses, rel=1e-4)
    refused("holds states of documents apart", Run, ours(base, tmp_path, "x", **{**folder, "eval__sequences": "0"}))


def test_without_context_nothing_of_the_target_is_read(base, tmp_path):
    result = train(ours(base, tmp_path, "blind", draft__context="false"))
    draft = dlm.load_draft(result.folder, dlm.load(base / "ar", device="cpu"))
    assert not draft.fc.weight.any() and result.figures["tau_gap"] == 0
    assert new_draft(ours(base, tmp_path, "x"), torch.device("cpu")).fc.weight.all()


def test_verifications_walk_over_a_text():
    # 7 tokens behind the first anchor: 2 right + 1, then none right + 1, then 5 right, but only 3 are left.
    assert walked([2, 0, 0, 0, 5, 0, 0, 0], [True] * 7 + [False]) == [3, 1, 3]
    assert walked([0, 3, 0, 9, 1], [False, True, False, True, False]) == [1, 1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"draft__target": "none"}, "masking = draft needs draft.target"),
        ({"objective__masking": "causal"}, r"draft.target = .* is only read with objective.masking = draft, not causal"),
        ({"draft__block_length": "1"}, "block_length"),
        ({"draft__vocabulary": "100000"}, "draft.vocabulary = 100,000 is more than the .* tokens of draft.target"),
        ({"draft__selector_rank": "4"}, "conv_kernel_size is not set: a DFlash 2 draft needs all of"),
        ({"draft__loss_decay": "3", "draft__weighting": "dpace"}, 'loss_decay = 3 is only read with weighting = "decay"'),
        ({"draft__target_layers": "[1, 1]"}, r"target_layers = \[1, 1\]: different numbers"),
        ({"objective__entropy_weight": "2"}, "objective.entropy_weight = 2.0 is not read with masking = draft"),
        ({"train__tokenizer": "pico"}, "a draft has its target's tokenizer"),
        ({"train__init_from": "pico"}, "shapes a new draft, and train.init_from = 'pico' has its own"),
        ({"eval__draws": "2"}, "eval.draws = 2 is not read"),
        ({"model__hidden_size": "32"}, r"\[model\] is not read"),
        ({"draft__target_layers": "[0, 2]"}, r"has layers 0 to 1, and a draft would read \[0, 2\]"),
        ({"draft__target": "pico"}, "'pico' is bidirectional: a draft is for a causal model"),
        ({"train__length": "5000"}, "train.length = 5000 exceeds the .* positions of draft.target"),
        ({"train__compile": "true"}, "train.compile is not possible"),
        ({"draft__states": "nowhere"}, "draft.states = 'nowhere' holds no anchors.json"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(base, tmp_path, more, message):
    refused(message, lambda: Run(ours(base, tmp_path, "bad", **more)))


def test_another_target_is_refused_on_resuming(base, tmp_path):
    run = Run(ours(base, tmp_path, "run", eval__sequences="0"))
    run.optimiser_step()
    run.save_checkpoint()
    run.model.identity = "another"
    refused("is of a draft for a target with weights", run.resume)


def test_cross_entropy_of_the_selector_is_over_its_candidates():
    from dlm.training.drafting.objective import DraftObjective

    draft = draft_of(**SECOND)
    hidden = torch.randn(6, draft.config.network.hidden_size, generator=torch.Generator().manual_seed(1))
    selector, previous = draft.candidate_selector, torch.arange(6)
    values, candidates = selector.candidates(draft.logits(hidden))
    right = torch.cat((candidates[torch.arange(5), torch.arange(5)], candidates.new_tensor([39])))
    assert 39 not in candidates[5]
    found = DraftObjective._choice(draft, hidden, torch.stack((right, previous), -1))
    scores = selector.scores(previous, hidden, values, candidates)
    torch.testing.assert_close(found[:5], F.cross_entropy(scores[:5], torch.arange(5), reduction="none"))
    assert found[5] == 0
