"""Random tiny models read random prompts by random policies: properties of all of them."""

import copy
from collections import Counter

import fuzzing
import pytest
import tiny
import torch
import zoo
from fuzzing import policy_of
from hypothesis import example
from hypothesis import strategies as st
from transformers import DynamicCache

import kvevict
from kvevict.engine.memory.layer import EvictionLayer

HYBRID = "lfm2", "Lfm2ForCausalLM"  # full attention and convolutions
PRESETS = [name for name in kvevict.PRESETS if "speckv" not in name and name not in ("lookahead", "gate")]
SHARES = [share / 20 for share in range(1, 20)]


OPTIONS = [(option, value) for option, values in dict(
    window=(1, 3, 6), probe=(1, 3, 6, (1, 5), (-5, -1)), n_d=(1, 3), recent=(0, 2, 9), sink=(0, 1, 4),
    keep_first=(0, 1, 4), kernel=(1, 3, 7), pool=("none", "max", "avg"), reduce=("sum", "mean", "max"),
    decode=(True, False), interval=(1, 2, 5), heads=("equal", "flat", "ada"),
    layers=("uniform", "pyramid", "tada", "cake"), select=("token", "chunk"), c=(1, 3, 8), per_head=(True, False),
    warmup_layers=(None, 1, 2, "half"), n_reuse=(1, 2), refine=("none", "caote", "fastcaote", "critical"),
    tsp=(None, 0, "half"), tsp_len=(8, 50), diagnose=(True,), ema_alpha=(0.0, 0.3), append=(True, False), f=(0.0, 0.7),
).items() for value in values]  # fmt: skip
FAMILIES = ("llama", "gemma2", "qwen3", "hybrid")
WHOLE = (None, 4096)  # budgets that all of a prompt fits into; None: just so
BUDGETS = st.one_of(*[st.integers(6, 40), st.sampled_from(SHARES)] * 2, st.sampled_from(WHOLE))
HEADS = ((4, 2), (4, 4), (4, 1), (8, 2))


def make(family, heads, layers, seed):
    """A model of one of four families; another seed has other weights."""
    if family == "hybrid":
        return zoo.make(*HYBRID, seed=seed)
    more = dict(num_hidden_layers=layers) if family != "gemma2" else {}
    return tiny.model(family, seed=seed, num_attention_heads=heads[0], num_key_value_heads=heads[1], **more)


def positions(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


def read(model, inputs, new=3):
    """The last logits of a prompt and of each of `new` greedy tokens after it, the kept slots, and the report."""
    kvevict.history(fuzzing.TASK).reset()
    mask, cache, logits, step = inputs["attention_mask"], DynamicCache(config=model.config), [], inputs["input_ids"]
    reported = None
    for _ in range(new + 1):
        at = positions(mask)[:, -step.shape[1] :]
        out = model(step, attention_mask=mask, position_ids=at, past_key_values=cache, logits_to_keep=1)
        reported = reported or kvevict.report(model, positions=True)
        logits.append(out.logits[:, -1])
        step = out.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(step)], 1)
    return torch.stack(logits, 1), reported["positions"], cache


def sound(model, policy, inputs, kept, cache) -> None:
    """No more slots than the budgets say, and positions that ascend and were seen."""
    layers = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
    held = [layer for layer in kept if layer is not None]
    assert len(held) == len(layers)
    for row, tokens in enumerate(inputs["attention_mask"].sum(1).tolist()):
        heads = [head for layer in held for head in layer[row]]
        assert sum(map(len, heads)) <= min(policy.slots(tokens), tokens) * len(heads)
        for head in heads:
            assert head == sorted(set(head)) and all(0 <= at < tokens for at in head)
        for layer in layers:
            for head in layer.positions()[row]:
                assert head.tolist() == sorted(set(head.tolist())) and bool((head <= tokens + 2).all())
    if policy.decode:  # METHODS section 7
        for row, tokens in enumerate(inputs["attention_mask"].sum(1).tolist()):
            heads = [head for layer in held for head in layer[row]]
            prompt = sum(map(len, heads)) if policy.keep_prompt else 0
            most = prompt + (policy.slots(tokens) + policy.interval - 1) * len(heads)
            assert sum(int(layer.counts[row].sum()) for layer in layers) <= most


def alike(row, a, b, b_row) -> bool:
    """Whether two reads, each (logits, kept, cache), say and keep the same of a row."""
    same = all(x is y is None or x[row] == y[b_row] for x, y in zip(a[1], b[1], strict=True))
    return same and tiny.relative(a[0][row], b[0][b_row]) < 1e-3


