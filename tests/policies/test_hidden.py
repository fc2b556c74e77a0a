"""Rows that repeat the chunk, KVzip's score and one ranking of all layers: against the oracle and by hand."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import tiny
import torch
import zoo
from caches import kept
from choices import CHUNKED, options
from policy_cases import BUDGET, CHUNK, VOCAB, Slots, compare, model, tokens

import kvevict
from kvevict.answering.answer import SHORTEST, within_positions
from kvevict.engine.memory.carried import join
from kvevict.lab.analysis.slots import Layers
from kvevict.policy.building import build

WHOLE = {
    "kvzip": dict(part=20),
    "kvzip, few first slots": dict(sink=2, part=25),
    "kvzip, anew": dict(carry="none", part=30),
    "kvzip, largest": dict(carry="max", part=20),
    "kvzip, one part": {},
    "kvzip, per layer": dict(layers="uniform", part=16),
    "kvzip, per head": dict(layers="uniform", heads="equal", part=1000),
    "kvzip, reuse": dict(layers="uniform", n_reuse=2, part=40),
    "kvzip, wait": dict(layers="uniform", warmup_layers=3, part=24),
    "kvzip+": dict(part=20),
}  # "preset, remark": options
any_whole = pytest.mark.parametrize("name", WHOLE)


def whole(name, **more):
    return options(WHOLE, name, schedule="prompt", budget=BUDGET, **more)


@any_whole
def test_parts_after_the_whole_prompt(name):
    policy, chosen = whole(name)
    compare(model(), policy, [[53]], **chosen)


@any_whole
def test_parts_after_chunks_padding_and_turns(name):
    """Rows of unequal lengths have separate parts, and old slots keep their numbers."""
    policy, chosen = whole(name, chunk_size=CHUNK)
    compare(model(), policy, [[41, 1, 1, 23], [27, 1, 1, 23], [10, 1, 1, 23]], **chosen)


@pytest.mark.parametrize("family", ["phi3", "gemma2", "gemma3", "gpt_oss"])
def test_parts_in_other_families(family):
    policy, chosen = whole("kvzip", chunk_size=15)
    compare(model(family), policy, [[40, 1, 30]], **chosen)


@pytest.mark.parametrize("family, name", [
    ("gemma3", "kvzip, few first slots"), ("gemma3", "kvzip+"), ("gpt_oss", "kvzip"),
])  # fmt: skip
def test_parts_of_padded_rows_beside_sliding_windows(family, name):
    """Repeated rows see the last tokens of their batch row through a window, whatever row is longest."""
    policy, chosen = whole(name, chunk_size=CHUNK)
    compare(model(family), policy, [[41, 1, 23], [27, 1, 23], [5, 1, 23]], **chosen)


@pytest.mark.parametrize("seed", range(30))
def test_the_best_of_survivors_and_new_ones_are_the_best_of_all(seed):
    """With kept numbers, cuts after every chunk keep the same slots as one cut of all."""
    generator = torch.Generator().manual_seed(seed)
    budget, size, number = 7, 5, torch.rand(1, 1, 60, generator=generator)
    alive, carried = torch.empty(0, dtype=torch.long), None
    for start in range(0, 60, size):
        alive = torch.cat([alive, torch.arange(start, start + size)])
        new = torch.rand(1, 1, len(alive), generator=generator)
        new[..., -size:] = number[..., start : start + size]
        numbers = join("keep", new, carried)
        best = numbers[0, 0].topk(min(budget, len(alive))).indices.sort().values
        alive, carried = alive[best], numbers[..., best]
    assert alive.tolist() == number[0, 0].topk(budget).indices.sort().values.tolist()


@dataclass(frozen=True)
class Fixed(kvevict.Score):
    """Every token of every layer and head has its number, and tokens of earlier chunks get anything."""

    comparable: ClassVar = True
    carry: ClassVar = "keep"

    def score(self, slots):
        head = slots.index * slots.n.shape[1] + slots.heads.numbers(slots.device)
        number = (slots.positions.long() * 8 + head[:, None] + 1) * 2654435761 % 2**32 / 2**32
        old = torch.arange(slots.columns) < slots.kv.stored.len[..., None]
        return torch.where(old, torch.rand(number.shape), number).float()


@pytest.mark.parametrize("chosen", [
    dict(layers="pool", heads="flat", least=0), dict(layers="pool", heads="flat", least=3), dict(heads="flat"),
    dict(heads="equal"), dict(layers="pool", heads="flat", threshold=0.95, keep_last=0),
], ids=str)  # fmt: skip
@pytest.mark.drawn(2)
def test_chunks_end_with_what_one_cut_of_all_keeps(chosen):
    """Streaming top-B with carry="keep" is offline top-B, of fixed numbers."""
    made, ids = model(), tokens([[97]], 0)[0][0][None]
    policy = kvevict.Policy(score=Fixed(), budget=11)
    with torch.no_grad(), kvevict.evicting(made, policy, schedule="prompt", **chosen):
        want = kept(made(ids, logits_to_keep=1).past_key_values)
    for size in (1, 7, 40):
        with torch.no_grad(), kvevict.evicting(made, policy, chunk_size=size, **chosen):
            assert kept(made(ids).past_key_values) == want, size
    total = sum(len(head) for layer in want for head in layer[0])
    assert 0 < total < 11 * 8 if "threshold" in chosen else total == 11 * 8


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("least", [0, 3])
def test_pool_by_hand(seed, least):
    """The kept slots are each head's best, then the best of all; ties go to the earlier position, layer and head."""
    generator = torch.Generator().manual_seed(seed)
    layers = [Slots(2, 12 + 3 * number, window=2) for number in range(3)]
    scores = [torch.randint(6, (1, 2, slots.columns), generator=generator).float() for slots in layers]
    keep = kvevict.LAYERS["pool"](least=least).keep(layers, scores, torch.tensor([48]))
    items = [(-scores[a][0, h, i].item(), i, a, h) for a, slots in enumerate(layers)
             for h in range(2) for i in range(slots.columns - 2)]  # fmt: skip
    heads = [(a, h) for a in range(3) for h in range(2)]
    own = [item for head in heads for item in sorted(x for x in items if x[2:] == head)[:least]]
    won = own + sorted(set(items) - set(own))[: 48 - 12 - len(own)]
    want = [[2 + sum(item[2:] == (a, h) for item in won) for h in range(2)] for a in range(3)]
    assert [x[0].tolist() for x in keep] == want and sum(map(sum, want)) == 48


