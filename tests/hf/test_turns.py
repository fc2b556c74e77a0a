"""Caches that live longer than one read: further turns, other policies, mistakes in between."""

import contextlib
from unittest import mock

import pytest
import torch
from caches import ids, kept, tokens_of
from tiny import model, prompt, relative

import kvevict
from kvevict.models.compat import CACHE, STATE, cache_of
from kvevict.policy.building import build

pytestmark = pytest.mark.usefixtures("no_grad")

TURNS = {
    "tova": dict(budget=20, decode=False), "h2o": dict(budget=20, decode=False),
    "snapkv": dict(budget=20, window=4), "take": dict(budget=20, probe=5),
}  # fmt: skip


@pytest.mark.parametrize("policy", TURNS)
def test_second_turn_with_a_chunk_of_padding(policy):
    """A row with a first chunk of padding keeps its slots until its tokens come, as if it were alone."""
    net, first, second = kvevict.patch(model(), policy, chunk_size=20, **TURNS[policy]), ids(2, 60), ids(2, 50, 2)
    mask = torch.ones(2, 110, dtype=torch.long)
    mask[1, 60:100] = 0
    places = (mask.cumsum(1) - 1)[:, 60:]
    cache = net(first).past_key_values
    both = net(second, attention_mask=mask, position_ids=places, past_key_values=cache)
    alone = net(first[1:]).past_key_values
    last = net(second[1:, 40:], past_key_values=alone)
    assert [layer[1] for layer in kept(cache)] == [layer[0] for layer in kept(alone)]
    assert relative(both.logits[1:, 40:], last.logits) < 1e-5


@pytest.mark.parametrize("policy, options", [
    ("take", dict(probe=4)), ("take", dict(probe=4, chunk_size=8)), ("take+edie", dict(probe=4)),
    ("snapkv", dict(window=4)), ("take", dict(probe=4, decode=True, interval=4)), ("h2o", {}), ("streaming", {}),
    ("knorm", dict(heads="flat", decode=True, interval=1, keep_prompt=True)),
])  # fmt: skip
def test_a_turn_of_one_token_beside_a_longer_one(policy, options):
    """A row keeps the same slots as alone: one token is decoded, and evicts as a decoded token."""
    net, first, more = model(), prompt(2, 40, seed=1)["input_ids"], prompt(2, 6, seed=2)["input_ids"]

    def positions(rows, widths):
        wide = max(widths)
        turn = torch.ones(len(rows), wide, dtype=torch.long)
        mask = torch.ones(len(rows), 40 + wide, dtype=torch.long)
        for at, (row, n) in enumerate(zip(rows, widths, strict=True)):
            turn[at, wide - n :], mask[at, 40 : 40 + wide - n] = more[row, :n], 0
        places = (mask.cumsum(1) - 1)[:, 40:]
        with kvevict.evicting(net, policy, budget=16, **options), torch.no_grad():
            cache = net(first[rows], use_cache=True, logits_to_keep=1).past_key_values
            net(turn, attention_mask=mask, position_ids=places, past_key_values=cache)
        return [[head.tolist() for head in layer.positions()[0]] for layer in cache.layers]

    assert positions([0, 1], [1, 6]) == positions([0], [1])


def test_a_prompt_without_tokens_after_the_cache_s():
    """Transformers would read it after these, and so would an assistant's calls with a longer one."""
    net, first = model(), prompt(1, 40)
    with kvevict.evicting(net, "snapkv", budget=16, window=4):
        out = net.generate(**first, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        cache, held = cache_of(out), kept(cache_of(out))
        for mask in (None, first["attention_mask"]):
            with pytest.raises(ValueError, match="the prompt has 40 tokens, no more than the 43 that the cache holds"):
                net.generate(first["input_ids"], attention_mask=mask, max_new_tokens=2, **{CACHE: cache})
        longer = torch.cat([out.sequences, ids(1, 9)], 1)
        with pytest.raises(ValueError, match="read the whole prompt anew, after the 43 tokens"):
            net.generate(longer, max_new_tokens=2, prompt_lookup_num_tokens=3, eos_token_id=0, **{CACHE: cache})
        assert kept(cache) == held and cache.sequence.columns == 43
        net.generate(longer, max_new_tokens=2, **{CACHE: cache})
        assert cache.sequence.columns == 43 + 10 + 1
    assert STATE not in net.model.__dict__  # a refused call is not one that still runs


def test_a_turn_after_an_assisted_one():
    """It is an ordinary one: nothing of it may be taken back."""
    net, first = model(), prompt(1, 40)
    with kvevict.evicting(net, "snapkv", budget=64, window=4):
        lookup = dict(prompt_lookup_num_tokens=3, eos_token_id=0)
        out = net.generate(**first, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, **lookup)
        cache = cache_of(out)
        assert cache.record_past
        net.generate(torch.cat([out.sequences, ids(1, 9)], 1), max_new_tokens=2, **{CACHE: cache})
        assert not cache.record_past


def test_sums_are_not_taken_back():
    net = model()
    with kvevict.evicting(net, "h2o", budget=64):
        cache = cache_of(net(ids(1, 20), use_cache=True))
        net(ids(1, 1), use_cache=True, **{CACHE: cache})
        with pytest.raises(ValueError, match=r"crop cannot remove tokens whose attention .* fork the cache"):
            cache.crop(-1)
    assert cache.sequence.columns == 21


def test_crop_stops_at_padding():
    net = kvevict.patch(model(), "snapkv", budget=500)
    cache = net(ids(2, 20)).past_key_values
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 20:25] = 0
    net(ids(2, 10, 2), attention_mask=mask, past_key_values=cache)
    before = kept(cache)
    with pytest.raises(ValueError, match="only the last 5"):
        cache.crop(-8)
    assert kept(cache) == before
    cache.crop(-5)
    assert [[len(head) for head in row] for row in kept(cache)[0]] == [[25, 25], [20, 20]]