def apart(model, inputs, got, row) -> bool:
    """A padded row reads as it does alone."""
    start = int((inputs["attention_mask"][row] == 0).sum())
    return alike(row, got, read(model, {name: x[row : row + 1, start:] for name, x in inputs.items()}), 0)


def in_threads(model, inputs, got, threads) -> bool:
    """Several threads read as one does."""
    torch.set_num_threads(threads)
    try:
        again = read(model, inputs)
    finally:
        torch.set_num_threads(1)
    return all(alike(row, got, again, row) for row in range(len(got[0])))


def stored(model, inputs, cache, path) -> bool:
    """A saved and loaded cache continues as the cache itself."""
    try:
        kvevict.save_cache(cache, path)
    except ValueError:  # a state is not written
        return True
    other = kvevict.load_cache(path, model)
    mask = torch.ones(len(inputs["input_ids"]), cache.get_seq_length() + 1, dtype=torch.long)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    ask = dict(input_ids=mask[:, :1] + 4, attention_mask=mask, position_ids=positions(mask)[:, -1:])
    return torch.equal(model(**ask, past_key_values=copy.deepcopy(cache)).logits,
                       model(**ask, past_key_values=other).logits)  # fmt: skip


def wrong(model, policy, inputs, whole, row, threads, path) -> list:
    """The properties that do not hold; the others, which no tie but for rounding may break, are asserted."""
    plain = model(**inputs | {"position_ids": positions(inputs["attention_mask"])}, logits_to_keep=1).logits
    kvevict.patch(model, policy)
    logits, kept, cache = got = read(model, inputs)
    assert not logits.isnan().any()
    sound(model, policy, inputs, kept, cache)
    found = dict(
        whole=not whole or tiny.relative(logits[:, :1], plain) < 1e-3, apart=apart(model, inputs, got, row),
        threads=threads == 1 or in_threads(model, inputs, got, threads), stored=stored(model, inputs, cache, path),
    )  # fmt: skip
    return [name for name, holds in found.items() if not holds]


@pytest.mark.slow
def test_properties(tmp_path):
    """A tie but for rounding may choose another slot: what fails has to fail with three models of other weights."""
    found = Counter()

    @fuzzing.drawn_by(
        50, preset=st.sampled_from(PRESETS), budget=BUDGETS,
        chunk_size=st.one_of(st.none(), st.integers(1, 40)), options=st.lists(st.sampled_from(OPTIONS), max_size=6),
        family=st.sampled_from(FAMILIES), heads=st.sampled_from(HEADS), layers=st.sampled_from((2, 4)),
        length=st.integers(2, 70), pads=st.lists(st.one_of(st.just(0), st.integers(0, 68)), min_size=1, max_size=3),
        row=st.integers(0, 2), threads=st.sampled_from((1,) * 9 + (2,)),  # 2: slow where others use the cores
    )  # fmt: skip
    @example(  # the prompt that is kept comes on top of the budget
        preset="random/redraw", budget=0.15, chunk_size=None, options=[("interval", 2)], family="llama", heads=(4, 2),
        layers=2, length=7, pads=[0, 0], row=0, threads=1,
    )  # fmt: skip
    @example(  # hypothesis need not draw two threads, not even in 150 cases
        preset="snapkv", budget=12, chunk_size=None, options=[("window", 3)], family="llama", heads=(4, 2), layers=2,
        length=40, pads=[0, 9], row=1, threads=2,
    )  # fmt: skip
    @torch.no_grad()
    def case(preset, budget, chunk_size, options, family, heads, layers, length, pads, row, threads):
        options = dict(options) | dict(budget=length if budget is None else budget, chunk_size=chunk_size)
        options |= {"ids": (5, 6, 7)} if preset == "oracle" else {}
        if whole := budget in WHOLE:
            options |= dict(tsp=None)
        inputs = tiny.prompt(len(pads), length, pad=[min(pad, length - 1) for pad in pads])
        for seed in (1, 2, 3):
            model = make(family, heads, layers, seed)
            if preset == "knorm" and model.config.model_type.startswith("qwen3"):
                return  # its keys are of one length, so that rounding chooses
            if preset.startswith("keydiff") and length == 2:
                return  # both keys are equally far from their mean
            try:
                policy = policy_of(preset, options)
                failed = wrong(model, policy, inputs, whole, row % len(pads), threads, tmp_path / "cache")
            except (ValueError, TypeError) as error:
                assert str(error)
                found["refused"] += 1
                return
            if not failed:
                found.update(read=1, whole=whole, decodes=policy.decode, threads=threads == 2)
                return
        raise AssertionError(f"do not hold: {failed}")

    case()
    print(dict(found))
    fuzzing.expect(+found, "refused", "read", "whole", "threads", "decodes")
