"""Beginnings of prompts that come again: read once, whose they are, how much of them is kept, and how far a read is."""

import asyncio
import logging
import threading
from itertools import pairwise

import pytest
from serving import FACTS, FILLER, TEXT, Client, asks, cached, events, model, said, server, unpatched  # noqa: F401

from kvevict.policy.policy import build
from kvevict.serve import sharing
from kvevict.serve.call import Call
from kvevict.serve.prompt import Prompt, chat_cuts, of_chat
from kvevict.serve.sharing import Reader, Sharing

SYSTEM = dict(role="system", content=TEXT)
OPENS = dict(kvevict=dict(text="text"))


def automatic(**changes):
    return Client(server(**dict(share="auto", share_budget=0.5) | changes))


def ask(client, name, system=SYSTEM, **body):
    messages = [system, dict(role="user", content=asks(name))]
    return client.post("/v1/chat/completions", **dict(messages=messages, max_tokens=12) | body)


def test_a_system_prompt_that_comes_again():
    """The first request is answered as without sharing, the second reads what both begin with, the third does not."""
    client, alone = automatic(), Client(server())
    answers = [ask(client, name) for name in ("Naislet", "Orshan", "Velmora", "Orshan")]
    assert said(answers[0]) == said(ask(alone, "Naislet"))
    assert "kvevict" not in answers[0].json()
    assert [cached(each) for each in answers[:2]] == [0, 0]
    tokens = cached(answers[2])
    assert tokens == cached(answers[3]) > 500
    for each in answers[1:]:
        assert each.json()["kvevict"] == dict(shared_tokens=tokens, kept=pytest.approx(0.5, abs=2e-3))
    assert said(answers[1]) == said(answers[3])  # read and forked
    assert sum(str(FACTS[name]) in said(each) for name, each in zip(("Orshan", "Velmora"), answers[1:])) == 2
    always = Client(server(share="always", share_budget=0.5))
    assert [said(ask(always, name)) for name in ("Orshan", "Velmora")] == [said(each) for each in answers[1:3]]


@pytest.mark.parametrize("ends, shares", [(2032, True), (2033, False), (2040, False)])
def test_a_beginning_that_the_model_has_no_positions_left_to_repeat(ends, shares):
    """It is answered without sharing, as the first request is."""
    client = automatic(unasked="kvzip")
    ids = client.server.tokenizer(FILLER * 150, add_special_tokens=False)["input_ids"]
    before = len(client.server.tokenizer("\n\n", add_special_tokens=False)["input_ids"])
    system = dict(role="system", content=client.server.tokenizer.decode(ids[: ends - before]))
    asked = [
        dict(messages=[system, dict(role="user", content=each)], max_tokens=1) for each in ("Who?", "Why?", "Who?")
    ]
    first, *others = (client.post("/v1/chat/completions", **each) for each in asked)
    assert cached(first) == 0
    assert [cached(each) for each in others] == [0, ends if shares else 0]
    hidden = client.post("/v1/chat/completions", **asked[0], kvevict=dict(question=None))
    if shares:
        assert hidden.status_code == 200
    else:
        error = hidden.json()["error"]
        assert error["code"] == "context_length_exceeded" and "kvevict.policy that reads once" in error["message"]
        once = dict(question=None, policy="read-once")
        assert client.post("/v1/chat/completions", **asked[0], kvevict=once).status_code == 200


def test_a_request_says_what_is_shared():
    client = automatic()
    always, never, unsaid = dict(share="always"), dict(share="never"), {}
    for want, field in ((0, always), (1, always), (0, never), (0, unsaid), (1, unsaid), (0, never), (1, always)):
        assert (cached(ask(client, "Orshan", kvevict=field)) > 500) == want, field
    assert cached(ask(client, "Orshan", kvevict=dict(question="the code of Orshan"))) == 0
    client.store()
    wrong = (
        dict(share="often"), dict(share="never", question=None), dict(share="never", text="text"), dict(share=1),
        dict(share="auto", question="the code of Orshan"),
    )  # fmt: skip
    for field in wrong:
        response = ask(client, "Orshan", kvevict=field)
        assert response.status_code == 400 and "share" in response.json()["error"]["message"]
    never = Client(server(share="never"))
    assert [cached(ask(never, "Orshan")) for _ in range(3)] == [0] * 3
    assert cached(ask(never, "Orshan", kvevict=dict(share="auto"))) == 0
    assert [cached(ask(never, "Orshan", kvevict=dict(share="auto"))) > 500 for _ in range(2)] == [False, True]