def test_crop_forgets_the_queries_of_what_it_takes():
    net = kvevict.patch(model(), "snapkv", budget=40, window=8, decode=True, interval=4)
    straight, detour = (net(ids(1, 60)).past_key_values for _ in range(2))
    for token in (5, 6, 7):
        net(torch.tensor([[token]]), past_key_values=detour)
    detour.crop(-3)
    for cache in (straight, detour):
        for token in (8, 9, 10, 11):
            net(torch.tensor([[token]]), past_key_values=cache)
    assert kept(straight) == kept(detour)


def test_budget_of_the_policy_in_force():
    net = kvevict.patch(model(), "tova", budget=10)
    cache = net(ids(1, 60)).past_key_values
    kvevict.patch(net, "tova", budget=500)
    tokens_of(net, cache, torch.tensor([[5]]), 20)
    assert len(kept(cache)[0][0][0]) == 30
    kvevict.patch(net, "snapkv", budget=100, window=64, decode=True, interval=1)
    tokens_of(net, cache, torch.tensor([[5]]), 80)
    assert len(kept(cache)[0][0][0]) == 100


def test_sums_do_not_outlive_their_policy():
    net = kvevict.patch(model(), "h2o", budget=40)
    cache = net(ids(1, 60)).past_key_values
    kvevict.patch(net, "snapkv", budget=10, window=4)
    net(ids(1, 20, 2), past_key_values=cache)
    kvevict.patch(net, "h2o", budget=40)
    tokens_of(net, cache, torch.tensor([[5]]), 40)
    assert len(kept(cache)[0][0][0]) == 40


def test_sums_of_a_chosen_row():
    net = kvevict.patch(model(), "h2o", budget=64)
    cache = net(**prompt(2, 50, pad=(0, 30))).past_key_values
    cache.batch_select_indices(torch.tensor([1]))
    tokens_of(net, cache, torch.tensor([[5]]), 3)
    assert len(kept(cache)[0][0][0]) == 23


def test_plain_cache_continued_by_one_token():
    net = model()
    cache = net(ids(1, 40)).past_key_values
    kvevict.patch(net, "tova", budget=32)
    tokens_of(net, cache, torch.tensor([[5]]), 2)
    assert len(kept(cache)[0][0][0]) == 32


def test_refused_input_leaves_the_cache_alone():
    net = kvevict.patch(model(), "h2o", budget=20)
    cache = net(ids(1, 40)).past_key_values
    before = kept(cache)
    with pytest.raises(ValueError, match="batch of 1 rows, the input has 3"):
        net(ids(3, 10), past_key_values=cache)
    assert kept(cache) == before
    tokens_of(net, cache, torch.tensor([[5]]), 3)
    plain_model = model()
    plain = plain_model(ids(1, 10)).past_key_values
    with pytest.raises(ValueError, match="attention_mask"):
        net(ids(1, 5), attention_mask=torch.ones(1, 7), past_key_values=plain)
    assert plain_model(ids(1, 5), past_key_values=plain).logits.isfinite().all()  # still Transformers' cache


def test_half_read_cache_is_refused():
    net = kvevict.patch(model(), "snapkv", budget=20, window=4)
    cache = net(ids(1, 40)).past_key_values
    hook = net.model.layers[2].register_forward_pre_hook(mock.Mock(side_effect=KeyError("stop")))
    with pytest.raises(KeyError):
        net(ids(1, 10), past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match="half read"):
        net(ids(1, 10), past_key_values=cache)
    with pytest.raises(ValueError, match="half read"):
        net.generate(ids(1, 40), max_new_tokens=2, **{CACHE: cache})
    assert net(ids(1, 10)).logits.isfinite().all()


def test_autocast():
    net, x = model(), ids(1, 60)
    with torch.autocast("cpu", torch.bfloat16):
        want = net(x).logits
        kvevict.patch(net, "snapkv", budget=100, chunk_size=20)
        assert relative(net(x).logits, want) < 3e-2


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_router_logits"])
def test_flags_of_the_config_are_refused_when_chunked(flag):
    net = kvevict.patch(model(), "snapkv", budget=100, chunk_size=20)
    setattr(net.config, flag, True)
    with pytest.raises(ValueError, match=flag):
        net(ids(1, 60))


