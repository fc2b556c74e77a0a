"""Answers that are written together: each is the answer that its request gets alone, whoever comes, leaves or fails."""

import asyncio
import gc
import threading

import pytest
import tiny
import torch
from serving import FILLER, TEXT, Client, asks, events, model, server, unpatched  # noqa: F401

import kvevict
from kvevict.answering import writing
from kvevict.answering.batch import Batch
from kvevict.context import within
from kvevict.engine.read.step import Step
from kvevict.engine.record import recordings
from kvevict.engine.record.replay import Replay
from kvevict.ops import _ops
from kvevict.policy.presets import PRESETS
from kvevict.serve import call
from kvevict.serve.prefixes import in_files
from kvevict.serve.row import Row
from kvevict.serve.start import server_of

PATH = "/v1/chat/completions"
SHARED = dict(kvevict=dict(question=None))


def body(content, **more) -> dict:
    return dict(messages=[dict(role="user", content=content)], max_tokens=12) | more


MIXED = [
    body(f"{TEXT}\n\n{asks('Orshan')}"),
    body("Once", max_tokens=40),
    body("Once", max_tokens=30, temperature=1.5, seed=7),
    body("The baker", max_tokens=25, temperature=1.5, seed=7, top_p=0.9, frequency_penalty=0.5),
    body(f"{TEXT}\n\n{asks('Velmora')}", kvevict=dict(policy="h2o", budget=64), max_tokens=30),
    body(f"{TEXT}\n\n{asks('Velmora')}", kvevict=dict(policy="h2o", budget=48), max_tokens=30),
    body(f"{FILLER * 3}{asks('Orshan')}", kvevict=dict(policy="h2o", budget=64), max_tokens=40),
    body("Once", n=3, max_tokens=10, temperature=1.0, seed=3),
    body(f"{TEXT}\n\n{asks('Naislet')}", stop="735"),
    body(FILLER, logit_bias={"0": -100}, logprobs=True, top_logprobs=2),
]


def choices(response) -> list:
    assert response.status_code == 200, response.text
    return [(each["message"]["content"], each["finish_reason"]) for each in response.json()["choices"]]


@pytest.mark.quick
def test_alone_and_together():
    client = Client(server())
    alone = [choices(client.ask("POST", PATH, each)) for each in MIXED]
    assert [choices(each) for each in client.together(MIXED)] == alone
    assert [choices(each) for each in client.together(MIXED[::-1])] == alone[::-1]
    client.server.scheduler.stall = 0.0
    assert [choices(each) for each in client.together(MIXED)] == alone


def test_tokens_that_are_seen_late(monkeypatch):
    """As on a GPU: once the next step is under way, and in batches that are padded to sizes which are recorded. Stop
    strings, probabilities and streams are the same."""
    client, late = Client(server(policy="take:compiled=true")), []
    want, see = [choices(client.ask("POST", PATH, each)) for each in MIXED], writing.Unseen.see
    monkeypatch.setattr(writing, "LATE", {"cpu"})
    monkeypatch.setitem(recordings.SIZES, "cpu", recordings.SIZES["cuda"])
    monkeypatch.setattr(writing.Unseen, "see", lambda self, answers: late.append(1) or see(self, answers))
    assert [choices(client.ask("POST", PATH, each)) for each in MIXED] == want
    assert [choices(each) for each in client.together(MIXED)] == want
    client.server.scheduler.stall = 0.0
    assert [choices(each) for each in client.together(MIXED[::-1])] == want[::-1]
    assert len(late) > 100
    pool = next(iter(client.server.manager.reader.pools.of.values()))
    padded = {each.places.size for each in pool.recordings if each.places.pads and each.replay is not None}
    assert {2, 4, 8} <= padded <= {2, 4, 8, 16}


def test_a_prompt_is_read_once_for_all_its_answers(monkeypatch):
    client, read = Client(server()), []
    through = client.server.manager.reader._through
    monkeypatch.setattr(client.server.manager.reader, "_through", lambda *args: read.append(args) or through(*args))
    client.ask("POST", PATH, body("Once", n=4))
    assert len(read) == 1