def test_a_chat_reads_what_is_new():
    """Its second turn begins as the first one's prompt did, and reads that for the turns that follow."""
    client, turns, was = automatic(context=4096), [f"{TEXT}\n\n{asks('Naislet')}"], []
    for name in ("Orshan", "Velmora", "Naislet", "Orshan"):
        response = client.chat(*turns)
        usage = response.json()["usage"]
        was.append((usage["prompt_tokens"], cached(response)))
        turns += [f"{said(response).partition(chr(10))[0]} {FILLER * 5}", asks(name)]
    (first, none), (_, nothing), *later = was
    assert none == nothing == 0
    for (_, before), (_, now) in pairwise(later):
        assert now > before > first - 50
    for (prompt, _), (_, now) in zip(was[1:], later):
        assert prompt - 40 < now < prompt


def test_a_plain_prompt_that_begins_as_another():
    client = automatic()
    text, other = FILLER * 35 + TEXT, FILLER * 5 + TEXT

    def ask(name, text=text):
        return client.post("/v1/completions", prompt=f"{text}\n\n{asks(name)}\nAnswer:", max_tokens=14)

    found = [ask(name) for name in ("Naislet", "Orshan", "Velmora", "Naislet", "Naislet")]
    counts = [cached(each) for each in found]
    tokens = found[0].json()["usage"]["prompt_tokens"]
    assert counts[:2] == [0, 0] and tokens - 99 < counts[2] < tokens and counts[2] % 64 == 0
    assert counts[3] == counts[4] == counts[2]  # the same question again does not lengthen it
    texts = [each.json()["choices"][0]["text"] for each in found]
    assert texts[3] == texts[4] and str(FACTS["Naislet"]) in texts[3]
    assert [cached(ask("Orshan", other)) for _ in range(3)] == [0] * 3  # too short
    again = client.post("/v1/completions", prompt=client.server.tokenizer(text)["input_ids"], max_tokens=1)
    assert cached(again) == counts[2]


def test_a_long_message_after_what_is_shared():
    """It is kept in full; a longer one is read by the policy with all that is before it."""
    system, longer = dict(role="system", content=TEXT + TEXT), FILLER * 15 + asks("Orshan")
    for policy in ("take", "chunkkv:n_reuse=2"):
        client, alone = automatic(policy=policy), Client(server(policy=policy))

        def asked(client, content):
            messages = [system, dict(role="user", content=content)]
            return client.post("/v1/chat/completions", messages=messages, max_tokens=8)

        assert [cached(asked(client, asks(name))) > 0 for name in FACTS] == [False, False, True]
        assert cached(asked(client, longer)) > 1000
        much = FILLER * 20 + longer
        assert cached(asked(client, much)) == 0 and said(asked(client, much)) == said(asked(alone, much))


def test_keys_share_nothing():
    served = server(share="auto", share_budget=0.5, keys=("one", "two"))
    one, two = Client(served, "one"), Client(served, "two")
    assert [cached(ask(one, "Orshan")) > 0 for _ in range(3)] == [False, False, True]
    assert [cached(ask(two, "Orshan")) > 0 for _ in range(3)] == [False, False, True]


def test_what_came_before_is_bounded():
    known, reader = Sharing(most=40), Reader(build("kvzip", budget=64), 64)
    long = list(range(2000))
    assert known.cut("a", Prompt(long), reader, None).ends == ()
    assert known.cut("a", Prompt(long), reader, None).ends == (31 * 64,)
    assert known.cut("b", Prompt(long), reader, None).ends == ()
    for start in range(5):
        known.cut("a", Prompt([start, *long]), reader, None)
    assert all(len(each) <= 40 for each in known._known.values())
    assert known.cut("a", Prompt(long), reader, None).ends == ()
    assert known.cut("b", Prompt(long), reader, None).ends == (31 * 64,)
    small = Reader(reader.policy, 0.5, most=100)  # there is no memory for a quarter
    assert known.cut("b", Prompt(long), small, None).ends == ()


