"""Checked answers (`recall_check`): chosen slots draft an answer's tokens, and one call over all slots checks them."""

import math

import pytest
import torch
import zoo
from recalling import OTHERS, SNAPKV, every
from tiny import byte_tokenizer, generate, model, prompt, relative, shared, word_tokenizer
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import kvevict
from kvevict.answering.answer import continued, rows_of
from kvevict.answering.writing import Sampling
from kvevict.answering.writing import written as written_after
from kvevict.context import within
from kvevict.engine.hook import ahead
from kvevict.engine.memory import host
from kvevict.engine.memory.storage import Storage
from kvevict.models.compat import CACHE
from kvevict.policy.building import build

CHECKED = SNAPKV | dict(recall_after=None, recall_check=8, chunk_size=None)  # reads the tests' prompts in one chunk
CHOSEN = CHECKED | dict(recall_check=None, recall_after=0)
POLICIES = {
    "snapkv": {},
    "take+edie": dict(policy="take+edie", window=None, kernel=None, probe=4, tokenizer=False),
    "ada": dict(policy="adakv"),
    "cake": dict(policy="cake"),
    "take": dict(policy="take", window=None, kernel=None, probe=4, tokenizer=False),
    "more slots": dict(recall_slots=48),
    "compiled": dict(compiled=True),
    "long drafts": dict(recall_check=20),
}
NEW = 43  # tokens of an answer: no multiple of `recall_check`
VARIED = dict(no_repeat_ngram_size=2)  # else random models repeat one token

pytestmark = pytest.mark.usefixtures("no_grad")


def options(name, **more):
    return {key: value for key, value in (CHECKED | POLICIES[name] | more).items() if value is not None}


def written(net, given, inputs, new=NEW, **more):
    """The tokens of `generate` under a policy (None: unpatched), and the report of checks."""
    if given is None:
        return generate(net, inputs, new, **more), None
    with kvevict.evicting(net, **{name: value for name, value in given.items() if value is not None}):
        return generate(net, inputs, new, **more), kvevict.report(net)["checked"]