def waits_for(client, monkeypatch, turns):
    """The first read pauses before its first layer until so many turns wait."""
    pause, first = client.server.scheduler.pause, []

    def held():
        if not first:
            first.append(True)
            while client.server.scheduler.waiting < turns:
                pass
        pause()

    monkeypatch.setattr(client.server.scheduler, "pause", held)


def ends(client, monkeypatch) -> list:
    """The prompts' lengths of calls, in the order in which their answers end."""
    told, take = [], Row.take

    def taken(self, logits):
        take(self, logits)
        if self.ended:
            told.append(len(self.call.whole.ids))

    monkeypatch.setattr(Row, "take", taken)
    return told


def test_short_prompts_do_not_wait_for_a_long_one(monkeypatch):
    client = Client(server(chunk_size=128))
    bodies = [body(FILLER * 80), body("Once", max_tokens=3), body(FILLER * 70), body("The baker", max_tokens=3)]
    alone = [choices(client.ask("POST", PATH, each)) for each in bodies]
    waits_for(client, monkeypatch, 3)
    order = ends(client, monkeypatch)
    assert [choices(each) for each in client.together(bodies)] == alone
    assert sorted(order)[:2] == sorted(order[:2]) and order[2:] == sorted(order)[:1:-1]


@pytest.mark.parametrize("name, stall", [("_step", 1e9), ("pause", 0.0)])
def test_answers_go_on_while_a_prompt_is_read(name, stall, monkeypatch):
    """Between its chunks, and between two layers when it is time."""
    client, seen = Client(server(chunk_size=128)), []
    scheduler = client.server.scheduler
    scheduler.stall = stall
    function = getattr(scheduler, name)

    def noted():
        running = [row for group in scheduler._groups for row in group.batch.rows]
        before = [len(row.ids) for row in running]
        function()
        if scheduler._reading:
            seen.append([len(row.ids) - tokens for row, tokens in zip(running, before)])

    monkeypatch.setattr(scheduler, name, noted)
    for response in client.together([body("Once", max_tokens=200, logit_bias={"0": -100}), body(FILLER * 80)]):
        assert response.status_code == 200
    assert [1] in seen and all(each in ([], [1]) for each in seen)


def test_no_token_within_a_chunk_before_its_time(monkeypatch):
    client = Client(server())
    client.chat("Once")  # the first token of all is due at once
    scheduler, inside = client.server.scheduler, []
    scheduler.stall = 1e9
    step, pause = scheduler._step, scheduler.pause

    def paused():
        inside.append(True)
        pause()
        inside.pop()

    monkeypatch.setattr(scheduler, "pause", paused)
    monkeypatch.setattr(scheduler, "_step", lambda: step() if not inside else pytest.fail("a token within a chunk"))
    for response in client.together([body("Once", max_tokens=40), body(FILLER * 10), body(FILLER * 9)]):
        assert response.status_code == 200


def test_one_depth_of_forwards(monkeypatch):
    """Prompts are read between two chunks of a longer one, within a chunk tokens alone; answers are as alone."""
    client, depth, most, narrow = Client(server(policy="take:recall=false")), [], [], []
    client.server.scheduler.stall = 0.0
    bodies = [body(FILLER * 80), body("Once", max_tokens=30), body(FILLER * 3, max_tokens=20), body(TEXT)]
    alone = [choices(client.ask("POST", PATH, each)) for each in bodies]
    through = Step.through

    def counted(step, run, **inputs):
        depth.append(step.decoding)
        most.append(len(depth))
        narrow.append(all(depth[1:]))
        try:
            return through(step, run, **inputs)
        finally:
            depth.pop()

    monkeypatch.setattr(Step, "through", counted)
    waits_for(client, monkeypatch, 3)
    begun, row = [], client.server.manager._row
    monkeypatch.setattr(client.server.manager, "_row", lambda call, *more: begun.append(call) or row(call, *more))
    assert [choices(each) for each in client.together(bodies)] == alone
    long = max(begun, key=lambda each: each.prompt_tokens)
    assert all(each.first_token < long.first_token for each in begun if each is not long)
    assert max(most) == 2 and all(narrow)


