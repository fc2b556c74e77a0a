"""Beginnings of prompts that come again: read once, with the first request, and whose they are; how far a read is."""

import asyncio
import logging
import re
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from serving import FACTS, FILLER, TEXT, Client, asks, cached, said, server, unpatched  # noqa: F401
from transformers import AutoModelForCausalLM

import kvevict
from kvevict.policy.kv import KINDS
from kvevict.serve import reading
from kvevict.serve.call import Call
from kvevict.serve.metrics import progress

SYSTEM = dict(role="system", content=TEXT)
OPENS = dict(kvevict=dict(text="text"))


def ask(client, name, system=SYSTEM, **body):
    messages = [system, dict(role="user", content=asks(name))]
    return client.post("/v1/chat/completions", **dict(messages=messages, max_tokens=12) | body)


def right(name, response) -> bool:
    return str(FACTS[name]) in said(response)


def test_a_system_prompt_that_comes_again():
    """The first request reads it, those that follow only what is new; each question finds its own facts."""
    client, names = Client(server(budget=64)), ("Naislet", "Orshan", "Velmora", "Orshan")
    answers = [ask(client, name) for name in names]
    tokens = [each.json()["usage"]["prompt_tokens"] for each in answers]
    assert [cached(each) for each in answers] == [0, *(max(512, each - 64) for each in tokens[1:])]
    assert min(tokens) < 640
    assert said(answers[1]) == said(answers[3])
    full = Client(server(budget=4096))
    assert [right(*each) for each in zip(names, answers)] == [right(name, ask(full, name)) for name in names]
    [live] = client.server.prefixes._live.values()  # the questions are short: nothing else is stored
    cache = live.cache
    assert all(layer.counts.min() == cache.get_seq_length() for layer in cache.layers)


@pytest.mark.parametrize("option", ["", ",recall_after=0", ",recall_after=5", ",recall_after=16"])
def test_one_beginning_for_questions_at_once(option):
    """They are answered in one batch, each as alone, while they attend to all slots, too."""
    client = Client(server(budget=64, policy=f"take+edie:recall=true{option}"))
    client.store()
    bodies = [dict(messages=[dict(role="user", content=asks(name))], max_tokens=12, **OPENS) for name in FACTS]
    alone = [said(client.post("/v1/chat/completions", **body)) for body in bodies]

    assert [said(each) for each in client.together(bodies * 2)] == alone * 2


@pytest.mark.parametrize("more", [
    {}, dict(temperature=0.8, seed=4), dict(temperature=1.5, seed=5, frequency_penalty=0.5, logprobs=1, n=2),
    dict(stop=["1"]), dict(max_tokens=1), dict(max_tokens=2),
], ids=str)  # fmt: skip
def test_checked_answers(more):
    """Of questions at once, drawn or not: those of all slots, also where chosen slots give others."""
    net, found = AutoModelForCausalLM.from_pretrained(kvevict.small_llama(), dtype=torch.float32).eval(), []
    for given in ("recall_slots=1.0", "recall_check=5", "recall_after=0"):
        client = Client(server(budget=24, policy=f"take+edie:recall=true,probe=4,{given}", of=net))
        client.store()
        bodies = [dict(prompt=f"{asks(name)}\nAnswer:", max_tokens=30) | OPENS | more for name in FACTS]
        answers = client.together(bodies, "/v1/completions")
        found.append([[(each["text"], each["finish_reason"]) for each in one.json()["choices"]] for one in answers])
    assert found[0] == found[1] and (found[1] != found[2] or "max_tokens" in more)


def test_answers_attend_to_all_slots(tmp_path):
    """By the rule of `kvevict.answer`, whatever the budget. Answers about texts in one memory share steps, those about
    texts in different files do not, so that no slot of a text is copied. Of what they share with a text an answer's
    size has nothing."""
    for folder, groups in ((None, 1), (tmp_path, 2)):
        client, bodies, most, shares, sizes = Client(server(folder, budget=64, chunk_size=1024)), [], [], [], []
        for text in ("one", "two"):
            client.store(text, f"Text {text}. {TEXT}")
            for name in FACTS:
                messages = [dict(role="user", content=asks(name))]
                bodies.append(dict(messages=messages, max_tokens=12, kvevict=dict(text=text)))
        alone = [said(client.post("/v1/chat/completions", **body)) for body in bodies]
        scheduler = client.server.scheduler
        step, submit = scheduler._step, scheduler.submit

        def counted(scheduler=scheduler, step=step, most=most, shares=shares):
            caches = [group.batch.cache for group in scheduler._groups if group.batch.rows]
            most.append(len(caches))
            held = [layer.storage for cache in caches for layer in cache.layers]
            shares += [each.total_counts.min() > 500 and each.capacity.max() < 400 for each in held]
            step()

        def sized(*args, size=None, submit=submit, sizes=sizes, **facts):
            if size is not None:
                sizes.append(size)
                facts["size"] = size
            return submit(*args, **facts)

        scheduler._step, scheduler.submit = counted, sized
        assert [said(each) for each in client.together(bodies)] == alone
        assert max(most) == groups and all(shares)  # the text's slots are not copied
        assert all(0 < size() < 100 * client.server.manager.reader.slot for size in sizes)
        whole = Client(server(budget=4096, chunk_size=1024))
        whole.store("two", f"Text two. {TEXT}")
        assert [said(whole.post("/v1/chat/completions", **body)) for body in bodies[3:]] == alone[3:]


