"""`kvevict.Chat`: turns equal the unpatched model's where nothing is lost, and a chat is whole after every end."""

import json
import warnings

import pytest
import templates
import torch
from tiny import byte_tokenizer, chat_tokenizer, model

import kvevict

ENDS = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
TURNS = ("Tell me about the rain and the sea, and all the boats.", "Why?", "And then, in the end?")
OPTIONS = dict(budget=4096, chunk_size=40)  # holds everything
NEW = dict(max_new_tokens=7, do_sample=False)


@pytest.fixture(scope="module")
def words():
    made = byte_tokenizer()
    made.add_special_tokens(ENDS)
    made.chat_template = templates.QWEN
    return made


@pytest.fixture(scope="module")
def net():
    return model(vocab_size=258, bos_token_id=None, pad_token_id=None)


def unpatched(net, words, turns):
    """Answers of the unpatched model, each turn after the tokens of those before."""
    ids, said = [], []
    before = "<|im_start|>system\nYou answer. Do you? Yes.<|im_end|>\n"
    for turn in turns:
        ids += words(f"{before}<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        written = net.generate(torch.tensor([ids]), **NEW)[0, len(ids) :].tolist()
        ids += written
        said.append(words.decode(written, skip_special_tokens=True).strip())
        before = "<|im_end|>\n"
    return said, ids


@pytest.mark.quick
@pytest.mark.parametrize("recall", [True, False])
def test_turns_equal_the_unpatched_models(net, words, recall):
    chat = kvevict.Chat(net, words, **OPTIONS, recall=recall)
    said = [chat.ask(turn, **NEW) for turn in TURNS]
    assert [each["role"] for each in chat.messages] == ["user", "assistant"] * 3
    assert [each["content"] for each in chat.messages[1::2]] == said
    assert kvevict.report(chat.cache)["kept_share"] == [1]
    with pytest.raises(ValueError, match="not patched"):
        kvevict.report(net)
    if recall:  # otherwise an answer's text is split into tokens anew
        want, ids = unpatched(net, words, TURNS)
        assert said == want and chat._ids == ids
        assert chat.cache.get_seq_length() == len(ids) - 1
    else:
        assert said[0] == unpatched(net, words, TURNS[:1])[0][0]


def test_a_turn_reads_its_own_tokens_and_recalls_all(net, words):
    chat = kvevict.Chat(net, words, budget=72, chunk_size=40, system="Be brief.", recall_after=16)
    for turn in TURNS:
        chat.ask(turn, max_new_tokens=20)  # an answer's first 16 tokens attend to all slots
    report, tokens = kvevict.report(chat.cache), chat.cache.get_seq_length()
    assert chat.cache.layers[0].counts.max() < tokens and tokens == len(chat._ids) - 1
    assert report["archive_bytes"] >= report["full_cache_bytes"] > 0
    chat.ask("", max_new_tokens=1)
    assert chat.cache.get_seq_length() < tokens + 64


def test_the_question_of_an_answer_is_found(net, words, monkeypatch):
    """A question that `answer` asks goes on inside the user's turn that the text opened."""
    monkeypatch.setattr(kvevict.cautions, "_given", set())
    cache = kvevict.read(net, words, "The sea is loud. " * 20, budget=160, chunk_size=64, recall=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kvevict.answer(net, words, cache, ["I sail. How loud is it?"], max_new_tokens=2)
    with kvevict.evicting(net, "take+edie", budget=160, chunk_size=64, recall=True, tokenizer=words), torch.no_grad():
        for turn, found in [
            ("\n\nI sail. How loud is it?<|im_end|>\n<|im_start|>assistant\n", "How loud is it?"),
            ("<|im_end|>\n<|im_start|>tool\nIs it?<|im_end|>\n<|im_start|>assistant\n", None),
            ("\n\nI sail. How loud is it?", None),
        ]:
            net(torch.tensor([words(turn)["input_ids"]]), past_key_values=cache.fork(), logits_to_keep=1)
            (question,) = kvevict.report(net)["question"]
            assert (question["text"] if question["found"] == "template" else None) == found


def test_a_stream_has_the_answer(net, words):
    chat, other = (kvevict.Chat(net, words, **OPTIONS) for _ in range(2))
    assert "".join(chat.stream(TURNS[0], **NEW)).strip() == other.ask(TURNS[0], **NEW)
    assert chat.messages == other.messages and chat._ids == other._ids
    stream = chat.stream(TURNS[1], max_new_tokens=2000)
    next(stream)
    stream.close()
    assert len(chat.messages) == 4 and chat.cache.get_seq_length() < 2000
    assert chat.ask(TURNS[2], **NEW) == chat.messages[-1]["content"]


def test_forks_and_files(net, words, tmp_path):
    chat = kvevict.Chat(net, words, **OPTIONS, system="Be brief.")
    with pytest.raises(ValueError, match="ask first"):
        chat.save(tmp_path / "chat.safetensors")
    chat.ask(TURNS[0], **NEW)
    fork = chat.fork()
    chat.save(tmp_path / "chat.safetensors")
    loaded = kvevict.Chat.load(tmp_path / "chat.safetensors", net, words)
    want = chat.ask(TURNS[1], **NEW)
    assert len(fork.messages) == 3 and fork.ask(TURNS[1], **NEW) == want
    assert loaded.ask(TURNS[1], **NEW) == want and loaded.messages == chat.messages
    loaded.save(tmp_path / "chat.safetensors")  # in place of the file that it came from
    assert kvevict.Chat.load(tmp_path / "chat.safetensors", net, words).messages == chat.messages


def test_tools_and_their_results(net, words):
    tools = [dict(type="function", function=dict(name="look", description="", parameters={}))]
    chat = kvevict.Chat(net, words, **OPTIONS, tools=tools)
    chat.ask(TURNS[0], **NEW)
    assert json.dumps(tools[0]["function"]["name"]) in words.decode(chat._ids)
    chat.ask([dict(role="tool", content="42"), dict(role="tool", content="43")], **NEW)
    assert "<tool_response>\n43" in words.decode(chat._ids)


def test_what_fails_leaves_the_chat_as_it_was(net, words):
    chat = kvevict.Chat(net, words, **OPTIONS)
    chat.ask(TURNS[0], **NEW)
    before = [*chat.messages], [*chat._ids], chat.cache, chat.cache.get_seq_length()
    for message, error, match in (
        (3, TypeError, "message must be"),
        (dict(content="no role"), TypeError, "message must be"),
        (dict(role="tool"), ValueError, "refuses this chat"),
        ("\u0001", ValueError, "chat template does not give"),
        ("x" * 4096, ValueError, "the model's context is 4096"),
    ):
        with pytest.raises(error, match=match):
            chat.ask(message, **NEW)
    with pytest.raises(ValueError, match="unknown_option"):
        chat.ask("x", unknown_option=1)
    with pytest.raises(ValueError, match="unknown_option"):
        list(chat.stream("x", unknown_option=1))
    assert (chat.messages, chat._ids, chat.cache, chat.cache.get_seq_length()) == before


def test_refusals(net, words, tmp_path):
    with pytest.raises(ValueError, match="no chat template"):
        kvevict.Chat(net, byte_tokenizer(), budget=64)
    with pytest.raises(TypeError, match="tokenizer"):
        kvevict.Chat(net, None, budget=64)
    with pytest.raises(ValueError, match="budget"):
        kvevict.Chat(net, words, budget=1)
    cache = kvevict.read(net, chat_tokenizer(), "The rain. " * 9, budget=64, recall=True)
    kvevict.save_cache(cache, tmp_path / "text.safetensors")
    with pytest.raises(ValueError, match="no chat: read it with"):
        kvevict.Chat.load(tmp_path / "text.safetensors", net, words)
    with pytest.raises(ValueError, match="give tokenizer="):
        kvevict.Chat.load(tmp_path / "text.safetensors", net)
    chat = kvevict.Chat(net, words, **OPTIONS)
    chat.ask(TURNS[0], **NEW)
    chat.save(tmp_path / "chat.safetensors")
    with pytest.raises(ValueError, match="another model"):
        kvevict.Chat.load(tmp_path / "chat.safetensors", model(vocab_size=258, seed=1), words)