def test_no_prompt_inside_another_forward():
    made = kvevict.patch(tiny.model(), "snapkv", budget=16, window=4)
    within_pause = within(pause=lambda: made(**tiny.prompt(1, 9)))
    with within_pause, pytest.raises(AssertionError, match="inside another's forward"):
        made(**tiny.prompt(1, 40))
    assert made(**tiny.prompt(1, 40)).logits.isfinite().all()


def test_repeated_tokens_count_as_left(monkeypatch):
    """A prompt of more than half of another's tokens is read before that one's end: it is read twice."""
    client = Client(server(chunk_size=256))
    client.server.scheduler.stall = 0.0
    bodies = [body(FILLER * 40, kvevict=dict(policy="kvzip", budget=64), max_tokens=1), body(FILLER * 28, max_tokens=1)]
    waits_for(client, monkeypatch, 1)
    order = ends(client, monkeypatch)
    assert all(response.status_code == 200 for response in client.together(bodies))
    assert order == sorted(order)


@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_ends_alone(reading, stream, monkeypatch):
    client = Client(server())
    bodies = [body("Once", max_tokens=30), body("The baker", max_tokens=30), body(FILLER, max_tokens=20)]
    alone = [choices(client.ask("POST", PATH, each)) for each in bodies]
    name = "reads" if reading else "token"
    function = getattr(call.Call, name)

    def broken(self, *args):
        if self.messages[-1]["content"] == "The baker" and (reading or self.new_tokens == 5):
            raise RuntimeError("broken")
        return function(self, *args)

    monkeypatch.setattr(call.Call, name, broken)
    bodies[1]["stream"] = stream
    first, failed, last = client.together(bodies)
    assert [choices(first), choices(last)] == [alone[0], alone[2]]
    if stream:
        assert failed.status_code == 200 and events(failed)[-1]["error"]["type"] == "server_error"
    else:
        assert failed.status_code == 500
    assert choices(client.ask("POST", PATH, bodies[0])) == alone[0]


def test_answers_that_memory_does_not_hold_wait(monkeypatch):
    bodies = [body("Once", max_tokens=30), body("The baker", max_tokens=30), body(FILLER, max_tokens=20)]
    alone = [choices(Client(server()).ask("POST", PATH, each)) for each in bodies]
    client, most = Client(server(memory=1)), []
    step = client.server.scheduler._step
    monkeypatch.setattr(
        client.server.scheduler, "_step", lambda: most.append(client.server.scheduler.running) or step()
    )
    assert [choices(each) for each in client.together(bodies)] == alone
    assert max(most) == 1


def test_keys_get_their_turns_by_turns(monkeypatch):
    """One key's many requests do not keep another key's one from running."""
    made = server(batch=2, keys=("one", "two"))
    client, other = Client(made, "one"), Client(made, "two")
    begun, token = threading.Event(), call.Call.token
    order = ends(client, monkeypatch)

    def held(self):
        token(self)
        if not begun.is_set():
            while made.scheduler.waiting < 4:
                pass
            begun.set()

    monkeypatch.setattr(call.Call, "token", held)

    async def all_of():
        many = [client.asked("POST", PATH, body(f"{'Once ' * n}", max_tokens=4)) for n in range(1, 5)]
        return await asyncio.gather(*many, other.asked("POST", PATH, body("Once " * 9, max_tokens=4)))

    assert all(each.status_code == 200 for each in asyncio.run(all_of()))
    assert max(order) in order[:2]


