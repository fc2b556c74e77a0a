"""Several prompts in a completions request: each gets the answers that it gets alone, and one that fails ends all."""

import gc

import pytest
from serving import FILLER, TEXT, Client, asks, events, server, unpatched  # noqa: F401

from kvevict.serve import call
from kvevict.serve.check import PROMPTS

PATH = "/v1/completions"
SEVERAL = [f"{TEXT}\n\n{asks('Orshan')}\nAnswer:", "Once", f"{FILLER * 6}{asks('Naislet')}\nAnswer:"]
OPTIONS = dict(greedy=dict(max_tokens=12), drawn=dict(max_tokens=9, n=3, temperature=1.2, seed=5))
OPTIONS["with logprobs"] = dict(max_tokens=4, logprobs=2)
STEP = 2**-3  # two of bf16's at the logits' size: one row and several are summed in another order
COUNTS = "prompt_tokens", "completion_tokens", "total_tokens"


def numbers_of(choice):
    """Take the log probabilities out of a choice; returns [log probability, {token: log probability}] of each token."""
    said = choice["logprobs"] or dict(token_logprobs=[], top_logprobs=[])
    return [*zip(said.pop("token_logprobs"), said.pop("top_logprobs"), strict=True)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_prompt_is_answered_as_alone(options):
    client = Client(server(policy="take:recall=false"))
    alone = [client.post(PATH, prompt=each, **options).json() for each in SEVERAL]
    said = client.post(PATH, prompt=SEVERAL, **options).json()
    wanted = [dict(choice, index=0) for one in alone for choice in one["choices"]]
    for choice, one in zip(said["choices"], wanted, strict=True):
        for (number, top), (other, likeliest) in zip(numbers_of(choice), numbers_of(one), strict=True):
            assert number == pytest.approx(other, abs=STEP) and top == pytest.approx(likeliest, abs=STEP)
    assert [dict(choice, index=0) for choice in said["choices"]] == wanted
    assert [choice["index"] for choice in said["choices"]] == list(range(len(wanted)))
    for name in COUNTS:
        assert said["usage"][name] == sum(one["usage"][name] for one in alone)
    texts = dict.fromkeys(range(len(wanted)), "")
    streamed = events(
        client.post(PATH, prompt=SEVERAL, stream=True, stream_options=dict(include_usage=True), **options)
    )
    for event in streamed:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in wanted]
    assert {name: streamed[-1]["usage"][name] for name in COUNTS} == {name: said["usage"][name] for name in COUNTS}


def test_a_stored_text_opens_each_prompt():
    client = Client(server())
    client.store()
    asked = [f"{asks(name)}\nAnswer:" for name in ("Orshan", "Naislet", "Velmora")]
    more = dict(max_tokens=12, kvevict=dict(text="text"))
    alone = [client.post(PATH, prompt=each, **more).json() for each in asked]
    said = client.post(PATH, prompt=asked, **more).json()
    assert [each["text"] for each in said["choices"]] == [each["choices"][0]["text"] for each in alone]
    details = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (said, *alone)]
    assert details[0] == sum(details[1:]) > 1500


@pytest.mark.parametrize("prompt, sentence", [
    ([], "prompt must be a text or its ids, or a list of such, not empty"),
    (["Once", ""], "prompt must be a text or its ids, or a list of such, not empty"),
    (["Once", 5], "prompt must be a text or its ids, or a list of such, not empty"),
    ([5, "Once"], "prompt must be a text or its ids, or a list of such, not empty"),
    ([[5], []], "prompt must be a text or its ids, or a list of such, not empty"),
    ([[5], [-1]], "prompt has ids that the model does not know"),
    (["Once"] * (PROMPTS + 1), f"prompt must have at most {PROMPTS} prompts"),
])  # fmt: skip
def test_lists_that_are_none_of_prompts(prompt, sentence):
    response = Client(server()).post(PATH, prompt=prompt, max_tokens=2)
    assert (response.status_code, response.json()["error"]["message"]) == (400, sentence)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fails_ends_the_request(stream, monkeypatch):
    """One that is too long is refused before anything is read; one that fails takes no room any more."""
    client, token = Client(server()), call.Call.token
    pools = client.server.manager.reader.pools.of.values()
    before = [pool.left() for pool in pools]
    long = client.post(PATH, prompt=["Once", FILLER * 200], max_tokens=2, stream=stream)
    assert long.status_code == 400

    def broken(self):
        if self.prompt == "The baker" and self.new_tokens == 3:
            raise RuntimeError("broken")
        token(self)

    monkeypatch.setattr(call.Call, "token", broken)
    failed = client.post(PATH, prompt=["Once", "The baker", FILLER], max_tokens=20, stream=stream)
    assert events(failed)[-1]["error"]["type"] == "server_error" if stream else failed.status_code == 500
    assert client.post(PATH, prompt="Once", max_tokens=2).status_code == 200
    client.server.scheduler.submit(bool).result()
    gc.collect()
    assert [pool.left() for pool in pools] == before
    assert "kvevict_running 0.0" in client.ask("GET", "/metrics").text
