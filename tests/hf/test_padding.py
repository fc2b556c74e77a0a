"""Rows with padding at the right or in between: read as each row alone."""

import copy
import pickle

import pytest
import tiny
import torch
from transformers import DynamicCache
from zoo import build

import kvevict

LENGTH = 44
POLICIES = [
    ("take", dict(budget=18, probe=6, chunk_size=16)), ("snapkv", dict(budget=12, window=4)),
    ("edie", dict(budget=12, window=4)), ("h2o", dict(budget=12, chunk_size=16)),
]  # fmt: skip


def rows(*counts, seed=1):
    """For every count so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator) for n in counts]


def spread(tokens, length, how, seed=2):
    """ids and mask [B, length] with padding at the "left", at the "right", or anywhere ("holes")."""
    ids, mask = torch.zeros(len(tokens), length, dtype=torch.long), torch.zeros(len(tokens), length, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for row, own in enumerate(tokens):
        order = torch.randperm(length, generator=generator) if how == "holes" else torch.arange(length)
        place = order[length - len(own) if how == "left" else 0 :][: len(own)].sort().values
        ids[row, place], mask[row, place] = own, 1
    return ids, mask


def positions_of(mask, before=0):
    return (before + mask.cumsum(1) - 1).clamp_min(0)


def turns_of(net, turns, how):
    """The logits of every turn's tokens, row by row, and the cache."""
    cache, seen, masks, outputs = DynamicCache(config=net.config), torch.zeros(3, 1, dtype=torch.long), [], []
    for tokens in turns:
        ids, mask = spread(tokens, max(map(len, tokens)), how)
        masks.append(mask)
        out = net(ids, attention_mask=torch.cat(masks, 1), position_ids=positions_of(mask, seen), past_key_values=cache)
        outputs.append([logits[own.bool()] for logits, own in zip(out.logits, mask, strict=True)])
        seen = seen + mask.sum(1, keepdim=True)
    return outputs, cache


@pytest.mark.parametrize("how", ["right", "holes"])
@pytest.mark.parametrize("policy, options", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_next"])
@pytest.mark.drawn(16)
def test_rows(family, policy, options, how):
    """Two turns and a token are read as with padding at the left, and as each row alone: the first turn, and all of
    them where no sliding window or state counts a later turn's padding, as it does in Transformers."""
    net = build(family)
    kvevict.patch(net, policy, **options)
    turns = [rows(LENGTH, 9, 31), rows(20, 20, 3, seed=3), rows(1, 1, 1, seed=4)]
    got, cache = turns_of(net, turns, how)
    left, _ = turns_of(net, turns, "left")
    for turn in range(3):
        for row in range(3):
            assert tiny.relative(got[turn][row], left[turn][row]) < 1e-5, (row, turn)
    for row in range(3):
        alone = DynamicCache(config=net.config)
        for turn in range(3 if family == "llama" else 1):
            want = net(turns[turn][row][None], past_key_values=alone).logits[0]
            assert tiny.relative(got[turn][row], want) < 1e-5, (row, turn)
    with pytest.raises(ValueError, match="crop cannot remove 9 tokens"):
        cache.crop(-9)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_generate(family):
    """After right padding the first new token follows the last token, not padding, as it does alone."""
    net = build(family)
    kvevict.patch(net, "take", budget=18, probe=6, chunk_size=16)
    tokens = rows(LENGTH, 9, 31)
    ids, mask = spread(tokens, LENGTH, "right")
    got = tiny.generate(net, dict(input_ids=ids, attention_mask=mask))
    beams = tiny.generate(net, dict(input_ids=ids, attention_mask=mask), num_beams=3)
    for row, own in enumerate(tokens):
        assert torch.equal(got[row], tiny.generate(net, dict(input_ids=own[None]))[0])
        assert torch.equal(beams[row], tiny.generate(net, dict(input_ids=own[None]), num_beams=3)[0])


def test_the_last_columns():
    """Padding has the output of the last token before it."""
    net = kvevict.patch(tiny.model(), "snapkv", budget=100, window=4)
    ids, mask = spread(rows(10, 7), 10, "right")
    every = net(ids, attention_mask=mask).logits
    assert torch.equal(every[1, 7:], every[1, 6].expand(3, -1))
    assert torch.equal(net(ids, attention_mask=mask, logits_to_keep=4).logits, every[:, -4:])


class Counted(DynamicCache):
    """A user's subclass of a cache."""

    cropped = 0

    def crop(self, tokens_to_remove):
        self.cropped += 1
        super().crop(tokens_to_remove)


@pytest.mark.parametrize("kind", [DynamicCache, Counted])
def test_the_next_position_goes_with_the_cache(kind):
    """Rows that end in padding continue after their last token, also after a crop, in another order and in copies; a
    user's subclass of a cache is kept."""
    net = kvevict.patch(tiny.model(), "snapkv", budget=100, window=4, decode=False)
    ids, mask = spread(rows(10, 7, 4), 10, "right")
    cache = kind(config=net.config)
    net(ids, attention_mask=mask, position_ids=positions_of(mask), past_key_values=cache)
    order, more = torch.tensor([2, 0, 1]), spread(rows(3, 3, 3, seed=3), 3, "left")[0]
    at = lambda column: torch.tensor([[1 + column]]).expand(3, 1)  # noqa: E731  as generate counts on from padding

    def go_on(cache, ids, mask):
        out = []
        for column in range(3):
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            one = ids[:, column : column + 1]
            out.append(net(one, attention_mask=mask, position_ids=at(column), past_key_values=cache).logits)
        return torch.cat(out, 1)

    twins = copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache.fork()
    assert all(isinstance(twin, kind) and type(twin).__name__ == type(cache).__name__ for twin in twins)
    want = go_on(copy.deepcopy(cache), more, mask)
    for row, own in enumerate(rows(10, 7, 4)):
        alone = net(torch.cat([own, more[row]])[None]).logits[0, -3:]
        assert tiny.relative(want[row], alone) < 1e-5
    for twin in twins[1:]:
        assert tiny.relative(go_on(twin, more, mask), want) < 1e-6
    go_on(cache, more, mask)
    cache.crop(-3)
    assert getattr(cache, "cropped", 1) == 1
    assert tiny.relative(go_on(cache, more, mask), want) < 1e-6
    cache.crop(-3)
    for select in ("reorder_cache", "batch_select_indices"):
        twin = copy.deepcopy(cache)
        getattr(twin, select)(order)
        assert tiny.relative(go_on(twin, more[order], mask[order]), want[order]) < 1e-6
    cache.batch_select_indices(torch.tensor([True, False, False]))
    cache.batch_repeat_interleave(3)
    assert tiny.relative(go_on(cache, more, mask[:1].expand(3, -1))[0], want[0]) < 1e-6


def test_saved_and_loaded(tmp_path):
    """A model with sliding windows masks its later turns by where padding was."""
    net = kvevict.patch(tiny.model("gemma2"), "snapkv", budget=12, window=4)
    ids, mask = spread(rows(30, 9), 30, "right")
    cache = net(ids, attention_mask=mask, position_ids=positions_of(mask)).past_key_values
    kvevict.save_cache(cache, tmp_path / "cache")
    later = dict(input_ids=ids[:, :5], attention_mask=torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], 1),
                 position_ids=positions_of(torch.ones(2, 5), mask.sum(1, keepdim=True)).long())  # fmt: skip
    loaded = kvevict.load_cache(tmp_path / "cache", net)
    assert torch.equal(net(**later, past_key_values=loaded).logits, net(**later, past_key_values=cache).logits)
