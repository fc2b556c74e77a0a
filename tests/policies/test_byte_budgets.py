"""Budgets in bytes: the slots of a sequence in all layers fit, and one more of each kv head would not."""

import json

import numpy as np
import pytest
import tiny
import torch
from tiny import prompt

import kvevict
from kvevict import cli
from kvevict.engine.hook.installed import plan_of
from kvevict.lab.evaluate.runs import RunSpec, policy_for
from kvevict.models.families import find_decoder
from kvevict.patch import in_slots, slot_bytes
from kvevict.policy.building import build, choose
from kvevict.policy.policy import Policy
from kvevict.serve.errors import Refused
from kvevict.serve.options import Options
from kvevict.serve.policies import Policies

SLOT = 2 * 4 * 32 * 2 * 4  # k and v, float32, head_dim, kv heads, layers of the tiny Llama


@pytest.fixture
def model():
    model = tiny.shared()
    yield model
    kvevict.unpatch(model)


def in_force(model) -> Policy:
    return plan_of(find_decoder(model)).policy


@pytest.mark.parametrize("text, number", [("64KiB", 1 << 16), ("0.1MiB", 104857), ("131 kB", 131000)])
def test_as_many_slots_as_fit(model, text, number):
    kvevict.patch(model, "snapkv", budget=text, window=8, chunk_size=64)
    budget = in_force(model).budget
    assert slot_bytes(model) == SLOT and budget == number // SLOT
    with torch.no_grad():
        model(**prompt(1, 300), logits_to_keep=1)
    assert kvevict.report(model)["cache_bytes"] == budget * SLOT <= number < (budget + 1) * SLOT


@pytest.mark.parametrize("options", [dict(heads="ada"), dict(layers="pyramid"), dict(decode=True, interval=1)])
def test_each_row_of_a_batch_fits(model, options):
    kvevict.patch(model, "snapkv", budget="64KiB", window=8, chunk_size=64, **options)
    ids = torch.randint(3, 97, (2, 300), generator=torch.Generator().manual_seed(0))
    cache = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True).past_key_values
    rows = sum(np.array(layer.counts).sum(1) for layer in cache.layers) * SLOT // (2 * 4)
    assert (rows <= (1 << 16) + (0 if "decode" in options else 3 * SLOT)).all()


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_layers_with_a_window_do_not_count(family):
    model = tiny.shared(family)
    with kvevict.evicting(model, "snapkv", budget="32KiB", window=8), torch.no_grad():
        model(**prompt(1, 200), logits_to_keep=1)
        assert (1 << 15) - slot_bytes(model) < kvevict.report(model)["cache_bytes"] <= 1 << 15


def test_it_is_the_policy_of_so_many_slots(model):
    policy = build("snapkv", budget="64KiB", window=8)
    assert Policy.from_json(policy.to_json()) == policy
    assert in_slots(*choose(policy), model) == build("snapkv", budget=32, window=8)
    kvevict.patch(model, policy)
    assert in_force(model) == build("snapkv", budget=32, window=8)


def test_a_smaller_dtype_holds_more():
    assert slot_bytes(tiny.shared(dtype=torch.bfloat16)) == SLOT // 2


@pytest.mark.parametrize("budget, error, said", [
    ("64", ValueError, "not a number of bytes; write it as in 64MiB"),
    ("64 pounds", ValueError, "not a number of bytes"),
    ("1/16", ValueError, "give a share as a number, such as 1 / 16"),
    ("25%", ValueError, "give a share as a number, such as 1 / 16"), ("64KB", ValueError, "not a number of bytes"),
    ("-1MiB", ValueError, "not a number of bytes"), ("0B", ValueError, "not a number of bytes"),
    ("99999999999TiB", ValueError, "not a number of bytes"),
    ("40KiB", ValueError, "holds 20 slots of each kv head, and this policy needs 33: give budget='66KiB'"),
    (b"64MiB", TypeError, "budget must be an int"),
])  # fmt: skip
def test_budgets_that_are_refused(model, budget, error, said):
    with pytest.raises(error, match=said):
        kvevict.patch(model, "snapkv", budget=budget)


def test_a_policy_without_a_model_has_no_slots():
    with pytest.raises(ValueError, match="for one model alone"):
        build("snapkv", budget="64MiB").slots(100)


def test_plan(tmp_path, capsys):
    config = tiny.shared().config
    config.save_pretrained(tmp_path)
    argv = ["plan", "--model", str(tmp_path), "--dtype", "float32", "--tokens", "400", "--policy", "snapkv:window=8"]
    assert cli.main([*argv, "--budget", "64KiB"]) == 0
    out = capsys.readouterr().out
    assert "A budget of 64KiB is 32 slots of each kv head." in out
    run = json.loads(out.splitlines()[-1])["runs"]["snapkv:window=8"]
    assert run["cache_bytes"] == 1 << 16


def test_eval(model):
    run = RunSpec("snapkv", "64KiB", 64, "later")
    policy = policy_for(run, 300, (), model=model).policy
    assert (policy.budget, policy.rows.window) == (32, 16)  # at most half of the budget
    assert policy_for(run, 300, ()).policy.budget == "64KiB"


def test_a_server_s_budget(model):
    options = Options(policy="snapkv:window=8", budget="64KiB")
    policies = Policies(options, context=4096, fitted=lambda *each: in_slots(*each, model))
    assert policies.of({}, False).budget == 32
    assert policies.of({"budget": "40KiB", "policy": "streaming"}, False).budget == 20
    with pytest.raises(Exception, match="larger than the server's"):
        policies.of({"budget": "128KiB"}, False)
    with pytest.raises(Refused, match="not a number of bytes"):
        policies.of({"budget": "much"}, False)