def test_a_head_without_the_longest_one_s_slots_takes_in_numbers_of_new_ones():
    """Heads of different lengths: past a shorter one's end nothing is carried, so new slots there get the score."""
    carried = torch.tensor([[[4.0, 3, 2], [5, torch.nan, torch.nan]]])
    assert join("keep", torch.ones(1, 2, 4), carried)[0].tolist() == [[4, 3, 2, 1], [5, 1, 1, 1]]


@pytest.mark.parametrize("layers", ["pool", "uniform"])
@pytest.mark.parametrize("chosen", [dict(chunk_size=CHUNK), dict(schedule="prompt"), dict(schedule="prompt", part=20)])
def test_diagnostics_of_padded_rows(layers, chosen):
    """They equal each row's alone: the row's repetition observes, and it may end before the call. If it ended in an
    earlier part, nothing is known."""
    made, lengths, chosen = model(), (41, 35, 18), chosen | dict(budget=9, layers=layers, diagnose=True)
    data = [ids for ((ids,),) in (tokens([[n]], n) for n in lengths)]
    ids = torch.stack([torch.cat([torch.zeros(41 - len(row), dtype=torch.long), row]) for row in data])
    mask = (torch.arange(41) >= 41 - torch.tensor(lengths)[:, None]).long()
    with kvevict.evicting(made, "kvzip", **chosen), torch.no_grad():
        made(ids, attention_mask=mask, logits_to_keep=1)
        got = kvevict.report(made)["diagnostics"]
        for b, row in enumerate(data):
            made(row[None], logits_to_keep=1)
            for name, layers in kvevict.report(made)["diagnostics"].items():
                own, want = torch.tensor([layer[b] for layer in got[name]]), torch.tensor([one for (one,) in layers])
                if name != "evictions" and chosen.get("part") == 20 and len(row) <= 40:
                    assert own.isnan().all()
                else:
                    torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-6)