def test_chats_are_cut_between_tokens():
    tokenizer = server().tokenizer
    messages = [
        dict(role="system", content="Résumé: 文章 🙂" * 9), dict(role="user", content="¿Qué? 🙂"),
        dict(role="assistant", content="Ja."), dict(role="user", content="Who?"),
    ]  # fmt: skip
    whole = of_chat(tokenizer, messages, {}, 2048)
    cuts = chat_cuts(tokenizer, messages, {}, whole)
    assert tokenizer.decode(whole.ids[cuts[-1] :]) == "Who?\nAnswer:"
    assert len(cuts) == 2 and tokenizer.decode(whole.ids[cuts[0] :]).startswith("¿Qué?")
    assert chat_cuts(tokenizer, messages, {}, Prompt(whole.ids[1:])) == ()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper | trim }} {% endfor %}"
    spaced = [dict(role="user", content="  a"), dict(role="user", content="b")]
    assert chat_cuts(tokenizer, spaced, {}, of_chat(tokenizer, spaced, {}, 2048)) == ()


def positions(client):
    """Of the slots of the one stored cache."""
    [(cache, _)] = client.server.prefixes._live.values()
    return [[head.tolist() for head in row] for layer in cache.layers for row in layer.positions()]


def test_a_read_in_pieces_keeps_the_same(monkeypatch):
    client = Client(server(chunk_size=64))
    client.store()
    want = positions(client)
    monkeypatch.setattr(sharing, "PIECE", 128)
    other = Client(server(chunk_size=64))
    other.store()
    assert positions(other) == want


def test_a_read_that_ends_early_goes_on(monkeypatch):
    monkeypatch.setattr(sharing, "PIECE", 128)
    whole, calls = Client(server(chunk_size=64)), []
    whole.store()
    client, check = Client(server(chunk_size=64)), Call.check

    def failing(call):
        calls.append(call.read_tokens)
        if call.read_tokens >= 300:
            raise TimeoutError
        check(call)

    monkeypatch.setattr(Call, "check", failing)
    assert client.store().status_code == 504
    client.server.scheduler.submit(bool).result()
    [key] = client.server.prefixes._live
    monkeypatch.undo()
    monkeypatch.setattr(sharing, "PIECE", 128)
    read = []
    monkeypatch.setattr(Call, "check", lambda call: read.append(call.read_tokens))
    assert client.store().status_code == 200
    assert min(each for each in read if each) >= 200
    assert key not in client.server.prefixes._live and positions(client) == positions(whole)


def test_little_of_a_text_is_told(caplog):
    client = Client(server(share_budget=64))
    with caplog.at_level(logging.INFO, "kvevict.serve"):
        stored = client.store().json()["kvevict"]
        response = client.chat(asks("Orshan"), **OPENS)
    told = response.json()["kvevict"]
    assert told == stored and told["kept"] < 0.25 and "--share-budget" in told["warning"]
    assert [each.facts["warning"] for each in caplog.records if each.message == "request"] == [told["warning"]] * 2
    streamed = client.chat(asks("Orshan"), stream=True, stream_options=dict(include_usage=True), **OPENS)
    assert events(streamed)[-1]["kvevict"] == told
    asked = dict(input=[dict(role="user", content=asks("Orshan"))], max_output_tokens=2, **OPENS)
    assert client.post("/v1/responses", **asked).json()["kvevict"] == told
    assert "warning" not in Client(server(share_budget=200)).store().json()["kvevict"]


