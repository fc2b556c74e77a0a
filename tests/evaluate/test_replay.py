"""Runs that share their reads give the lines of runs that do not, and compute a prompt once."""

from collections import Counter

import pytest
import torch
from test_eval import tokenizer
from tiny import model as tiny_model

import kvevict
from kvevict import families
from kvevict.engine.hook.replay import Replay
from kvevict.lab.evaluate.results import read
from kvevict.lab.evaluate.run import Plan, evaluate
from kvevict.policy.layers import tada

POLICIES = (
    "snapkv", "h2o", "tova", "adakv", "edie", "edie+tada", "edie+tada:cd=layer", "take", "laq", "fastkv:tsp_len=64",
    "cake", "chunkkv:n_reuse=2", "pyramidkv", "oracle", "snapkv+caote", "paasvn", "random",
)  # fmt: skip


def lines_of(net, tmp_path, plan, **options):
    tada._histories.clear()
    evaluate(net, tokenizer(), plan, tmp_path / f"{len(options)}.jsonl", **options)
    lines = read(tmp_path / f"{len(options)}.jsonl")[1]
    seconds = [line.pop("read_seconds") for line in lines]
    return [{k: v for k, v in line.items() if k != "decode_seconds"} for line in lines], seconds


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "gpt_oss"])
@pytest.mark.drawn(2)
def test_lines_are_the_same(tmp_path, family):
    net = tiny_model(family)
    policies = POLICIES if family == "llama" else ("snapkv", "h2o", "edie+tada", "laq")
    plan = Plan(("toy",), (120,), policies, (24,), (None, 40), cases=1)
    alone, _ = lines_of(net, tmp_path, plan)
    shared, seconds = lines_of(net, tmp_path, plan, share_reads=True)
    assert shared == alone
    assert all((s is None) == (line["policy"] != "full") for s, line in zip(seconds, shared, strict=True))
    assert all("forward" not in layer.__dict__ for layer in net.model.layers)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_is_computed_once(tmp_path, family):
    net, calls = tiny_model(family), Counter()
    for index, layer in enumerate(net.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda _, args, index=index: calls.update([index] * (args[0].shape[1] > 100))
        )
    plan = Plan(("toy",), (120,), ("snapkv", "h2o", "edie+tada", "adakv"), (16, 24), (None,), ("aware",), cases=1)
    lines_of(net, tmp_path, plan, share_reads=True)
    evicts = [kind == families.FULL_ATTENTION for kind in families.layer_kinds(net.config)]
    # Unpatched, patched, and once more where TADA measures inside layers that evict.
    assert [calls[index] for index in range(len(evicts))] == [2 + own for own in evicts]


def test_rows_along_are_told_apart():
    """Probes of other lengths after the same chunk, and adapters that differ in their LoRA only."""
    net, adapters = tiny_model(), [kvevict.lookahead.Adapter(net, tokens=4) for net in [tiny_model()] * 2]
    for made in adapters:
        for name, weight in made.named_parameters():
            torch.nn.init.normal_(weight) if "layers" in name else torch.nn.init.ones_(weight)
    ids = torch.randint(3, 90, (2, 120))
    policies = [("take", dict(probe=n, chunk_size=40)) for n in (4, 8)]
    policies += [("lookahead", dict(adapter=made)) for made in adapters]
    replay = Replay(net.model, most=4)

    def kept(name, options):
        with kvevict.evicting(net, name, budget=24, **options), torch.no_grad():
            net(ids, logits_to_keep=1)
            return kvevict.report(net, positions=True)["positions"]

    alone = [kept(*policy) for policy in policies]
    with replay.during():
        assert [kept(*policy) for policy in policies * 2] == alone * 2
    assert alone[2] != alone[3]