@pytest.mark.parametrize("place", ["device", "files", "host"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.drawn(9)
def test_tokens_are_the_unpatched_model_s(name, place, tmp_path, monkeypatch):
    """Of two rows of different length, wherever the archive lies; with chosen slots alone they are not."""
    if place == "host":
        monkeypatch.setattr(host, "is_away", lambda device: True)
    net, inputs = shared(), prompt(2, 150, pad=(0, 11))
    where = dict(device=True, files=str(tmp_path), host="memory")[place]
    want, _ = written(net, None, inputs, **VARIED)
    got, told = written(net, options(name, recall=where), inputs, **VARIED)
    assert torch.equal(got, want)
    assert 0 < told["replaced"] < told["tokens"] and (NEW - 1) / 20 <= told["calls"] < NEW
    chosen, none = written(net, options(name, recall_check=None, recall_after=0), inputs, **VARIED)
    assert not torch.equal(chosen, want) and none is None


def types():
    wanted = "qwen2", "mistral", "phi3", *OTHERS
    return [pytest.param(*each, id=each[0]) for each in zoo.types() if each[0] in wanted]


@pytest.mark.parametrize("name, kind", types())
def test_other_models(name, kind, tmp_path):
    """Windows, latents and sinks are checked; layers with a state are refused by name."""
    net, inputs = zoo.make(name, kind), prompt(1, 90)
    given = options("snapkv", recall=str(tmp_path))
    if name in ("qwen3_next", "falcon_h1"):
        with pytest.raises(ValueError, match=rf"recall_check=8: .* layers with a state \({name}\)"):
            kvevict.patch(net, **given)
        return
    want, _ = written(net, None, inputs, eos_token_id=None, **VARIED)
    got, told = written(net, given, inputs, eos_token_id=None, **VARIED)
    assert torch.equal(got, want)
    assert told["calls"] < NEW


class Streamed(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.append(value.flatten().tolist())

    def end(self):
        self.tokens.append("end")


@pytest.mark.parametrize("more", [
    dict(do_sample=True), dict(do_sample=True, temperature=0.7, top_k=5), dict(do_sample=True, num_return_sequences=2),
    dict(repetition_penalty=1.5, no_repeat_ngram_size=3), dict(eos_token_id=[*range(3, 12)], pad_token_id=0),
    dict(do_sample=True, eos_token_id=[*range(3, 9)]), dict(new=1), dict(new=2), dict(new=9),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 3])
def test_every_way_to_choose_tokens(rows, more, tmp_path):
    """Greedy or drawn, with processors, ends and limits: the tokens, what a streamer is given, and the random numbers
    that were drawn are the unpatched model's."""
    net, inputs, found = shared(), prompt(rows, 150, pad=(0, 11, 40)), []
    for given in (None, options("snapkv", recall=str(tmp_path))):
        torch.manual_seed(5)
        streamer = Streamed() if rows == 1 and "num_return_sequences" not in more else None
        tokens, _ = written(net, given, inputs, **dict(streamer=streamer) | more)
        found.append((tokens.tolist(), streamer and streamer.tokens, torch.rand(2).tolist()))
    assert found[0] == found[1]


def test_stop_strings_and_scores():
    words, net = byte_tokenizer(), model(vocab_size=256, bos_token_id=None, pad_token_id=None)
    inputs = words("The rain fell, and the boats went out. " * 5, return_tensors="pt")
    whole = written(net, None, inputs, **VARIED)[0][0].tolist()
    letters = [words.decode([token]) for token in whole]
    last = next(at for at in range(9, NEW) if letters[at] not in letters[:at] and letters[at].isascii())
    got, _ = written(net, CHECKED, inputs, stop_strings=letters[last], tokenizer=words, **VARIED)
    assert got[0].tolist() == whole[: last + 1]
    told = dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_scores=True)
    one = net.generate(**inputs, **told)
    with kvevict.evicting(net, **{name: value for name, value in CHECKED.items() if value is not None}):
        other = net.generate(**inputs, **told)
        with pytest.raises(ValueError, match="leave output_hidden_states out"):
            net.generate(**inputs, **told, output_hidden_states=True)
    assert len(one.scores) == len(other.scores) == NEW
    assert relative(torch.stack(one.scores), torch.stack(other.scores)) < 1e-5


@pytest.mark.parametrize("more", [
    {}, dict(temperature=1.0, sampling_seed=3), dict(temperature=0.8, top_p=0.9), dict(one_line=True),
    dict(temperature=1.0, batch_size=1),
], ids=str)  # fmt: skip
def test_answers(more, tmp_path):
    """Of questions whose answers end at different places, about a cache and about its file."""
    words, net, given, said = word_tokenizer(), model(), dict(window=4, recall=True), []
    net.generation_config.eos_token_id = [*range(3, 12)]
    text, more = words.decode(prompt(1, 150)["input_ids"][0]), more | dict(max_new_tokens=45)
    questions = [" ".join(f"w{at * at % 90 + 3}" for at in range(number)) for number in (3, 5, 9)]
    whole = kvevict.read(net, words, text, "snapkv", budget=4096, **given)
    want = kvevict.answer(net, words, whole, questions, **more)
    assert len({len(each.split()) for each in want}) > 1 or "temperature" not in more
    cache = kvevict.read(net, words, text, "snapkv", budget=40, **given | dict(recall=str(tmp_path)), recall_check=7)
    kvevict.save_cache(cache, tmp_path / "text")
    for each in (cache, kvevict.load_cache(tmp_path / "text", net)):
        said.append(kvevict.answer(net, words, each, questions, **more))
    assert said == [want, want]
    told = kvevict.report(cache)["checked"]
    assert told["tokens"] > told["calls"] > 1


def test_the_cache_holds_the_answer(tmp_path):
    """Its tokens and no more, in slots and in the archive, with keys and values as of all slots; the next turn goes on
    from them, and the report is still of the prompt."""
    net, ids = shared(), prompt(1, 150)["input_ids"]
    outs = []
    for given in (CHECKED | dict(budget=4096, recall_check=None), CHECKED | dict(recall=str(tmp_path))):
        with kvevict.evicting(net, **{name: value for name, value in given.items() if value is not None}):
            cache = DynamicCache(config=net.config)
            first = net.generate(ids, max_new_tokens=NEW, do_sample=False, **{CACHE: cache})
            assert cache.get_seq_length() == 150 + NEW - 1
            assert kvevict.report(cache)["seen"] == [150] and kvevict.report(net)["seen"] == [150]
            cache.tiers.append_last()
            held = [layer.dense(part) for layer in every(cache) for part in ("k", "v")]
            turn = torch.cat([first, prompt(1, 20, seed=2)["input_ids"]], 1)
            outs.append((net.generate(turn, max_new_tokens=NEW, do_sample=False, **{CACHE: cache}), held))
    assert torch.equal(outs[0][0], outs[1][0])
    for one, other in zip(outs[0][1], outs[1][1], strict=True):
        assert one.shape == other.shape and relative(one, other) < 1e-5


def test_rows_of_different_length_have_their_positions():
    """Of questions that are answered together, after a replaced token, too."""
    words, net, found = word_tokenizer(), shared(), []
    ids = [prompt(1, length, seed=length)["input_ids"][0].tolist() for length in (20, 3, 9)]
    for given in (dict(budget=4096, recall_check=None), {}):
        with kvevict.evicting(net, **{name: value for name, value in (CHECKED | given).items() if value is not None}):
            cache = rows_of(net(**prompt(1, 150), logits_to_keep=1).past_key_values, 3)
            choosers = [Sampling(temperature=1.0, seed=seed).chooser() for seed in range(3)]
            tokens = written_after(net, words, continued(net, cache, ids), cache, [NEW] * 3, choosers)
        cache.tiers.append_last()
        found.append((tokens, [layer.dense("k") for layer in every(cache)], kvevict.report(cache)["checked"]))
    assert found[0][0] == found[1][0]
    assert found[1][2]["replaced"] > 3
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one.shape == other.shape and relative(one, other) < 1e-5


def test_one_call_for_each_block():
    """If no token is replaced, each layer's archive passes by once for each `recall_check` tokens."""
    told = written(shared(), CHECKED | dict(budget=148), prompt(1, 150))[1]
    assert told["replaced"] == 0 and told["calls"] == math.ceil((NEW - 1) / 8)


def test_copies_of_two_layers_at_once(monkeypatch):
    """An archive on the host is copied to the device layer by layer."""
    monkeypatch.setattr(host, "is_away", lambda device: True)
    copied, alive, most = Storage._copied, [], []

    def noted(far, capacity):
        coming = copied(far, capacity)
        alive.append(coming._slots.k.untyped_storage()._weak_ref())
        most.append(sum(not torch.UntypedStorage._expired(each) for each in alive))
        return coming

    monkeypatch.setattr(Storage, "_copied", noted)
    told = written(shared(), CHECKED | dict(recall="memory"), prompt(1, 150))[1]
    assert len(most) >= 4 * told["calls"] and max(most) <= 2


@pytest.mark.parametrize("at", [0, 1, 5, 12])
def test_an_error_while_tokens_are_drafted(at):
    """Leaves the tokens that were written, and the cache goes on."""
    net, ids, calls = shared(), prompt(1, 150)["input_ids"], []

    def fails(ids, scores):
        calls.append(ids.shape[1])
        if len(calls) == at + 2:
            raise KeyError
        return scores

    with kvevict.evicting(net, **{name: value for name, value in CHECKED.items() if value is not None}):
        cache = DynamicCache(config=net.config)
        given = dict(max_new_tokens=NEW, do_sample=False, **{CACHE: cache})
        with pytest.raises(KeyError):
            net.generate(ids, **given, logits_processor=LogitsProcessorList([fails]))
        held = cache.get_seq_length()
        assert 150 <= held <= max(calls) and not cache.sequence.half_read
        want, _ = written(net, None, dict(input_ids=ids))
        rest = torch.cat([ids, want[:, : held + 1 - 150]], 1)
        assert torch.equal(
            net.generate(rest, **given | dict(max_new_tokens=3))[:, -3:], want[:, held + 1 - 150 :][:, :3]
        )


def test_rows_that_have_all_slots_are_not_checked():
    net, inputs = shared(), prompt(1, 150)
    assert written(net, CHECKED | dict(budget=4096), inputs)[1] is None
    with within(ahead=ahead.Ahead(8, None, None)), kvevict.evicting(net, "snapkv", budget=24, window=4):
        out = net(**inputs)
        net(torch.tensor([[5]]), **{CACHE: out.past_key_values})  # without an archive nothing can be checked


@pytest.mark.parametrize("given, message", [
    (dict(recall=False), "recall_check=8 is about recall"),
    (dict(recall_after=4), "recall_check=8: answers are checked from their first token on"),
    (dict(decode=True), "recall_check=8: .*decode=False"),
    (dict(policy="laq", kernel=None), "recall_check=8: this policy drafts"),
    (dict(chunk_size=7), "recall_check=8: .*chunk_size=7"),
    (dict(budget=8), "budget=8 is too small"),
    (dict(recall_slots=8), "recall_slots: budget=8 is too small"),
    (dict(recall_check=1), "recall_check must be at least 2"),
    (dict(recall_check=True), "recall_check must be a whole number"),
    (dict(recall_check=2.5), "recall_check must be a whole number"),
])  # fmt: skip
def test_refused_policies(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build(**{name: value for name, value in (CHECKED | given).items() if value is not None})


def test_refused_calls():
    net, inputs = shared(), prompt(1, 150)
    with pytest.raises(ValueError, match="num_beams=2: recall_check checks greedy and sampled answers alone"):
        written(net, CHECKED, inputs, num_beams=2)
    with pytest.raises(ValueError, match="recall_check drafts with the model itself"):
        written(net, CHECKED, inputs, prompt_lookup_num_tokens=3)