def test_slots_add_up_and_their_bytes_are_the_cache_s():
    made, ids = model(), tokens([[61]], 0)[0][0][None]
    with kvevict.evicting(made, "kvzip", **CHUNKED), torch.no_grad():
        made(ids)
        report = kvevict.report(made)
    layers = [sum(row[0]) for row in report["kept"]]
    assert sum(layers) == BUDGET * 8 and len(set(layers)) > 1
    assert min(min(row[0]) for row in report["kept"]) >= 4 + 4  # sinks, and `least`
    assert report["cache_bytes"] == BUDGET * 8 * 2 * 4 * 32  # K and V, fp32, d=32


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "falcon_h1", "gemma3n_text"])
@pytest.mark.parametrize("more", [dict(chunk_size=16), dict(schedule="prompt", part=25, chunk_size=16)], ids=str)
def test_repetitions_leave_latents_states_windows_and_shared_layers_alone(kind, more):
    """With room for all tokens, the prompt and a token after it are the unpatched model's."""
    made = zoo.model(kind)
    ids = torch.arange(3, 64)[None] % made.config.vocab_size
    with torch.no_grad():
        want = made(ids, use_cache=False).logits
        with kvevict.evicting(made, "kvzip", budget=100, **more):
            out = made(ids[:, :60])
            following = made(ids[:, 60:], past_key_values=out.past_key_values).logits
        with kvevict.evicting(made, "kvzip", budget=12, **more):
            made(ids)
            layers = [sum(layer[0]) for layer in kvevict.report(made)["kept"] if layer]
    torch.testing.assert_close(torch.cat([out.logits, following], 1), want, rtol=0, atol=1e-5 * want.abs().max())
    assert sum(layers) % 12 == 0 and sum(layers)


def test_the_plan_counts_a_whole_prompt_and_its_parts():
    """All of the prompt is held until the last part was repeated."""
    policy = build("kvzip", budget=BUDGET, chunk_size=CHUNK, schedule="prompt", part=25)
    taken = list(Layers(policy, 60, 4, 2).chunks())
    assert [(each.chunk.rows, each.chunk.appended) for each in taken] == [(12, 0)] * 5 + [(0, 25), (0, 25), (0, 10)]
    assert [sum(each.kept) for each in taken[-3:]] == [4 * 60, 4 * 60, 4 * BUDGET] and taken[-1].peak == 4 * 60


def test_the_plan_counts_one_ranking():
    """All layers hold the chunk until the last one was read."""
    taken = list(Layers(build("kvzip", budget=BUDGET, chunk_size=CHUNK), 60, 4, 2).chunks())
    assert [each.peak for each in taken[2:]] == [4 * (BUDGET + CHUNK)] * 3
    assert {sum(each.kept) for each in taken[1:]} == {4 * BUDGET}


@pytest.mark.parametrize("chosen", [dict(chunk_size=40), dict(schedule="prompt"), dict(schedule="prompt", part=20)])
def test_a_repetition_beyond_the_model_s_positions(chosen):
    made, ids = tiny.model(vocab_size=VOCAB, max_position_embeddings=64), tokens([[50]], 0)[0][0][None]
    with kvevict.evicting(made, "kvzip", budget=16, **chosen), torch.no_grad():
        with pytest.raises(ValueError, match=r"14 are left to repeat with, so give a (chunk_size|part) .* at most 14"):
            made(ids)
        assert made(ids[:, :24]).logits.shape[1] == 24


@pytest.mark.parametrize("chosen", [
    dict(chunk_size=40), dict(schedule="prompt", part=20),
], ids=str)  # fmt: skip
def test_chunks_that_are_repeated_within_the_model_s_positions(chosen):
    made, ids = tiny.model(vocab_size=VOCAB, max_position_embeddings=64), tokens([[50]], 0)[0][0][None]
    policy = build("kvzip", budget=16, **chosen)
    assert within_positions(policy, made.config, 64 - SHORTEST - 30) == policy
    for tokens_ in (64 - SHORTEST, 64 - SHORTEST - 2):
        fitted = within_positions(policy, made.config, tokens_)
        assert fitted != policy
        with kvevict.evicting(made, fitted), torch.no_grad():
            assert made(ids[:, :tokens_]).logits.shape[1] == tokens_
    assert within_positions(policy, made.config, 64 - SHORTEST + 1) == policy
