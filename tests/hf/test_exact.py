"""budget=1.0: nothing is evicted, and tokens are the unpatched model's."""

import json

import pytest
import torch
from serving import TEXT, Client, asks, said, server, unpatched  # noqa: F401
from serving import model as bundled
from tiny import generate, prompt, save, shared

import kvevict
from kvevict.cli import main
from kvevict.policy.building import build
from kvevict.policy.checks import PLENTY

NEW = 24


@pytest.mark.parametrize("policy, options", [
    ("take+edie", {}), ("take", dict(probe=4)), ("snapkv", dict(window=8)), ("h2o", {}), ("kvzip", {}),
    ("tova", dict(decode=True)), ("take+edie", dict(recall=True)),
])  # fmt: skip
def test_generate(policy, options):
    """Read in chunks, of unequal rows, evicting while decoding too: as many slots as tokens."""
    net, inputs = shared(), prompt(2, 90, pad=(0, 9))
    want = generate(net, inputs, NEW)
    with kvevict.evicting(net, policy, budget=1.0, chunk_size=40, tokenizer=False, **options):
        output = net.generate(**inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(output.sequences[:, 90:], want)
    for layer in output.past_key_values.layers:
        assert layer.counts.tolist() == [[90 + NEW - 1] * net.config.num_key_value_heads, [81 + NEW - 1] * 2]


def test_all_is_the_float_alone():
    """1 is one slot, and the default is not all."""
    assert build("snapkv", budget=1.0).slots(7) == PLENTY > build("snapkv").slots(7)
    assert build("snapkv", budget=1.0) == build("snapkv:budget=1.0") != build("snapkv", budget=PLENTY)
    with pytest.raises(ValueError, match=r"budget=1 is too small.* \(1.0 keeps all slots\)"):
        build("snapkv", budget=1)


def test_commands(tmp_path, capsys):
    folder, _ = save(tmp_path / "model")
    (tmp_path / "text").write_text("What is kept of this? " * 50)
    words = ["--model", folder, "--budget", "1.0", "--chunk-size", "300"]
    asked = ["generate", "--file", str(tmp_path / "text"), "--max-new-tokens", "9", "--compare", "Who?"]
    assert main([*asked, *words]) == 0
    runs = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert runs["take+edie"]["answer"] == runs["unpatched"]["answer"]
    assert runs["take+edie"]["report"]["kept_share"] == [1]
    assert main(["plan", *words, "--tokens", "900", "--new-tokens", "5"]) == 0
    plans = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    for key in ("cache_bytes", "decode"):
        assert plans["take+edie"][key] == plans["unpatched"][key]


def test_server():
    """The pools hold a prompt as long as the model's context."""
    client = Client(server(policy="take+edie", budget=1.0))
    ids = client.server.tokenizer(f"{TEXT}\n\n{asks('Orshan')}\nAnswer:", return_tensors="pt")
    response = client.chat(f"{TEXT}\n\n{asks('Orshan')}")
    kvevict.unpatch(bundled())
    want = bundled().generate(**ids, max_new_tokens=12)[0, ids.input_ids.shape[1] :]
    assert said(response) == client.server.tokenizer.decode(want)
    assert client.chat("Who?", kvevict=dict(budget=64)).status_code == 200


@pytest.mark.parametrize("tokens", [30, 90])  # in one chunk, in several
def test_an_archive_takes_no_second_memory(tokens):
    """Each layer attends to the archive's tensors, and decoded tokens do not change the archive."""
    with kvevict.evicting(shared(), "take+edie", budget=1.0, chunk_size=40, recall=True, tokenizer=False):
        cache = shared()(prompt(1, tokens)["input_ids"], logits_to_keep=1).past_key_values
        archived = {x.untyped_storage().data_ptr() for x in cache.tiers.tensors()}
        assert archived and all(
            x.untyped_storage().data_ptr() in archived for layer in cache.layers for x in layer.storage.tensors()[:2]
        )
        fork = cache.fork()
        shared()(prompt(1, 1, seed=1)["input_ids"], past_key_values=fork)
    assert fork.layers[0].counts.max() == tokens + 1 and cache.layers[0].counts.max() == tokens