def test_bidirectional_models_are_refused():
    with pytest.raises(ValueError, match="bidirectional"):
        kvevict.patch(model("gemma3", use_bidirectional_attention=True), "snapkv", budget=64)


def test_another_policy_forgets_remembered_queries():
    """Rows remembered under an earlier policy have a gap after them: they no longer observe."""
    window = dict(budget=20, window=4, decode=True, interval=2)

    def slots(forget):
        net = kvevict.patch(model(), "snapkv", **window)
        cache = net(ids(1, 40)).past_key_values
        tokens_of(net, cache, ids(1, 1, 3), 6)
        kvevict.patch(net, "knorm", budget=20, decode=False)
        tokens_of(net, cache, ids(1, 1, 4), 2)
        if forget:
            for layer in cache.layers:
                layer.decode_queries = None
        kvevict.patch(net, "snapkv", **window)
        tokens_of(net, cache, ids(1, 1, 5), 2)
        return kept(cache)

    assert slots(forget=False) == slots(forget=True)


def test_layers_that_share_a_choice_must_hold_the_same_slots():
    """Equal numbers of different slots, of another policy, are refused before anything is dropped."""
    net = kvevict.patch(model(), "snapkv", budget=20, window=4)
    cache = net(ids(1, 60)).past_key_values
    before = kept(cache)
    for policy, more in (("take", dict(probe=5, chunk_size=20)), ("chunkkv:n_reuse=2", dict(window=4)), ("tova", {})):
        kvevict.patch(net, policy, budget=20, **more)
        with pytest.raises(ValueError, match="hold different slots; read the prompt again"):
            net(ids(1, 30, 2), past_key_values=cache)
        assert kept(cache) == before


def test_only_layers_that_share_a_choice_must(tmp_path):
    """An equal policy, built anew, goes on with a cache, and with one from a file."""
    net, options = model(), dict(budget=20, window=4, select_by_layer=((1, 3, "chunk"),))
    with kvevict.evicting(net, "snapkv", **options):
        cache = net(ids(1, 60)).past_key_values
        want = tokens_of(net, cache.fork(), ids(1, 20, 2), 4)
        kvevict.save_cache(cache, tmp_path / "cache")
    for each in (cache, kvevict.load_cache(tmp_path / "cache", net)):
        with kvevict.evicting(net, "snapkv", **options):
            assert torch.equal(tokens_of(net, each, ids(1, 20, 2), 4), want)


TAKES, LAYERS = {"take", "take:append=false", "take+caote"}, {"tova", "chunkkv", "chunkkv:exact=false"}
SHARED = {"take+chunkkv", "chunkkv:n_reuse=2", "streaming"}
FOLLOW = dict.fromkeys(TAKES, TAKES | SHARED) | dict.fromkeys(LAYERS, LAYERS | SHARED)
FOLLOW |= {"take+chunkkv": SHARED, "chunkkv:n_reuse=2": SHARED - {"take+chunkkv"}}


def test_which_policies_may_follow_which():
    net, caches = model(), {}
    names = [*FOLLOW, "streaming", "snapkv", "take+edie", "kvzip", "h2o"]

    def options(name):
        small = build(name, budget=300).rows.__dataclass_fields__
        return dict(budget=20, chunk_size=30) | {own: 4 for own in ("window", "probe") if own in small}

    for name in names:
        with kvevict.evicting(net, name, **options(name)):
            caches[name] = net(ids(1, 60), logits_to_keep=1).past_key_values
    for turn in names:
        with kvevict.evicting(net, turn, **options(turn)):
            for before, cache in caches.items():
                refused = pytest.raises(ValueError, match="hold different slots")
                with contextlib.nullcontext() if before in FOLLOW.get(turn, names) else refused:
                    net(ids(1, 20, 2), past_key_values=cache.fork(), logits_to_keep=1)


def test_a_reuse_group_that_keeps_everything_follows_no_other():
    """exact=False fills groups at different times: a follower must not take another group's choice."""
    options = dict(budget=40, window=8, n_reuse=2, decode=True, interval=1)
    net = kvevict.patch(model(), "chunkkv", c=20, exact=False, **options)
    cache = net(ids(1, 80)).past_key_values
    tokens_of(net, cache, ids(1, 1, 3), 30)
    held = kept(cache)
    assert all(held[i] == held[i + 1] for i in range(0, len(held), 2))


def test_sums_end_with_their_policy(tmp_path):
    net = kvevict.patch(model(), "h2o", budget=40, chunk_size=20)
    cache = net(ids(1, 60)).past_key_values
    kvevict.patch(net, "snapkv", budget=40, window=4)
    tokens_of(net, cache, ids(1, 1, 3), 5)
    kvevict.save_cache(cache, tmp_path / "cache.safetensors")
    assert kept(kvevict.load_cache(tmp_path / "cache.safetensors", net)) == kept(cache)
