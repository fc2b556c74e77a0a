"""Copies of a question in a prompt, in states without vLLM: they observe as the Transformers engine's appended rows."""

import asyncio
import itertools
import json

import pytest
import torch
from policy_cases import BUDGET, CHUNK, model, ours, tokens
from states_host import Host, drawn

from kvevict.vllm.asked import InPrompt
from kvevict.vllm.questions import COPIES, NONE, QUESTION, check, with_copies


@pytest.mark.parametrize("name", ["take", "take+edie"])
def test_copies_of_the_question_observe_as_the_engines_appended_rows(name):
    """The engine appends the prompt's last rows to each chunk. Here they end the periods as tokens, at the positions
    that the engine gives them. The chunk is a period without the copy, and the prompt a whole number of chunks."""
    size, chosen = 5, dict(warmup_layers=None, ema_alpha=0) | (dict(kernel=5) if name == "take+edie" else {})
    step = CHUNK - size
    rows = [[4 * step]]
    engine = ours(model(), name, rows, 0, probe=size, budget=CHUNK, chunk_size=step, **chosen)[0][0]
    ids = torch.cat(tokens(rows, 0)[0])
    host = Host(model(), name, CHUNK, probe=size, **chosen)
    written, host.copies = with_copies(ids.tolist(), ids[-size:].tolist(), CHUNK)
    assert host.copies == (size, 3) and len(written) == len(ids) + 3 * size
    real = torch.tensor([at % CHUNK < step or at >= 3 * CHUNK for at in range(len(written))])
    host.positions = torch.arange(len(written)) - torch.arange(len(written)) // CHUNK * size
    for _ in range(2):
        logits = host.read(torch.tensor(written), drawn(len(written)))
        torch.testing.assert_close(logits[real], engine[0], rtol=0, atol=3e-5 * engine[0].abs().max().item())
    assert all(head == sorted({*head} & {*range(4 * step)}) for head in itertools.chain(*host.kept(len(written))))


def test_a_question_may_be_named_under_a_window():
    """The copies' slots are dropped under snapkv, too; and what they ask for changes what stays."""
    ids, kept = torch.cat(tokens([[4 * CHUNK - 1]], 0)[0]), []
    for question in (ids[3:6], ids[9:12]):
        host = Host(model(), "snapkv", BUDGET, window=4)
        written, host.copies = with_copies(ids.tolist(), question.tolist(), CHUNK)
        host.read(torch.tensor(written), drawn(len(written)))
        kept.append(host.kept(len(written)))
        tail = [*range(host.copies.number * (CHUNK - 3), len(ids))]
        for head in itertools.chain(*kept[-1]):
            assert head == sorted({*head}) and head[-len(tail) :] == tail and len(head) == BUDGET + len(tail)
    assert kept[0] != kept[1]


@pytest.mark.parametrize("n", [1, 15, 16, 17, 28, 29, 41, 100])
def test_a_prompt_with_copies_is_the_prompt_without_them(n):
    """Period 16, question of 3: each whole period but the prompt's last ends with the question."""
    ids, question = list(range(n)), [-3, -2, -1]
    written, copies = with_copies(ids, question, 16)
    assert [token for token in written if token >= 0] == ids
    assert copies.number == written.count(-2) == (0 if n <= 16 else (len(written) - 1) // 16)
    assert all(written[16 * m - 3 : 16 * m] == question for m in range(1, copies.number + 1))
    assert all(copies.ending(16 * m, 16) == (3 if m <= copies.number else 0) for m in range(1, 20))
    assert with_copies(ids, question, 16, 1)[1].number == min(1, copies.number)
    assert with_copies(ids, [], 16) == with_copies(ids, [0] * 16, 16) == with_copies(ids, [0] * 20, 16) == (ids, NONE)


def test_what_a_client_may_not_give_is_refused():
    check(None)
    check({QUESTION: "Why?", "other": 1})
    for given in ({QUESTION: 3}, {QUESTION: " "}, {QUESTION: None}, {COPIES: [3, 1]}):
        with pytest.raises(ValueError, match=r"must be a text|for the engine alone"):
            check(given)


CHAT = [dict(role="system", content="Be kind."), dict(role="user", content=[dict(type="text", text="A. Why? B.")])]


@pytest.mark.parametrize(("request_", "status"), [
    (dict(messages=CHAT, vllm_xargs={QUESTION: "A.  Why?"}), 200),
    (dict(messages=CHAT, vllm_xargs={QUESTION: "Who?"}), 400),
    (dict(prompt="A. Why?", vllm_xargs={QUESTION: "Why?"}), 200),
    (dict(prompt=["A.", "B."], vllm_xargs={QUESTION: "Why?"}), 400),
    (dict(prompt=[3, 4], vllm_xargs={QUESTION: "Why?"}), 200),
    (dict(prompt="A.", vllm_xargs={QUESTION: 3}), 200),  # RequestCopies refuses it
    (dict(prompt="A.", vllm_xargs=None), 200),
    ([3], 200),
])  # fmt: skip
def test_a_question_that_the_prompt_lacks_is_refused(request_, status):
    """A body comes in two parts, and the server gets both."""
    body, sent, got = json.dumps(request_).encode(), [], []
    parts = [dict(body=body[:9], more_body=True), dict(body=body[9:], more_body=False), dict(type="http.disconnect")]

    async def app(scope, receive, send):
        got.extend([await receive() for _ in range(3)])
        await send(dict(type="http.response.start", status=200))

    async def receive():
        return parts.pop(0)

    async def send(message):
        sent.append(message)

    scope = dict(type="http", method="POST", headers=[(b"content-type", b"application/json")])
    asyncio.run(InPrompt(app)(scope, receive, send))
    assert sent[0]["status"] == status
    if status == 200:
        assert got[0]["body"] + got[1]["body"] == body and got[2]["type"] == "http.disconnect"
    else:
        assert not got and "not in the prompt" in json.loads(sent[1]["body"])["error"]["message"]
