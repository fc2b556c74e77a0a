"""Every model type with a state, a sliding window, latents or shared layers, served: tests/serve/types.tsv has the
results, docs/models.md shows them. Each answer is the unpatched model's, token by token, or the request is refused.

KVEVICT_TYPES=all serves every such type that the installed Transformers has, KVEVICT_TYPES=write writes the table.
"""

import asyncio
import copy
import functools
import json
import os
from pathlib import Path

import pytest
import tiny
import torch
import zoo
from serving import JSON, Client, scope_of, server

import kvevict
from kvevict.models import families, known

WHICH = os.environ.get("KVEVICT_TYPES", "sample")
SAMPLE = ("lfm2", "qwen3_5_text", "falcon_h1", "gemma3_text", "deepseek_v3", "gemma4_text")  # one of each kind
PATH = "/v1/completions"
TABLE = Path(__file__).with_name("types.tsv")
SYSTEM = "The baker counted the boats in the harbour and went home before it rained. " * 5
FIRST, SECOND = "Who went home?", "What did the baker count before the rain came?"
CLOSE = 1e-3  # of logits that were computed in other chunks or beside other rows
ROUNDED = 5e-3  # of those over slots of 8 bits: a number between two steps is rounded to either of them


@functools.cache
def special(name) -> tuple:
    """What a type's cache holds beside plain keys and values of all tokens, in its layers."""
    config = zoo.config_of(name).get_text_config(decoder=True)
    kinds = families.layer_kinds(config)
    found = [kind for kind in (families.STATE, families.FULL_ATTENTION_AND_STATE, families.SLIDING) if kind in kinds]
    found += ["latents"] if families.is_latent(config) else []
    return tuple(found + (["shared layers"] if getattr(config, "num_kv_shared_layers", 0) else []))


@functools.cache
def tokenizer():
    """A token per byte, and one for every other id of a tiny model."""
    made = tiny.byte_tokenizer()
    made.add_tokens([f"<{i}>" for i in range(256, zoo.VOCAB)])
    return made


def policy_of(net) -> str:
    """`take`, or for a type whose queries it cannot rotate, `snapkv`."""
    line = next(line for line in known.table() if line.decoder == families.find_decoder(net).config.model_type)
    return "snapkv" if "no rotation" in line.note else "take"


class Served:
    """A server of a model, whose answers' logits and tokens are noted."""

    def __init__(self, net, **options):
        usual = dict(budget=900, context=1024, tokenizer=tokenizer(), policy=policy_of(net))
        self.client, self._answers = Client(server(of=net, **usual | options)), []
        manager = self.client.server.manager
        row = manager._row
        manager._row = lambda *args: self._noted(row(*args))

    def _noted(self, row):
        logits, tokens, choose = [], [], row.choose

        def noted(scores):
            logits.append(scores.float().clone())
            token = choose(scores)
            tokens.append(int(token))
            return token

        row.choose = noted
        self._answers.append((row.call.whole.ids, logits, tokens))
        return row

    def answers(self) -> list:
        """(ids of the prompt, logits [tokens, vocabulary], tokens) of the answers since the last call, by their ids."""
        found = sorted(self._answers, key=lambda answer: answer[0])
        self._answers = []
        return [(ids, torch.stack(logits), tokens) for ids, logits, tokens in found]

    def chat(self, *said, system=SYSTEM, **body):
        turns = [dict(role=("user", "assistant")[at % 2], content=text) for at, text in enumerate(said)]
        opening = [] if system is None else [dict(role="system", content=system)]
        response = self.client.post("/v1/chat/completions", **dict(messages=opening + turns, max_tokens=8) | body)
        return ok(response).json(), self.answers()

    def together(self, *bodies, leaves=False) -> list:
        """Answers to requests that are sent at once. leaves: the first one's client leaves after three tokens."""

        async def sent():
            asked = [self.client.asked("POST", PATH, dict(max_tokens=8) | body) for body in bodies[leaves:]]
            return await asyncio.gather(*asked, *([self._left(bodies[0])] if leaves else []))

        for response in asyncio.run(sent())[: len(bodies) - leaves]:
            ok(response)
        return [each for each in self.answers() if not leaves or len(each[2]) == 8]

    async def _left(self, body):
        """A request whose client closes the connection."""
        given, gone = [dict(type="http.request", body=json.dumps(body).encode(), more_body=False)], []
        ids = tokenizer()(body["prompt"])["input_ids"]

        async def receive():
            if not given:
                while not any(len(tokens) > 2 for prompt, _, tokens in list(self._answers) if prompt == ids):
                    await asyncio.sleep(0.001)
                gone.append(dict(type="http.disconnect"))
            return (given or gone).pop()

        async def send(message):
            pass

        await self.client.app(scope_of("POST", PATH, JSON), receive, send)


class Refused(Exception):
    """A request is refused: with 400 and a sentence."""


def ok(response):
    if response.status_code == 400:
        raise Refused(response.json()["error"]["message"])
    assert response.status_code == 200, response.text
    return response