def test_a_texts_budget_is_remembered(tmp_path):
    client = Client(server(tmp_path, share_budget=300))
    stored = client.post("/v1/kvevict/texts", name="text", text=TEXT, budget=128)
    tokens = stored.json()["tokens"]
    for each in (client, Client(server(tmp_path, share_budget=300))):
        response = each.chat(asks("Orshan"), **OPENS)
        assert cached(response) == tokens and response.json()["kvevict"]["kept"] == pytest.approx(128 / tokens, 0.01)
        assert each.ask("GET", "/v1/kvevict/texts/text/kept").status_code == 200
    assert cached(client.chat(asks("Orshan"), kvevict=dict(text="text", budget=200))) == 0
    assert client.post("/v1/kvevict/texts", name="text", text=TEXT, bugdet=128).status_code == 400
    client.store()  # without a budget: the server's
    assert client.chat(asks("Orshan"), **OPENS).json()["kvevict"]["kept"] == pytest.approx(300 / tokens, 0.01)


def test_how_far_a_read_is():
    client = Client(server(chunk_size=64, keys=("one", "two")), "one")
    other, seen, begun, go = Client(client.server, "two"), [], threading.Event(), threading.Event()
    prefix = client.server.manager._prefix

    def held(call):
        check = call.check

        def checked():
            if call.read_tokens > 200 and not begun.is_set():
                begun.set()
                assert go.wait(60)
            check()

        call.check = checked
        return prefix(call)

    client.server.manager._prefix = held

    async def all_of():
        body = dict(name="text", text=TEXT)
        stores = [asyncio.ensure_future(client.asked("POST", "/v1/kvevict/texts", body)) for _ in range(2)]
        await asyncio.to_thread(begun.wait, 60)
        for each in (client, other):
            seen.append((await each.asked("GET", "/v1/kvevict/queue")).json())
        seen.append((await client.asked("GET", "/metrics")).text)
        go.set()
        return await asyncio.gather(*stores)

    stored, _ = asyncio.run(all_of())
    mine, others, metrics = seen
    tokens = stored.json()["tokens"]
    first, second = mine["data"]
    assert (mine["running"], mine["waiting"]) == (others["running"], others["waiting"]) == (1, 1)
    assert others["data"] == [] and (first["state"], second["state"]) == ("running", "waiting")
    assert 200 < first["tokens_read"] < first["tokens_to_read"] == tokens
    assert f"kvevict_tokens_to_read {2 * tokens - first['tokens_read']}.0" in metrics
    assert client.ask("GET", "/v1/kvevict/queue").json()["data"] == []
    assert Client(client.server).ask("GET", "/v1/kvevict/queue").status_code == 401


def test_shared_texts_in_8_bits(tmp_path):
    """They answer beside prompts in the model's dtype, each as alone, and their files keep the bits."""
    client = Client(server(tmp_path, share_kv="int8"))
    client.store()
    asked = [
        dict(messages=[dict(role="user", content=asks("Orshan"))], max_tokens=12, kvevict=dict(text="text")),
        dict(messages=[dict(role="user", content=f"{TEXT}\n\n{asks('Orshan')}")], max_tokens=12),
    ]
    alone = [said(client.post("/v1/chat/completions", **each)) for each in asked]
    assert all(str(FACTS["Orshan"]) in each for each in alone)

    async def all_of():
        return await asyncio.gather(*(client.asked("POST", "/v1/chat/completions", each) for each in asked * 2))

    assert [said(each) for each in asyncio.run(all_of())] == alone * 2
    [cache] = [cache for cache, _ in client.server.prefixes._live.values()]
    assert {layer.bits for layer in cache.layers} == {(8, 8)}
    again = Client(server(tmp_path, share_kv="int8"))
    response = again.post("/v1/chat/completions", **asked[0])
    assert cached(response) > 500 and said(response) == alone[0]


def test_the_default_of_shared_slots():
    from kvevict.serve.start import server_of

    for given, kv, shared in (
        ({}, "model", "int8"),
        (dict(kv="int4"), "int4", "int4"),
        (dict(share_kv="model"), "model", "model"),
    ):
        policies = server_of(**given).policies
        assert (policies.built(None).kv, policies.reader().policy.kv) == (kv, shared)
