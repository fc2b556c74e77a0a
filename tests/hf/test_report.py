"""What `kvevict.report` says of a question, of the slots of now, and of an archive's bytes and place."""

import warnings

import pytest
import tiny
import torch
from tiny import prompt, shared
from transformers import AutoModelForCausalLM

import kvevict
import kvevict.cautions

TEXT = "The harbour opens at seven. The lantern is lit at nine, says the old man by the door. " * 4
ASKED = "When is the lantern lit?"
TAKE = dict(budget=150, probe=8, chunk_size=128)


@pytest.fixture
def fresh(monkeypatch):
    """No warning was given before."""
    monkeypatch.setattr(kvevict.cautions, "_given", set())


@pytest.fixture(scope="module")
def net():
    return tiny.model(vocab_size=259, bos_token_id=None, pad_token_id=None)


def ids_of(text):
    return torch.tensor([tiny.byte_tokenizer()(text)["input_ids"]])


def question(net, ids, policy="take", asked=None, **options):
    """The report's entry after a prompt."""
    with kvevict.evicting(net, policy, **TAKE | options), torch.no_grad():
        if asked is None:
            net(ids, logits_to_keep=1)
        else:
            with asked:
                net(ids, logits_to_keep=1)
        return kvevict.report(net)["question"]


def test_how_a_question_was_found(net):
    tok, chat = tiny.byte_tokenizer(), tiny.chat_tokenizer()
    ids, words = ids_of(f"{TEXT}\n\n{ASKED}"), dict(text=ASKED, tokens=len(ASKED))
    start = ids.shape[1] - len(ASKED)
    spans = [(start, start + len(ASKED))]
    assert question(net, ids, tokenizer=tok) == [words | dict(found="prompt")]
    turn = chat.apply_chat_template([dict(role="user", content=f"{TEXT}\n\n{ASKED}")], add_generation_prompt=True)
    assert question(net, torch.tensor([turn["input_ids"]]), tokenizer=chat)[0] == words | dict(found="template")
    for tokenizer in (tok, False):
        for given, text in ((kvevict.observing(ASKED, tok), ASKED), (kvevict.observing(spans), None),
                            (kvevict.observing(spans, tok), ASKED)):  # fmt: skip
            want = words | dict(text=text, found="named")
            assert question(net, ids, asked=given, tokenizer=tokenizer) == [want]
    assert question(net, ids, tokenizer=False) == [dict(text=None, tokens=8, found="last tokens")]
    bare = ids_of(TEXT * 2)  # its last turn asks nothing
    assert question(net, bare, tokenizer=tok) == [dict(text=(TEXT * 2)[-8:], tokens=8, found="last tokens")]
    assert question(net, bare[:, :10], tokenizer=False) == [dict(text=None, tokens=5, found="last tokens")]
    with kvevict.evicting(net, "snapkv", budget=60, window=8, tokenizer=tok):
        net(ids)
        assert kvevict.report(net)["question"] is None


def test_rows_of_a_batch(net):
    tok, texts = tiny.byte_tokenizer(), [f"{TEXT}\n\n{ASKED}", (TEXT * 2)[: len(TEXT) + 26]]
    ids = torch.cat([ids_of(text) for text in texts])
    found = question(net, ids, tokenizer=tok)
    assert [each["found"] for each in found] == ["prompt", "last tokens"] and found[0]["text"] == ASKED


def warned(net, ids, **options):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        question(net, ids, **options)
    return [str(each.message) for each in found if "question" in str(each.message)]