def test_with_slots_for_all_tokens_a_beginning_changes_nothing():
    """The probabilities are those of a prompt that is read whole."""
    client, fresh = Client(server(budget=4096)), Client(server(budget=4096, policy="take:recall=false"))
    ask(client, "Naislet")
    found, want = (ask(each, "Orshan", logprobs=True, top_logprobs=3) for each in (client, fresh))
    assert cached(found) > cached(want) == 0 and said(found) == said(want)
    logs = [[each["logprob"] for each in x.json()["choices"][0]["logprobs"]["content"]] for x in (found, want)]
    assert logs[0] == pytest.approx(logs[1], abs=2**-6)  # the model is in bf16: what is read at once rounds otherwise


def test_policies_that_cannot_recall(caplog):
    """They read each prompt whole, stored texts too."""
    for policy in ("knorm", "take:recall=false", "kvzip"):
        client = Client(server(policy=policy))
        client.store()
        assert [cached(ask(client, name)) for name in ("Orshan", "Velmora")] == [0, 0]
        assert [cached(client.chat(asks(name), **OPENS)) for name in ("Orshan", "Velmora")] == [0, 0]
        assert not client.server.prefixes._live
    client = Client(server())
    more = dict(kvevict=dict(policy="knorm"))
    assert [cached(ask(client, name, **more)) for name in ("Orshan", "Velmora")] == [0, 0]


def test_options_of_recall_imply_it():
    for option in ("recall_after=16", "recall_slots=1.0", "recall_check=8"):
        built, named = (Client(server(policy=f"take+edie:{each}{option}")) for each in ("", "recall=true,"))
        assert built.server.policies.built().policy == named.server.policies.built().policy
        assert built.server.policies.built().policy.recall


def test_an_archive_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="give kvevict serve --kv"):
        server(policy="take+edie:recall=true,recall_kv=int8")


def test_a_prompt_that_leaves_no_positions_to_repeat_it():
    client = Client(server())
    ids = client.server.tokenizer(FILLER * 95)["input_ids"]
    for tokens, policy, status in ((2032, "kvzip", 200), (2033, "kvzip", 400), (2033, "read-once", 200)):
        response = client.post("/v1/completions", prompt=ids[:tokens], max_tokens=1, kvevict=dict(policy=policy))
        assert response.status_code == status
        if status == 400:
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded" and "kvevict.policy that reads once" in error["message"]


def test_a_request_that_names_its_question_is_read_whole():
    client = Client(server())
    ask(client, "Orshan")
    assert cached(ask(client, "Orshan", kvevict=dict(question="the code of Orshan"))) == 0
    assert cached(ask(client, "Velmora", kvevict=dict(question=None))) >= 512
    assert cached(ask(client, "Orshan", kvevict=dict(budget=100))) == 0  # of another policy
    client.store()
    response = ask(client, "Orshan", kvevict=dict(question="the code of Orshan", text="text"))
    assert response.status_code == 400 and response.json()["error"]["param"] == "kvevict.question"


def test_a_chat_reads_what_is_new():
    client, turns, was = Client(server(context=4096)), [f"{TEXT}\n\n{asks('Naislet')}"], []
    for name in ("Orshan", "Velmora", "Naislet", "Orshan"):
        response = client.chat(*turns)
        was.append((response.json()["usage"]["prompt_tokens"], cached(response)))
        turns += [f"{said(response).partition(chr(10))[0]} {FILLER * 20}", asks(name)]
    for (before, _), (_, now) in pairwise(was):
        assert now == before  # all of the turns before
    assert len(client.server.prefixes._live) == 1  # the longest begins with the others


