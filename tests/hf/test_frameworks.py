"""Frameworks over a patched model: each generates the same as `generate` under the same policy, or trains as with the
unpatched model. `.ci/run compositions` installs them."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
import transformers

import kvevict

POLICY = ("take", dict(budget=18, probe=6, chunk_size=16))
NEW = 8
TEXTS = [" ".join(f"w{token}" for token in row.tolist()) for row in tiny.prompt(3, 40)["input_ids"]]


@pytest.fixture
def net():
    return tiny.model()


@pytest.fixture
def words():
    return tiny.word_tokenizer()


def plain(net, words, text):
    """The words that `generate` goes on with, under the policy of this call."""
    with kvevict.evicting(net, POLICY[0], **POLICY[1]):
        return continued(net, words, text)


def continued(net, words, text):
    tokens = tiny.generate(net, words(text, return_tensors="pt"), NEW)[0]
    return words.decode(tokens, skip_special_tokens=True).split()


def wanted(net, words):
    """The patched model's continuation of every text; each differs from the unpatched model's."""
    want = [plain(net, words, text) for text in TEXTS]
    assert all(continued(net, words, text) != each for text, each in zip(TEXTS, want, strict=True))
    return want


def test_langchain(net, words):
    """One text, a batch, a stream (in a separate thread) and an asyncio task."""
    langchain = pytest.importorskip("langchain_huggingface")
    from langchain_core.prompts import PromptTemplate

    want = wanted(net, words)
    kvevict.patch(net, POLICY[0], **POLICY[1])
    pipe = transformers.pipeline(
        "text-generation", model=net, tokenizer=words, max_new_tokens=NEW, do_sample=False, return_full_text=False
    )
    model = langchain.HuggingFacePipeline(pipeline=pipe)
    chain = PromptTemplate.from_template("{text}") | model
    asked = [dict(text=text) for text in TEXTS]
    assert [chain.invoke(each).split() for each in asked] == want
    assert [each.split() for each in chain.batch(asked)] == want
    assert "".join(chain.stream(asked[0])).split() == want[0]
    assert asyncio.run(chain.ainvoke(asked[1])).split() == want[1]


def test_llama_index(net, words):
    """A completion, and one that is streamed from a thread."""
    llm = pytest.importorskip("llama_index.llms.huggingface")
    want = wanted(net, words)
    kvevict.patch(net, POLICY[0], **POLICY[1])
    model = llm.HuggingFaceLLM(
        model=net, tokenizer=words, max_new_tokens=NEW, context_window=512, generate_kwargs=dict(do_sample=False)
    )
    assert [model.complete(text).text.split() for text in TEXTS] == want
    assert list(model.stream_complete(TEXTS[0]))[-1].text.split() == want[0]


def trained(net):
    return [weight.detach().clone() for weight in net.parameters()]


def test_trl_sft(words, tmp_path):
    """Steps of supervised training leave the weights of the unpatched model's training; then the policy is there."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words.eos_token = "w9"
    data = datasets.Dataset.from_list([dict(text=text) for text in TEXTS])
    options = dict(output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
                   save_strategy="no", bf16=False, max_length=32, learning_rate=1e-2, seed=3)  # fmt: skip
    made = []
    for patched in (False, True):
        net = tiny.model()
        before = trained(net)
        if patched:
            kvevict.patch(net, POLICY[0], **POLICY[1])
        trl.SFTTrainer(net, trl.SFTConfig(**options), train_dataset=data, processing_class=words).train()
        assert not all(map(torch.equal, trained(net), before))
        made.append(net.eval())
    assert all(map(torch.equal, trained(made[0]), trained(made[1])))
    net = made[1]
    net.config.use_cache = True
    assert continued(net, words, TEXTS[0]) == plain(made[0], words, TEXTS[0])
    assert kvevict.report(net)["kept"][0] == [[18, 18]]


def test_trl_grpo(words, tmp_path):
    """Completions that a model in training writes for itself are the unpatched model's, and so are its steps."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words.eos_token = "w9"
    data = datasets.Dataset.from_list([dict(prompt=text) for text in TEXTS])
    options = dict(output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, num_generations=2, bf16=False,
                   max_completion_length=6, report_to=[], use_cpu=True, save_strategy="no", learning_rate=1e-2,
                   gradient_checkpointing=False, seed=3)  # fmt: skip
    made = []
    for patched in (False, True):
        net, seen = tiny.model(), []

        def reward(completions, seen=seen, **_):
            seen += completions
            return [float(len(set(each.split()))) for each in completions]

        if patched:
            kvevict.patch(net, POLICY[0], **POLICY[1])
        trl.GRPOTrainer(net, reward, trl.GRPOConfig(**options), train_dataset=data, processing_class=words).train()
        made.append((seen, trained(net)))
    assert made[0][0] and made[0][0] == made[1][0]
    assert all(map(torch.equal, made[0][1], made[1][1]))


@pytest.fixture
def server(tmp_path):
    """(address, the served model, its tokenizer) of `transformers serve` in a thread."""
    for needed in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(needed)
    from transformers.cli.serve import Serve

    words = tiny.word_tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tiny.model().save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Serve(
        force_model=str(tmp_path), host="127.0.0.1", port=port, device="cpu", dtype="float32", non_blocking=True
    )
    manager = made._model_manager
    net, _ = manager.load_model_and_processor(manager.process_model_name(str(tmp_path)))
    net.generation_config.eos_token_id = None
    net.generation_config.do_sample = False
    while not made.server.started:
        threading.Event().wait(0.05)
    yield f"http://127.0.0.1:{port}/v1", net, words
    made.kill_server()


def test_transformers_serve(server, monkeypatch):
    """Chats, whole and streamed, one by one and at once."""
    openai = pytest.importorskip("openai")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    address, net, words = server
    want = wanted(net, words)
    kvevict.patch(net, POLICY[0], **POLICY[1])
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)

    def ask(text, **more):
        told = [dict(role="user", content=text)]
        return client.chat.completions.create(
            model=net.name_or_path, messages=told, max_tokens=NEW, temperature=0, **more
        )

    assert [ask(text).choices[0].message.content.split() for text in TEXTS] == want
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(TEXTS[0], stream=True)]
    assert "".join(parts).split() == want[0]
    with ThreadPoolExecutor(len(TEXTS)) as threads:
        assert [answer.choices[0].message.content.split() for answer in threads.map(ask, TEXTS)] == want
    kvevict.unpatch(net)