@pytest.mark.parametrize("remote", [False, True])
def test_answers_about_stored_texts_join_without_a_copy(remote, tmp_path, monkeypatch):
    """Of two texts, one stored here and one loaded. The texts' slots lie in their files, or in the pools, which get
    them back once they are forgotten, where another machine could remove the files."""
    monkeypatch.setattr("kvevict.store.loading.is_remote", lambda path: remote)
    Client(server(tmp_path)).store("loaded", f"{FILLER}{TEXT}")
    client, calls, compact, add = Client(server(tmp_path)), [], _ops.compact, Batch.add
    pools = client.server.manager.reader.pools.of.values()
    before = [pool.left() for pool in pools]
    client.store()
    asked = dict(max_tokens=20, logit_bias={"0": -100})
    bodies = [body(asks("Orshan"), kvevict=dict(text=name), **asked) for name in ("text", "loaded", "text")]
    alone = [choices(client.ask("POST", PATH, each)) for each in bodies]

    def counted(batch, row, cache):
        with monkeypatch.context() as patched:
            patched.setattr(_ops, "compact", lambda *args: moved.append(args) or compact(*args))
            moved: list = []
            add(batch, row, cache)
            calls.append((len(batch.rows), len(moved)))

    monkeypatch.setattr(Batch, "add", counted)
    assert [choices(each) for each in client.together(bodies)] == alone
    assert max(rows for rows, _ in calls) > 1 and not any(moved for _, moved in calls)
    client.server.scheduler.submit(bool).result()
    gc.collect()
    prefixes, lent = client.server.prefixes, [a - pool.left() for a, pool in zip(before, pools, strict=True)]
    size = sum(n * sum(t[0].nbytes for t in pool.buffers) for n, pool in zip(lent, pools, strict=True))
    assert len(prefixes._live) == 2 and all(in_files(each.cache) for each in prefixes._live.values()) != remote
    assert 0.9 * prefixes.live_bytes < size < prefixes.live_bytes if remote else size == prefixes.live_bytes == 0
    for name in ("text", "loaded"):
        client.ask("DELETE", f"/v1/kvevict/texts/{name}")
    client.server.scheduler.submit(bool).result()
    gc.collect()
    assert prefixes.live_bytes == 0 and [pool.left() for pool in pools] == before


REFUSED = {"gate", "lookahead", "lagkv", "oracle", "speckv"}  # a name, or 100 slots, is not enough for them


@pytest.mark.parametrize("path", ["/v1/completions", PATH])
def test_each_preset_between_two_equal_requests(path):
    """What one key asks for changes no answer of another one, not by a policy that learns from what it reads either."""
    kvevict.history().reset()
    config = model().config.__class__(
        vocab_size=model().config.vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    net = model().__class__(config).eval()
    made = server(of=net, budget=100, keys=("a", "b"))

    def ask(key, policy, fact):
        text = f"{FILLER * fact}The code of Velmora is {fact * 1111}. {FILLER * (8 - fact)}\n\n{asks('Velmora')}"
        said = dict(messages=[dict(role="user", content=text)]) if path == PATH else dict(prompt=f"{text}\nAnswer:")
        said |= dict(logprobs=True if path == PATH else 0, max_tokens=3, kvevict=dict(policy=policy))
        response = Client(made, key).post(path, **said)
        return response.status_code == 200 and response.json()["choices"]

    presets = sorted(PRESETS)
    first = {policy: ask("a", policy, 3) for policy in presets}
    assert {policy for policy in presets if first[policy] is False} == REFUSED
    for policy in presets:
        ask("b", policy, 7)
    again = {policy: ask("a", policy, 3) for policy in presets}
    assert {policy for policy in presets if again[policy] != first[policy]} == set()


def test_a_policy_is_watched_once(monkeypatch):
    """Two tokens tell whether a policy's can be recorded; a later request does not ask again."""
    watched, watch = [], Replay._watch
    monkeypatch.setattr(Replay, "_watch", lambda self, *given: watched.append(self) or watch(self, *given))
    client = Client(server(policy="take+edie:compiled=true"))
    for prompt in ("Once", "The baker", "Once"):
        assert choices(client.ask("POST", PATH, body(prompt, max_tokens=16)))
    assert len(watched) == 2


def test_a_server_on_a_cpu_records():
    """Its answers are those of a server that does not."""
    client, plain = (Client(server_of(policy=policy, budget=256)) for policy in ("take", "take:compiled=false"))
    policies = client.server.policies
    assert [policies.built(text).run.compiled for text in (None, "h2o", "take:compiled=false")] == [True, True, False]
    asked = dict(prompt="Once upon a time", max_tokens=24)
    one, other = (each.post("/v1/completions", **asked).json()["choices"] for each in (client, plain))
    assert one == other and one[0]["text"]
    told = [each.server.scheduler._plans[0].replays for each in (client, plain)]
    assert told == [True, None]