def test_a_text_that_a_chat_has_had_is_stored(tmp_path, caplog):
    """It is not read again. The stored text is deleted alone."""
    caplog.set_level(logging.INFO, "kvevict.serve")
    for folder in (None, tmp_path):
        client, pasted = Client(server(folder)), f"{TEXT}\n\n{asks('Naislet')}"
        client.chat(pasted)
        tokens = client.store().json()["tokens"]
        assert caplog.records[-1].facts["cached_tokens"] == tokens
        for name in FACTS:
            response = client.chat(asks(name), **OPENS)
            assert cached(response) == tokens and right(name, response)
        assert client.ask("DELETE", "/v1/kvevict/texts/text").status_code == 200
        assert cached(client.chat(pasted)) > 500


def test_a_plain_prompt_that_begins_as_another():
    client = Client(server())
    text, other = FILLER * 35 + TEXT, FILLER * 5 + TEXT

    def ask(name, text=text):
        return client.post("/v1/completions", prompt=f"{text}\n\n{asks(name)}\nAnswer:", max_tokens=14)

    found = [ask(name) for name in ("Naislet", "Orshan", "Naislet", "Naislet")]
    counts = [cached(each) for each in found]
    tokens = found[0].json()["usage"]["prompt_tokens"]
    assert counts[0] == 0 and tokens - 64 <= counts[1] < tokens
    assert counts[2] >= counts[1] and counts[3] == counts[2]
    texts = [each.json()["choices"][0]["text"] for each in found]
    assert texts[2] == texts[3] and str(FACTS["Naislet"]) in texts[2]
    assert [cached(ask("Orshan", other)) >= 512 for _ in range(3)] == [False, True, True]
    ids = client.server.tokenizer(text)["input_ids"]
    again = client.post("/v1/completions", prompt=ids, max_tokens=1)
    assert len(ids) - 64 <= cached(again) < len(ids)
    assert cached(client.post("/v1/completions", prompt=FILLER * 11, max_tokens=1)) == 0  # too short


def test_a_long_message_after_what_is_shared():
    client, system = Client(server(budget=64)), dict(role="system", content=TEXT)
    for n, filler in enumerate((0, 15, 30)):
        messages = [system, dict(role="user", content=FILLER * filler + asks("Orshan"))]
        response = client.post("/v1/chat/completions", messages=messages, max_tokens=12)
        assert (cached(response) >= 512) == (n > 0) and right("Orshan", response)


def test_what_is_shared_outlives_the_last_prompt_that_had_it():
    """Two prompts that begin alike: once the later one is forgotten, the earlier one still gives their beginning."""
    client = Client(server())
    ids, held = client.server.tokenizer(FILLER * 20)["input_ids"], client.server.prefixes
    for own in (300, 301):
        assert cached(client.post("/v1/completions", prompt=[*ids, own, *ids], max_tokens=1)) == len(ids) * (own > 300)
    held._drop([*held._live.values()][1])
    assert cached(client.post("/v1/completions", prompt=[*ids, 302, *ids[:80]], max_tokens=1)) == len(ids) > 256
    held._drop(*held._live.values())
    assert held.live_bytes == 0 and not held._tree.longest(np.zeros(1, np.int64))[1].children


@pytest.mark.parametrize("own, ends", [(2, [940]), (100, [700, 940])])
def test_prompts_that_differ_in_a_few_last_tokens_are_held_once(own, ends):
    """As of a chat whose template writes the beginning of an answer otherwise once the next turn has come."""
    client = Client(server())
    ids = client.server.tokenizer(FILLER * 60)["input_ids"]
    for more in (range(300, 300 + own), range(500, 840)):
        prompt = [*ids[:600], *more]
        assert client.post("/v1/completions", prompt=prompt, max_tokens=1).status_code == 200
    assert [live.end for live in client.server.prefixes._live.values()] == ends


def test_keys_share_nothing():
    served = server(keys=("one", "two"))
    for key in ("one", "two"):
        client = Client(served, key)
        assert [cached(ask(client, "Orshan")) > 0 for _ in range(2)] == [False, True]