def test_a_question_that_is_not_found_is_told(net, tmp_path, fresh):
    """Once for a reason, with the folder; not where nothing is evicted, where the question is named, or where the
    caller said so."""
    folder = tiny.save(tmp_path / "bare", seed=1)[0]
    for path in (tmp_path / "bare").glob("tokenizer*"):
        path.unlink()
    loaded, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), ids_of(f"{TEXT}\n\n{ASKED}")
    for options in (dict(budget=1000), dict(tokenizer=False), dict(asked=kvevict.observing((3, 9)))):
        assert not warned(loaded, ids, **options)
    (said,) = warned(loaded, ids)
    assert said.startswith(f"{folder} has no tokenizer that loads, so the prompt's last 8 tokens choose the slots")
    assert not warned(loaded, ids)
    assert warned(net, ids)[0].startswith("the model was not loaded from a folder, so")
    assert not warned(net, ids, tokenizer=tiny.byte_tokenizer())
    (said,) = warned(net, ids_of(TEXT * 2), tokenizer=tiny.byte_tokenizer())
    assert said.startswith("no question that fits a chunk was found in a prompt, so")


@pytest.mark.parametrize("policy, options", [
    ("h2o", dict(budget=20, interval=16)), ("snapkv", dict(budget=40, window=8)), ("random/redraw", dict(budget=70)),
])  # fmt: skip
def test_slots_of_now(policy, options):
    """After decoding, of the cache where it is given, else of the model's last token, even if the cache is gone. Two of
    the policies evict while decoding."""
    model, inputs = shared(), prompt(1, 48)
    with kvevict.evicting(model, policy, **options):
        for new in (1, 2, 90):
            out = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True)
            cache = out.past_key_values
            now = [layer.counts.tolist() for layer in cache.layers]
            assert kvevict.report(cache)["stored"] == kvevict.report(model)["stored"] == now
            read = kvevict.report(model)["kept"]
            assert new == 1 or now != read
            del out, cache
            assert kvevict.report(model)["stored"] == now and kvevict.report(model)["kept"] == read


def test_slots_of_a_fork():
    model, inputs = shared(), prompt(1, 48)
    with kvevict.evicting(model, "snapkv", budget=24, window=8), torch.no_grad():
        cache = model(**inputs, logits_to_keep=1).past_key_values
        fork = cache.fork()
        for _ in range(3):
            model(inputs["input_ids"][:, :1], past_key_values=fork)
    assert kvevict.report(cache)["stored"] == [[[24, 24]]] * 4
    assert kvevict.report(fork)["stored"] == [[[27, 27]]] * 4


def test_slots_after_candidates_were_removed():
    model, inputs = shared(), prompt(1, 60)
    with kvevict.evicting(model, "snapkv", budget=24, window=8):
        options = dict(max_new_tokens=12, min_new_tokens=12, prompt_lookup_num_tokens=4)
        cache = model.generate(**inputs, **options, return_dict_in_generate=True).past_key_values
        now = [layer.counts.tolist() for layer in cache.layers]
        assert kvevict.report(cache)["stored"] == kvevict.report(model)["stored"] == now


def test_bytes_of_an_archive_that_was_loaded(tmp_path):
    """An archive grows by its tokens' slots alone, in memory, in a folder and behind a file."""
    model, options = shared(), dict(budget=24, window=8, recall_after=0)
    slot = 4 * 2 * (2 * 32 * 4 + 4)  # layers, heads; key and value in float32, position
    for recall in (True, str(tmp_path)):
        with kvevict.evicting(model, "snapkv", recall=recall, **options), torch.no_grad():
            cache = model(**prompt(1, 90), logits_to_keep=1).past_key_values
            for turn in range(3):
                seen = 90 + 20 * turn
                assert kvevict.report(cache)["archive_bytes"] == seen * slot
                assert kvevict.report(cache)["archive_in"].split(", ")[-1] == ("cpu" if recall is True else recall)
                if turn == 0:
                    kvevict.save_cache(cache, tmp_path / "text.safetensors")
                    cache = kvevict.load_cache(tmp_path / "text.safetensors", model)
                model(prompt(1, 20, seed=turn)["input_ids"], past_key_values=cache, logits_to_keep=1)
            assert kvevict.report(cache)["archive_in"].split(", ")[0] == str(tmp_path / "text.safetensors")
            assert kvevict.report(cache)["recalled"] is not None
