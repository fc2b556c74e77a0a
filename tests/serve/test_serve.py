"""`kvevict serve`: OpenAI's endpoints, and what a request may choose."""

import pytest
from serving import FACTS, FILLER, TEXT, Client, asks, cached, events, model, said, server, unpatched  # noqa: F401

import kvevict
from kvevict.policy.rows.probe import Probe

SHORT = "The code of Naislet is 364735. " + FILLER


@pytest.mark.quick
def test_chat_answers_as_the_patched_model_does():
    client = Client(server())
    response = client.chat(f"{TEXT}\n\n{asks('Orshan')}")
    body = response.json()
    assert "118204" in said(response)
    ids = client.server.tokenizer(f"{TEXT}\n\n{asks('Orshan')}\nAnswer:", return_tensors="pt")
    want = model().generate(**ids, max_new_tokens=12)[0, ids.input_ids.shape[1] :]
    assert said(response) == client.server.tokenizer.decode(want)
    tokens = ids.input_ids.shape[1]
    assert body["usage"] == {
        "prompt_tokens": tokens, "completion_tokens": 12, "total_tokens": tokens + 12,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    assert body["choices"][0]["finish_reason"] == "length" and body["model"] == "small"


def test_what_is_not_an_answer():
    client = Client(server())
    assert client.ask("GET", "/health").json() == {"status": "ok"}
    [known] = client.ask("GET", "/v1/models").json()["data"]
    assert known["id"] == "small" and known["object"] == "model"
    client.chat("Once")
    text = client.ask("GET", "/metrics").text
    assert 'kvevict_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
    assert "kvevict_first_token_seconds_count 1.0" in text and "kvevict_queue 0.0" in text


def test_a_request_chooses_its_policy_and_budget():
    client, question = Client(server()), f"{TEXT}\n\n{asks('Velmora')}"
    ids = client.server.tokenizer(f"{question}\nAnswer:", return_tensors="pt")
    with kvevict.evicting(model(), "streaming", budget=64, chunk_size=256):
        want = model().generate(**ids, max_new_tokens=12)[0, ids.input_ids.shape[1] :]
    got = said(client.chat(question, kvevict=dict(policy="streaming", budget=64)))
    assert got == client.server.tokenizer.decode(want) and str(FACTS["Velmora"]) not in got
    assert client.chat(question, kvevict=dict(budget=257)).status_code == 400  # the server's is 256


def test_what_asks_in_a_chat(monkeypatch):
    """The last user's question observes, whatever instructions follow it; or the text that a request names."""
    spans, asked = [], Probe.asked
    noted = lambda self, found: spans.extend(span for row in found for span in row.spans) or asked(self, found)  # noqa: E731
    monkeypatch.setattr(Probe, "asked", noted)
    client, tail = Client(server(policy="take:probe=8", budget=64)), "Answer in one line and be brief about it. " * 6
    messages = [
        dict(role="system", content=TEXT), dict(role="user", content="Question: Who is it?"),
        dict(role="assistant", content="The baker?"), dict(role="user", content=f"{asks('Orshan')}\n\n{tail}"),
        dict(role="system", content="Be kind. " * 9),
    ]  # fmt: skip
    for more in ({}, dict(kvevict=dict(question="in one line"))):
        response = client.post("/v1/chat/completions", messages=messages, max_tokens=1, **more)
        assert response.status_code == 200
    ids = client.server.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    asked = [client.server.tokenizer.decode(ids[start:stop]).strip() for start, stop in spans]
    assert asked == [asks("Orshan").partition(": ")[2], "in one line"]
    refused = client.post("/v1/chat/completions", messages=messages, kvevict=dict(question="in two lines"))
    assert refused.status_code == 400 and "kvevict.question" in refused.json()["error"]["message"]


def test_a_context_that_is_full():
    client = Client(server())
    response = client.chat(FILLER * 200)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    nearly = client.post("/v1/completions", prompt=FILLER * 90, max_tokens=500).json()
    assert nearly["usage"]["total_tokens"] == 2048 and nearly["choices"][0]["finish_reason"] == "length"


def test_a_model_without_a_chat_template():
    client = Client(server(template=None))
    assert "/v1/completions" in client.chat("Who?").json()["error"]["message"]
    client.store()
    response = client.post(
        "/v1/completions", prompt=f"{asks('Orshan')}\nAnswer:", max_tokens=12, kvevict=dict(text="text")
    )
    options = dict(budget=256, chunk_size=256, recall=True)
    cache = kvevict.read(model(), client.server.tokenizer, TEXT, "take", **options)
    want = kvevict.answer(model(), client.server.tokenizer, cache, [f"{asks('Orshan')}\nAnswer:"], max_new_tokens=12)
    assert response.json()["choices"][0]["text"].strip() == want[0]
    assert cached(response) == cache.get_seq_length()