def test_what_memory_holds():
    """What does not fit is forgotten with all that it begins with, the least recently used first."""
    client = Client(server())
    ask(client, "Naislet")
    size = client.server.prefixes.live_bytes
    small = Client(server(memory=int(1.5 * size)))
    other = dict(role="system", content=f"Yes. {TEXT}")
    found = [cached(ask(small, "Orshan", each)) > 500 for each in (SYSTEM, other, other, SYSTEM)]
    assert found == [False, False, True, False]
    prefixes = small.server.prefixes
    assert prefixes.live_bytes <= 1.5 * size and len(prefixes._live) == 1
    tiny = Client(server(memory=size // 2))
    assert [cached(ask(tiny, "Orshan")) for _ in range(2)] == [0, 0] and not tiny.server.prefixes._live


def test_a_read_in_pieces_keeps_the_same(monkeypatch):
    """Every token, and the answers are right."""
    monkeypatch.setattr(reading, "PIECE", 256)
    client = Client(server(chunk_size=64, budget=64))
    tokens = client.store().json()["tokens"]
    [cache] = [live.cache for live in client.server.prefixes._live.values()]
    places = [head.tolist() for layer in cache.layers for row in layer.positions() for head in row]
    assert places == [list(range(cache.get_seq_length()))] * len(places)
    response = client.chat(asks("Orshan"), **OPENS)
    assert cached(response) == tokens and right("Orshan", response)


def test_a_read_that_ends_early_goes_on(monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 256)
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
    monkeypatch.setattr(reading, "PIECE", 256)
    read = []
    monkeypatch.setattr(Call, "check", lambda call: read.append(call.read_tokens))
    assert client.store().status_code == 200
    assert min(each for each in read if each) >= 256
    assert key not in client.server.prefixes._live and len(client.server.prefixes._live) == 1
    assert said(client.chat(asks("Orshan"), **OPENS)) == said(whole.chat(asks("Orshan"), **OPENS))


def test_a_texts_budget_is_remembered(tmp_path):
    client = Client(server(tmp_path))
    client.post("/v1/kvevict/texts", name="text", text=TEXT, budget=128)
    for each in (client, Client(server(tmp_path))):
        assert cached(each.chat(asks("Orshan"), **OPENS)) > 500
        assert each.ask("GET", "/v1/kvevict/texts/text/kept").status_code == 200
    assert cached(client.chat(asks("Orshan"), kvevict=dict(text="text", budget=200))) == 0
    assert client.post("/v1/kvevict/texts", name="text", text=TEXT, bugdet=128).status_code == 400
    client.store()  # without a budget: the server's
    assert cached(client.chat(asks("Orshan"), **OPENS)) > 500


def test_how_far_a_read_is():
    client = Client(server(chunk_size=64, keys=("one", "two")), "one")
    other, seen, begun, go = Client(client.server, "two"), [], threading.Event(), threading.Event()
    prefix = client.server.manager.reader._text

    def held(call, *args):
        check = call.check

        def checked():
            if call.read_tokens > 200 and not begun.is_set():
                begun.set()
                assert go.wait(60)
            check()

        call.check = checked
        return prefix(call, *args)

    client.server.manager.reader._text = held

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
    client = Client(server(tmp_path, kv="int8"))
    client.store()
    asked = [
        dict(messages=[dict(role="user", content=asks("Orshan"))], max_tokens=12, kvevict=dict(text="text")),
        dict(messages=[dict(role="user", content=f"{TEXT}\n\n{asks('Orshan')}")], max_tokens=12),
    ]
    *_, one, two = (said(client.post("/v1/chat/completions", **each)) for each in asked * 2)  # each knows its beginning
    alone = [one, two]
    assert all(str(FACTS["Orshan"]) in each for each in alone)

    assert [said(each) for each in client.together(asked * 2)] == alone * 2
    cache = next(iter(client.server.prefixes._live.values())).cache
    assert {layer.kinds for layer in cache.layers} == {KINDS["int8"]}
    again = Client(server(tmp_path, kv="int8"))
    response = again.post("/v1/chat/completions", **asked[0])
    assert cached(response) > 500 and said(response) == alone[0]


def test_tokens_that_nobody_read_are_not_counted():
    """Those of a text whose kept tokens are asked for; of a prompt, also of one in a list, that ends before its end."""
    client, calls, seen = Client(server(chunk_size=64)), [], []

    def counted():
        return float(re.search(r"^kvevict_tokens_read_total (\S+)", client.ask("GET", "/metrics").text, re.M)[1])

    read = client.store().json()["tokens"]
    assert client.ask("GET", "/v1/kvevict/texts/text/kept").status_code == 200 and counted() == read
    through = client.server.manager.reader._through

    def ended(call, *args):
        def pause(start):
            type(call).reads(call, start)
            if start >= 128:
                seen.append(progress(*client.server.calls))
                raise TimeoutError

        call.reads = pause
        calls.append(call)
        return through(call, *args)

    client.server.manager.reader._through = ended
    assert client.post("/v1/completions", prompt=FILLER * 30, max_tokens=3).status_code == 504
    assert client.post("/v1/completions", prompt=[FILLER * 30, FILLER * 20], max_tokens=3).status_code == 504
    assert len(seen) == 2 and all(128 <= each["tokens_read"] < each["tokens_to_read"] for each in seen)
    assert {each["state"] for each in seen} == {"running"}
    assert counted() == read + sum(each.read_tokens for each in calls)