def is_right(plain, answers, count) -> None:
    """So many answers, each the unpatched model's greedy one."""
    assert len(answers) == count
    for ids, logits, taken in answers:
        with torch.no_grad():
            want = plain(torch.tensor([ids + taken[:-1]])).logits[0, len(ids) - 1 :].float()
        assert tiny.relative(logits, want) < CLOSE
        best = want.max(-1).values - want.gather(1, torch.tensor(taken)[:, None])[:, 0]
        assert (best < CLOSE * want.abs().max()).all()


def is_same(answers, others, most=CLOSE) -> None:
    """The same prompts got the same logits."""
    assert len(answers) == len(others) > 0
    for (ids, logits, taken), (other_ids, other_logits, other_taken) in zip(answers, others, strict=True):
        assert ids == other_ids and taken == other_taken
        assert tiny.relative(logits, other_logits) < most


PROMPTS = dict(prompt=f"{SYSTEM}{FIRST}"), dict(prompt=SECOND)
FEW = dict(budget=64)


def one(net, plain):
    """A request alone."""
    is_right(plain, Served(net).together(PROMPTS[0]), 1)


def alone(net, **options) -> list:
    served = Served(net, **options)
    return sorted((served.together(each)[0] for each in PROMPTS), key=lambda answer: answer[0])


def two(net, plain):
    """Two requests at once: as each of them alone, with few slots and with many."""
    is_right(plain, Served(net).together(*PROMPTS), 2)
    is_same(Served(net, **FEW).together(*PROMPTS), alone(net, **FEW))


def several(net, plain):
    """A request of two answers."""
    is_right(plain, Served(net).together(PROMPTS[0] | dict(n=2)), 2)


def again(net, plain):
    """Chats that begin with one system prompt, and slots of all tokens or of some."""
    served, few = Served(net), Served(net, **FEW)
    for question in (FIRST, SECOND, FIRST):
        answer, found = served.chat(question)
        is_right(plain, found, 1)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (cached > 0) == served.client.server.manager.reader.parts  # of a state or a window there are no first tokens
    _, *others = (few.chat(FIRST)[1] for _ in range(3))
    is_same(*others)


def stored(net, plain):
    """Two questions about a stored text."""
    served = Served(net)
    ok(served.client.store(text=SYSTEM))
    for question in (FIRST, SECOND):
        is_right(plain, served.chat(question, system=None, kvevict=dict(text="text"))[1], 1)


def turns(net, plain):
    """A chat's second and third turn."""
    served, said = Served(net), [FIRST]
    for _ in range(3):
        answer, found = served.chat(*said)
        is_right(plain, found, 1)
        said += [answer["choices"][0]["message"]["content"] or "Yes.", SECOND]


def cancelled(net, plain):
    """A client leaves beside another one, whose answer stays right, as the next one's is."""
    served = Served(net)
    is_right(plain, served.together(PROMPTS[0] | dict(max_tokens=24), PROMPTS[1], leaves=True), 1)
    is_right(plain, served.together(PROMPTS[0]), 1)
    served.client.server.scheduler.submit(bool).result()
    assert served.client.server.scheduler.running == 0


def packed(net, plain):
    """Slots of 8 bits: two requests at once as each of them alone."""
    is_same(Served(net, kv="int8").together(*PROMPTS), alone(net, kv="int8"), ROUNDED)


COLUMNS = {
    "one": one, "two at once": two, "n = 2": several, "a beginning again": again, "a stored text": stored,
    "later turns": turns, "cancelled": cancelled, "8 bits": packed,
}  # fmt: skip
EQUAL = "="


def candidates() -> list:
    """(type, class) of the types that are patched and have something special."""
    right = {line.name for line in known.table() if line.verdict in (known.EQUAL, known.LIMITED)}
    if WHICH == "sample":
        return [(name, kind) for name, kind in zoo.types() if name in right.intersection(SAMPLE)]
    return [(name, kind) for name, kind in zoo.types() if name in right and special(name)]


@functools.lru_cache(1)
def models(name, kind):
    """A tiny model of a type, and one that stays unpatched."""
    net = zoo.make(name, kind)
    return net, copy.deepcopy(net)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name, kind", candidates(), ids=[name for name, _ in candidates()])
def test_a_type_served(name, kind, column):
    net, plain = models(name, kind)
    try:
        COLUMNS[column](net, plain)
        found = EQUAL
    except (ValueError, Refused) as error:
        found = str(error)
        assert type(families.find_decoder(net)).__name__ in found  # it is refused by its name
    finally:
        kvevict.unpatch(net)
    if WHICH == "write":
        write(name, column, found)
    else:
        assert found == table().get(name, {}).get(column, EQUAL)


def table() -> dict:
    """{type: {column: result}}"""
    head, *lines = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines())
    return {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines}


def write(name, column, found) -> None:
    """Put a result into the table. For a run without workers (-n 0)."""
    rows = table() if TABLE.exists() else {}
    row = dict(holds=", ".join(special(name))) | dict.fromkeys(COLUMNS, "") | rows.get(name, {})
    rows[name] = row | {column: " ".join(found.split())}
    lines = ["\t".join(["type", "holds", *COLUMNS])]
    lines += ["\t".join([name, *rows[name].values()]) for name in sorted(rows)]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
