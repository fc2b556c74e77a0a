"""Every field of the openai package's requests: obeyed with an effect, refused by its name, or harmless."""

import functools
import json
import sys

import pytest
import torch
from serving import FILLER, TEMPLATE, Client, asks, events, model, server, unpatched  # noqa: F401

from kvevict.serve.fields import CHAT, COMPLETIONS, HARMLESS, OBEYED, REFUSED, RESPONSES, TABLE, TEXTS

openai = pytest.importorskip("openai")
from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion  # noqa: E402
from openai.types.responses import (  # noqa: E402
    Response,
)

ANSWERS = {CHAT: ChatCompletion, COMPLETIONS: Completion, RESPONSES: Response}
WHO = f"The code of Naislet is 364735. {asks('Naislet')}"
LONG = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
OPENING = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% if enable_thinking %}Think.\n{% endif %}"
    "{% if reasoning_effort %}Effort: {{ reasoning_effort }}.\n{% endif %}"
)
TOOLS = {
    CHAT: [dict(type="function", function=dict(name="f", parameters=dict(type="object", properties={})))],
    RESPONSES: [dict(type="function", name="f", parameters=dict(type="object", properties={}), strict=False)],
}


@functools.cache
def client():
    return Client(server(template=OPENING + TEMPLATE))


def body_of(path, text=WHO) -> dict:
    if path == COMPLETIONS:
        return dict(prompt=f"{text}\nAnswer:", max_tokens=8)
    if path == CHAT:
        return dict(messages=[dict(role="user", content=text)], max_tokens=8)
    return dict(input=text, max_output_tokens=8)


def parted(body: dict) -> dict:
    """A body of names with dots."""
    made: dict = {}
    for name, value in body.items():
        first, _, rest = name.partition(".")
        if rest:
            made.setdefault(first, {})[rest] = value
        else:
            made[first] = value
    return made


def posted(path, **changes):
    return client().post(path, **body_of(path) | parted(changes))


def asked(path, **changes) -> dict:
    response = posted(path, **changes)
    assert response.status_code == 200, response.text
    return response.json()


@functools.cache
def usual(path) -> dict:
    """The answer to a request without any changes."""
    return asked(path)


def text_of(said: dict) -> str:
    if "output" in said:
        return said["output"][0]["content"][0]["text"]
    choice = said["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def counted(said: dict) -> tuple:
    """Tokens read, and written."""
    usage = said["usage"]
    return tuple(usage.get(f"{one}_tokens", usage.get(f"{other}_tokens")) for one, other in
                 (("prompt", "input"), ("completion", "output")))  # fmt: skip


# -- the table ---------------------------------------------------------------------------------------------------------


def every(kind):
    return [(path, name) for path in ANSWERS for name, field in TABLE[path].items() if field.kind == kind]


@pytest.mark.parametrize("path, name", every(REFUSED))
def test_a_refused_field(path, name):
    """400 with its name, unless its value asks for nothing."""
    for value, stream in (("x", False), (3, True), ([3], False)):
        error = posted(path, **{name: value, "stream": stream}).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", name) and name in error["message"]
    for value in (None, *TABLE[path][name].usual):
        assert text_of(asked(path, **{name: value})) == text_of(usual(path))


SAMPLES = {
    "metadata": {"a": "b"}, "store": True, "stream_options.include_obfuscation": False, "prediction": dict(
        type="content", content="x"), "prompt_cache_options": {}, "max_tool_calls": 3,
}  # fmt: skip


@pytest.mark.parametrize("path, name", every(HARMLESS))
def test_a_harmless_field(path, name):
    streams = dict(stream=True) if name.startswith("stream_options") else {}
    response = posted(path, **{name: SAMPLES.get(name, "auto")}, **streams)
    assert response.status_code == 200, response.text
    if not streams:
        assert text_of(response.json()) == text_of(usual(path))


@pytest.mark.parametrize("path", ANSWERS)
def test_an_unknown_field(path):
    for name, value in (("unknown", 3), ("stream_options.other", True), ("kvevict.bugdet", 3)):
        error = posted(path, **{name: value}, stream=True).json()["error"]
        assert error["param"] == name and name in error["message"]
    assert posted(path, stream_options=True).json()["error"]["param"] == "stream_options"


# -- effects -----------------------------------------------------------------------------------------------------------


def draws(path, **changes) -> set:
    """Answers that are drawn with some seeds."""
    return {text_of(asked(path, temperature=1.5, seed=seed, **changes)) for seed in range(4)}


def is_greedy(name, value):
    """With this value the likeliest token is always drawn."""
    return lambda path: draws(path, **{name: value}) == {text_of(usual(path))} != draws(path)


def is_read(name, value):
    return lambda path: counted(asked(path, **{name: value}))[0] > counted(usual(path))[0]


def is_length(name, value):
    return lambda path: counted(asked(path, **{LONG[path]: None} | {name: value}))[1] == 3


def is_refused(name, value, status):
    def effect(path):
        response = posted(path, **{name: value})
        return response.status_code == status and name.rpartition(".")[2] in response.json()["error"]["message"]

    return effect


def usage_comes(path):
    plain = events(posted(path, stream=True))
    last = events(posted(path, stream=True, **{"stream_options.include_usage": True}))[-1]
    return last["choices"] == [] and last["usage"] == asked(path)["usage"] and not any("usage" in e for e in plain)


def is_penalised(name):
    def effect(path):
        ids = [1000, 1001, 1002]
        with constant(ids, [10.0, 9.5, 9.0]):
            for number in (0.3, 2, -1):
                frequency, presence = (number, 0) if name == "frequency_penalty" else (0, number)
                want, logits = [], {1000: 10.0, 1001: 9.5, 1002: 9.0}
                for _ in range(8):  # OpenAI's formula
                    left = {t: v - frequency * want.count(t) - presence * (t in want) for t, v in logits.items()}
                    want.append(max(left, key=left.get))
                assert text_of(asked(path, **{name: number})) == client().server.tokenizer.decode(want)
        return True

    return effect


class constant:
    """Inside, a model whose logits are always these."""

    def __init__(self, ids, logits):
        self.ids, self.logits = ids, torch.tensor(logits)

    def __enter__(self):
        def forced(module, args, kwargs, output):
            output.logits[:] = -100
            output.logits[..., self.ids] = self.logits.to(output.logits)

        self.hook = model().register_forward_hook(forced, with_kwargs=True)

    def __exit__(self, *error):
        self.hook.remove()


def is_biased(path):
    token = client().server.tokenizer(" boat", add_special_tokens=False)["input_ids"][0]
    letters = client().server.tokenizer.decode([token])
    return text_of(asked(path, logit_bias={str(token): 100})) == letters * 8


def has_probabilities(path):
    said = asked(path, logprobs=2 if path == COMPLETIONS else True)
    return said["choices"][0]["logprobs"] and asked(path)["choices"][0]["logprobs"] is None


def is_json(name, value):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    return lambda path: text_of(asked(path, **{name: value})).startswith('{"')


EFFECTS = {
    "model": is_refused("model", "other", 404), "kvevict.budget": is_refused("kvevict.budget", 257, 400),
    "kvevict.policy": is_refused("kvevict.policy", "nothing", 400),
    "kvevict.text": is_refused("kvevict.text", "x", 404), "kvevict.question": is_refused("kvevict.question", "y", 400),
    "stream": lambda path: events(posted(path, stream=True)) != [],
    "temperature": lambda path: len(draws(path)) > 1 == len({text_of(asked(path, temperature=0)) for _ in range(2)}),
    "top_p": is_greedy("top_p", 1e-6), "top_k": is_greedy("top_k", 1), "min_p": is_greedy("min_p", 1),
    "seed": lambda path: draws(path) == draws(path) and len(draws(path)) > 1,
    "generation_config": is_length("generation_config", json.dumps(dict(max_new_tokens=3))),
    "max_tokens": is_length("max_tokens", 3), "max_completion_tokens": is_length("max_completion_tokens", 3),
    "max_output_tokens": is_length("max_output_tokens", 3),
    "n": lambda path: len(asked(path, n=3)["choices"]) == 3,
    "stop": lambda path: text_of(asked(path, stop="code")) == text_of(asked(path)).partition("code")[0],
    "stream_options.include_usage": usage_comes, "logit_bias": is_biased, "logprobs": has_probabilities,
    "frequency_penalty": is_penalised("frequency_penalty"), "presence_penalty": is_penalised("presence_penalty"),
    "top_logprobs": lambda path: [len(each["top_logprobs"]) for each in asked(path, logprobs=True, top_logprobs=3)[
        "choices"][0]["logprobs"]["content"]] == [3] * 8,
    "tools": lambda path: is_read("tools", TOOLS[path])(path),
    "response_format": lambda path: is_json("response_format", dict(type="json_object"))(path),
    "text.format": lambda path: is_json("text.format", dict(type="json_object"))(path),
    "tool_choice": lambda path: counted(asked(path, tools=TOOLS[path], tool_choice="none")) == counted(usual(path)),
    "parallel_tool_calls": None,  # test_a_single_call
    "chat_template_kwargs": is_read("chat_template_kwargs", dict(enable_thinking=True)),
    "reasoning_effort": is_read("reasoning_effort", "low"), "reasoning.effort": is_read("reasoning.effort", "low"),
    "messages": is_read("messages", [dict(role="user", content=WHO * 2)]),
    "prompt": is_read("prompt", WHO * 2), "input": is_read("input", WHO * 2),
    "instructions": is_read("instructions", "Be brief."),
}  # fmt: skip


@pytest.mark.parametrize("path, name", every(OBEYED))
def test_an_obeyed_field(path, name):
    effect = EFFECTS[name]
    assert effect is None or effect(path)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("value, said", [
    (dict(tool_choice="required"), "tool_choice"), (dict(tool_choice=dict(type="function", name="f")), "tool_choice"),
    (dict(tool_choice=dict(type="allowed_tools"), tools=[]), "tool_choice"),
    (dict(tools=[dict(type="custom", name="f")]), "tools"), (dict(tools=[dict(type="web_search")]), "tools"),
    (dict(tools=[dict(type="function", name="f", strict=True)]), "strict"),
])  # fmt: skip
def test_values_that_are_refused(path, value, said):
    response = posted(path, **value)
    error = response.json()["error"]
    assert response.status_code == 400 and said in error["message"] and error["param"] == next(iter(value))


def calling(arguments) -> list:
    call = dict(id="1", type="function", function=dict(name="f", arguments=arguments))
    said = [dict(role="assistant", content=None, tool_calls=[call]), dict(role="tool", tool_call_id="1", content="3")]
    return [dict(role="user", content=WHO), *said]


def test_calls_without_arguments():
    """A client that joins the parts of a stream has no letters of them."""
    assert text_of(asked(CHAT, messages=calling(""))) == text_of(asked(CHAT, messages=calling("{}")))


BAD = dict(type="json_schema", json_schema=dict(name="x", schema=dict(type="nothing")), schema=dict(type="nothing"))
WRONG = [  # endpoint, change of a body, the field that is wrong
    *((CHAT, dict(kvevict=dict(policy=policy)), "kvevict.policy") for policy in ("nothing", "lagkv", "speckv", 3)),
    *((CHAT, dict(kvevict=dict(budget=budget)), "kvevict.budget") for budget in (1, 257, 0.9, "5XB", "1GiB", [])),
    (CHAT, dict(kvevict=dict(policy="lagkv", budget=5)), "kvevict.budget"),
    *((CHAT, dict(kvevict=dict(text=text)), "kvevict.text") for text in ("none", "a/b", 3)),
    (CHAT, dict(kvevict=dict(question="zebra")), "kvevict.question"),
    (CHAT, dict(kvevict=dict(share="never")), "kvevict.share"),
    (CHAT, dict(kvevict=dict(nothing=1)), "kvevict.nothing"), (CHAT, dict(kvevict=3), "kvevict"),
    (CHAT, dict(stream_options=dict(include_usage=True)), "stream_options"),
    (CHAT, dict(generation_config="{"), "generation_config"),
    (CHAT, dict(response_format=BAD), "response_format"), (RESPONSES, dict(text=dict(format=BAD)), "text.format"),
    (CHAT, dict(messages=calling("no")), "messages"),
    *((RESPONSES, dict(input=[dict(type="function_call_output", call_id="1", output=each)]), "input")
      for each in (None, 3, [dict(type="input_image", image_url="")], [3])),
    (TEXTS, dict(name="a/b"), "name"), (TEXTS, dict(text="%PDF-"), "text"), (TEXTS, dict(policy="nothing"), "policy"),
    *((TEXTS, dict(budget=budget), "budget") for budget in (1, 2000, "5XB")),
]  # fmt: skip


@pytest.mark.parametrize("path, change, name", WRONG, ids=[f"{path}-{change}"[:60] for path, change, _ in WRONG])
def test_an_error_names_its_field(path, change, name):
    usual = dict(name="a", text=FILLER * 20) if path == TEXTS else body_of(path)
    response = client().post(path, **usual | change)
    assert 400 <= response.status_code < 500 and response.json()["error"]["param"] == name, response.text


def test_an_effort_that_the_template_does_not_have():
    plain = Client(server())
    assert "reasoning_effort" in plain.chat("Once", reasoning_effort="low").json()["error"]["message"]
    response = plain.post(RESPONSES, **body_of(RESPONSES), reasoning=dict(effort="low"))
    assert "reasoning.effort" in response.json()["error"]["message"]


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_probabilities(path):
    """Those of the model, of each token; the same whole and as a stream."""
    number, top = dict(logprobs=2) if path == COMPLETIONS else dict(logprobs=True, top_logprobs=2), 2
    said = asked(path, **number, seed=3, temperature=1.5)
    found = said["choices"][0]["logprobs"]
    chunks = events(posted(path, **number, seed=3, temperature=1.5, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    if path == COMPLETIONS:
        assert {name: [each for part in parts for each in part[name]] for name in parts[0]} == found
        numbers, likeliest = found["token_logprobs"], [list(each.values()) for each in found["top_logprobs"]]
        assert "".join(found["tokens"]) == text_of(said)
        assert [text_of(said)[at:].startswith(token) for at, token in zip(found["text_offset"], found["tokens"])] == [
            True
        ] * 8
    else:
        content = [each for part in parts for each in part["content"]]
        assert content == found["content"]
        assert b"".join(bytes(each["bytes"]) for each in content).decode() == text_of(said)
        numbers = [each["logprob"] for each in content]
        likeliest = [[other["logprob"] for other in each["top_logprobs"]] for each in content]
    tokenizer = client().server.tokenizer
    ids = tokenizer(f"{WHO}\nAnswer:{text_of(said)}", return_tensors="pt").input_ids
    with torch.no_grad():
        logs = model()(ids).logits[0, -9:-1].float().log_softmax(-1)
    want = logs.gather(1, ids[0, -8:, None])[:, 0]
    assert torch.allclose(torch.tensor(numbers).exp(), want.exp(), atol=0.02)  # in 16 bits
    found, want = torch.tensor(likeliest).sort(-1).values.exp(), logs.topk(top).values.sort(-1).values.exp()
    assert torch.allclose(found, want, atol=0.02)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("whose", ["request", "model"])
@pytest.mark.parametrize("bias", [{}, {"1000": 100}])
def test_probabilities_are_without_a_repetition_penalty(path, whose, bias, monkeypatch):
    """The first token is another, and those that are likely are the same; a bias counts."""
    number = dict(logprobs=5) if path == COMPLETIONS else dict(logprobs=True, top_logprobs=5)
    number |= body_of(path, f"Well. {WHO}") | dict(max_tokens=1, logit_bias=bias)
    plain = asked(path, **number)["choices"][0]
    if whose == "model":
        monkeypatch.setattr(model().generation_config, "repetition_penalty", 10.0)
    else:
        number["generation_config"] = json.dumps(dict(repetition_penalty=10.0))
    found = asked(path, **number)["choices"][0]
    likeliest = [
        each["top_logprobs"][0] if path == COMPLETIONS else each["content"][0]["top_logprobs"]
        for each in (plain["logprobs"], found["logprobs"])
    ]
    assert likeliest[0] == likeliest[1]
    assert bias or text_of(dict(choices=[plain])) != text_of(dict(choices=[found]))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_several_answers(path):
    """Each is the one of its seed, whole and as a stream; the usage counts all."""
    said = asked(path, n=3, seed=5, temperature=1.5)
    texts = [text_of(dict(choices=[choice])) for choice in said["choices"]]
    assert texts == [text_of(asked(path, seed=5 + at, temperature=1.5)) for at in range(3)]
    assert len(set(texts)) > 1 and [choice["index"] for choice in said["choices"]] == [0, 1, 2]
    read, written = counted(said)
    assert (read, written) == (counted(usual(path))[0], 24)
    chunks = [event["choices"][0] for event in events(posted(path, n=3, seed=5, temperature=1.5, stream=True))]
    for at, text in enumerate(texts):
        own = [each for each in chunks if each["index"] == at]
        assert "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in own) == text
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["length"]


def test_tokens_are_drawn_from_all():
    """Transformers' default is the likeliest 50; a model's configuration may say so."""
    ids = list(range(1000, 1400))
    few = {client().server.tokenizer.decode([token]) for token in ids[:50]}
    with constant(ids, [5.0 - at / 32 for at in range(len(ids))]):
        drawn = set()
        for seed in range(3):
            said = asked(COMPLETIONS, temperature=1, max_tokens=60, seed=seed, logprobs=0)
            drawn |= set(said["choices"][0]["logprobs"]["tokens"])
        own = asked(COMPLETIONS, temperature=1, max_tokens=60, top_k=5, logprobs=0)
    assert drawn - few and len(set(own["choices"][0]["logprobs"]["tokens"])) <= 5


@pytest.mark.parametrize("path", ANSWERS)
def test_nulls(path):
    """As `model_dump()` writes them."""
    nulls = {name: None for name in TABLE[path] if "." not in name and name not in body_of(path)}
    assert text_of(asked(path, **nulls)) == text_of(usual(path))
    if path == COMPLETIONS:
        return
    call = dict(name="f", arguments='{"x": null}')
    if path == CHAT:
        before = ChatCompletion.model_validate(asked(CHAT)).choices[0].message
        item = dict(before.model_dump(), tool_calls=[dict(id="1", type="function", function=call)])
        result = dict(role="tool", tool_call_id="1", content="3", name=None)
        field = dict(messages=[*body_of(path)["messages"], item, result])
        assert None in before.model_dump().values()
    else:
        output = Response.model_validate(asked(path)).model_dump()["output"]
        output += [dict(type="reasoning", id="r", summary=[], content=None, encrypted_content=None)]
        output += [dict(call, type="function_call", call_id="1", id=None, status=None)]
        output += [dict(type="function_call_output", call_id="1", output=[dict(type="input_text", text="3")])]
        field = dict(input=[dict(role="user", content=WHO, type=None), *output])
    assert counted(asked(path, **field))[0] > counted(usual(path))[0]


def said(role, text) -> dict:
    return dict(type="message", role=role, content=text)


def reasoned(text, part="content", kind="reasoning_text") -> dict:
    return dict(type="reasoning", id="r", summary=[]) | {part: [dict(type=kind, text=text)]}


def called(name) -> dict:
    return dict(type="function_call", call_id=name, name="look", arguments="{}")


USER, DONE = ("user", "?", None, ""), ("assistant", "done", None, "")
ORDERS = [  # items; messages: role, text, reasoning, calls, where the template has reasoning; the same where it has not
    ([reasoned("A"), said("assistant", "I look"), reasoned("B"), called("1"), called("2")],
     [("assistant", "I look", "A", ""), ("assistant", "", "B", "12")], [("assistant", "I look", "A\n\nB", "12")]),
    ([reasoned("A"), called("1"), reasoned("B"), called("2")],
     [("assistant", "", "A", "1"), ("assistant", "", "B", "2")], [("assistant", "", "A\n\nB", "12")]),
    ([reasoned("A"), said("user", "?")], *[[("assistant", "", "A", ""), USER]] * 2),
    ([reasoned("A"), reasoned("B", "summary", "summary_text"), reasoned(""), said("assistant", "x")],
     *[[("assistant", "x", "A\n\nB", "")]] * 2),
    ([said("assistant", "x"), reasoned("A"), reasoned("B"), called("1")],
     [("assistant", "x", None, ""), ("assistant", "", "A\n\nB", "1")], [("assistant", "x", "A\n\nB", "1")]),
    ([called("1"), said("assistant", "x")], *[[("assistant", "", None, "1"), ("assistant", "x", None, "")]] * 2),
]  # fmt: skip


@pytest.mark.parametrize("items, apart, together", ORDERS)
def test_reasoning_stays_where_it_stands(items, apart, together):
    from kvevict.serve.messages import of_input

    for template, want in (("reasoning_content", apart), ("x", together)):
        knows = type("Knows", (), dict(chat_template=template))
        made = of_input(knows, [said("user", "?"), *items, said("user", "?"), said("assistant", "done")], None)
        told = [
            (each["role"], each["content"], each.get("reasoning_content"),
             "".join(call["id"] for call in each.get("tool_calls", []))) for each in made
        ]  # fmt: skip
        assert told == [USER, *want, USER, DONE]
    asked(RESPONSES, input=[said("user", "?"), *items, said("user", WHO)])


def test_an_input_s_items_are_messages():
    from kvevict.serve.messages import of_chat, of_input

    tokenizer = client().server.tokenizer
    items = [
        dict(role="developer", content="Be kind."), dict(role="user", content=[dict(type="input_text", text="Well?")]),
        dict(type="reasoning", content=[dict(type="reasoning_text", text="Hm.")]),
        dict(type="function_call", call_id="1", name="f", arguments='{"x": null}'),
        dict(type="function_call_output", call_id="1", output=[dict(type="input_text", text="3")]),
    ]  # fmt: skip
    call = dict(id="1", type="function", function=dict(name="f", arguments=dict(x=None)))
    assert of_input(tokenizer, items, "Be brief.") == [
        dict(role="system", content="Be brief.\n\nBe kind."), dict(role="user", content="Well?"),
        dict(role="assistant", content="", reasoning_content="Hm.", tool_calls=[call]),
        dict(role="tool", content="3", tool_call_id="1"),
    ]  # fmt: skip
    assert of_input(tokenizer, items[1]["content"], None) == [dict(role="user", content="Well?")]
    knows = type("Knows", (), dict(chat_template=f"{TEMPLATE}{{# developer #}}"))
    assert of_chat(knows, items[:1]) == items[:1]


def test_a_prompt_as_a_list():
    tokenizer, text = client().server.tokenizer, body_of(COMPLETIONS)["prompt"]
    ids = tokenizer(text)["input_ids"]
    for prompt in ([text], ids, [ids]):
        assert asked(COMPLETIONS, prompt=prompt)["choices"] == usual(COMPLETIONS)["choices"]
        assert counted(asked(COMPLETIONS, prompt=prompt)) == counted(usual(COMPLETIONS))
    assert posted(COMPLETIONS, prompt=ids * 200).json()["error"]["code"] == "context_length_exceeded"


def test_a_model_by_its_name():
    [known] = client().ask("GET", "/v1/models").json()["data"]
    assert client().ask("GET", "/v1/models/small").json() == known
    for name in ("other", "small/other"):
        response = client().ask("GET", f"/v1/models/{name}")
        assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


# -- forms of answers --------------------------------------------------------------------------------------------------

SCHEMA = dict(
    type="object", required=["code", "kind"], additionalProperties=False,
    properties=dict(code=dict(type="integer", minimum=0, maximum=999), kind=dict(enum=["a", "b", None])),
)  # fmt: skip


def formed(path, schema) -> dict:
    if path == RESPONSES:
        return {"text.format": dict(type="json_schema", name="x", schema=schema, strict=True)}
    return dict(response_format=dict(type="json_schema", json_schema=dict(name="x", schema=schema, strict=True)))


def tools_of(path, schema, *names) -> list:
    functions = [dict(name=name, parameters=schema, strict=True) for name in names]
    if path == RESPONSES:
        return [dict(function, type="function") for function in functions]
    return [dict(type="function", function=function) for function in functions]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_answer_by_a_schema(path):
    """JSON of the schema, whatever is drawn; whole and as a stream."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    found = set()
    for seed in range(5):
        changes = dict(formed(path, SCHEMA), seed=seed, temperature=2) | {LONG[path]: 60}
        text, stream = text_of(asked(path, **changes)), events(posted(path, **changes, stream=True))
        told = json.loads(text)
        assert list(told) == ["code", "kind"] and 0 <= told["code"] <= 999 and told["kind"] in ("a", "b", None)
        if path == CHAT:
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in stream) == text
        else:
            assert text_of(stream[-1]["response"]) == text
        found.add(text)
    assert len(found) > 1
    cut = asked(path, **formed(path, SCHEMA), **{LONG[path]: 3})
    assert cut.get("status") == "incomplete" or cut["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_object_has_the_properties_that_are_named(path):
    """Unless its schema says additionalProperties."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
    comma = [at for letters, at in client().server.tokenizer.get_vocab().items() if letters.startswith(",")]
    with constant(comma, [10.0] * len(comma)):  # the model would write more and more properties
        closed = text_of(asked(path, **formed(path, schema), temperature=0.5, seed=1, **{LONG[path]: 60}))
        tools = dict(tools=tools_of(path, schema, "g"), tool_choice="required", parallel_tool_calls=False)
        called = asked(path, **tools, temperature=0.5, seed=1, **{LONG[path]: 100})
        opened = formed(path, schema | dict(additionalProperties=True))
        more = text_of(asked(path, **opened, temperature=0.5, seed=1, **{LONG[path]: 60}))
    assert list(json.loads(closed)) == ["code", "kind"]
    [item] = called["output"] if path == RESPONSES else called["choices"]
    assert (item["type"] if path == RESPONSES else item["finish_reason"]) in ("function_call", "tool_calls")
    assert more[len(closed) - 1] == ","


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("choice, single, want", [("required", False, None), ("required", True, 1), ("g", False, 1)])
def test_a_forced_call(path, choice, single, want):
    """It follows the function's schema; a call that is cut is text."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    if choice != "required":
        choice = dict(type="function", function=dict(name="g")) if path == CHAT else dict(type="function", name="g")
    changes = dict(tools=tools_of(path, SCHEMA, "f", "g"), tool_choice=choice, parallel_tool_calls=not single, seed=3)
    vocabulary = client().server.tokenizer.get_vocab()
    ends = [at for letters, at in vocabulary.items() if letters in ("]", "}]")]
    with constant(ends, [10.0] * len(ends)):  # the model would write more and more calls
        said = asked(path, **changes, temperature=0.5, **{LONG[path]: 200})
    if path == CHAT:
        calls = [call["function"] for call in said["choices"][0]["message"]["tool_calls"]]
        assert said["choices"][0]["finish_reason"] == "tool_calls" and not text_of(said)
    else:
        calls = said["output"]
        assert {call["type"] for call in calls} == {"function_call"}
    assert len(calls) == want if want else len(calls) >= 1
    for call in calls:
        assert list(json.loads(call["arguments"])) == ["code", "kind"]
        assert call["name"] == "g" if isinstance(choice, dict) else call["name"] in "fg"
    assert text_of(asked(path, **changes, **{LONG[path]: 5})).lstrip("[").startswith('{"name')


def place(city):
    return dict(type="object", properties=dict(city=dict(enum=[city])), required=["city"], additionalProperties=False)


def trip(to, **more):
    return dict(type="object", properties=dict(to={"$ref": to}), required=["to"]) | more


def tree(root):
    """Trees whose leaves have an empty list."""
    kids = dict(type="array", maxItems=1, items={"$ref": root})
    return dict(type="object", properties=dict(v=dict(const=1), kids=kids), required=["v", "kids"])


CITY, TREE = '{"to": {"city": "Rome"}}', '{"v": 1, "kids": [{"v": 1, "kids": []}]}'
DEFS, DRAFT = {"$defs": dict(Place=place("Rome"))}, "http://json-schema.org/draft-0%d/schema#"
REFERENCES = {  # the schema of parameters, arguments
    "definitions": (trip("#/$defs/Place", **DEFS), CITY),
    "of draft 7": (trip("#/definitions/Place", **{"$schema": DRAFT % 7}, definitions=DEFS["$defs"]), CITY),
    "of draft 4": (trip("#/definitions/Place", **{"$schema": DRAFT % 4}, definitions=DEFS["$defs"]), CITY),
    "recursive": ({"$ref": "#/$defs/Tree", "$defs": dict(Tree=tree("#/$defs/Tree"))}, TREE),
    "its own root": (tree("#"), TREE),
    "a property": (trip("#/properties/by", properties=dict(by=place("Rome"), to={"$ref": "#/properties/by"})), CITY),
    "an anchor": (trip("#here", **{"$defs": dict(Place=place("Rome") | {"$anchor": "here"})}), CITY),
    "an id": (trip("trip#/$defs/Place", **{"$id": "http://example/trip"}, **DEFS), CITY),
    "an id that others have": (trip("#/$defs/Place", **{"$id": "http://example/schema"}, **DEFS), CITY),
}  # fmt: skip


@pytest.mark.parametrize("choice", ["required", dict(type="function", function=dict(name="go"))])
@pytest.mark.parametrize("name", REFERENCES)
def test_references_in_the_parameters_of_a_tool(name, choice):
    """They mean the same in the schema of calls as in that of the parameters alone."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    from kvevict.serve.grammar import Grammars, schema_of, schema_of_calls

    schema, arguments = REFERENCES[name]
    tokenizer = client().server.tokenizer
    grammars = Grammars(tokenizer, [0])

    def takes(of, text, before="", after=""):
        matcher, text = grammars.matcher(of), before + text + after
        return matcher.consume_tokens(tokenizer(text, add_special_tokens=False)["input_ids"]) and matcher.is_accepting()

    other = trip("#/$defs/Place", **{"$id": "http://example/schema", "$defs": dict(Place=place("Oslo"))})
    tools = tools_of(CHAT, other, "first") + tools_of(CHAT, schema, "go") + tools_of(CHAT, other, "last")
    calls, around = schema_of_calls(choice, tools, True), ('{"name": "go", "arguments": ', "}")
    assert takes(schema_of(formed(CHAT, schema)), arguments)
    assert takes(calls, arguments, *around)
    for wrong in (arguments.replace("Rome", "Oslo"), arguments.replace('"v": 1, "kids": []', '"name": "go"')):
        assert wrong == arguments or not takes(calls, wrong, *around)


@pytest.mark.parametrize("path, field", [(CHAT, "messages"), (RESPONSES, "input")])
def test_roles(path, field):
    """OpenAI's are taken, and those that the template names."""
    named = "{% for m in messages if m.role != 'bob' %}{{ m.content }}{% endfor %}"
    for role, template, want in (
        ("bob", TEMPLATE, 400), ("bob", named, 200), ("developer", TEMPLATE, 200), ("tool", TEMPLATE, 200),
    ):  # fmt: skip
        turns = [dict(role="user", content="Once"), dict(role=role, content="upon a time")]
        response = Client(server(template=template)).post(path, **{field: turns}, **{LONG[path]: 2})
        assert response.status_code == want, response.text
        if want == 400:
            error = response.json()["error"]
            assert error["param"] == field and "user, assistant, tool or function" in error["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_forms_that_are_refused(path):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    name = "text.format" if path == RESPONSES else "response_format"
    wrong = "json", 3, [], dict(type="xml"), dict(type="json_schema"), dict(type="json_schema", json_schema=3, schema=3)
    for value in wrong:
        error = posted(path, **{name: value}).json()["error"]
        assert error["param"] == name and name in error["message"], value
    missing = posted(path, **{name: dict(type="json_schema")}).json()["error"]["message"]
    assert missing.endswith("needs the field schema" if path == RESPONSES else "needs the field json_schema")
    for schema in (dict(patternProperties=3), dict(type="nothing"), {"$ref": "http://other.example/x"}):
        response = posted(path, **formed(path, schema))
        assert response.status_code == 400 and "schema" in response.json()["error"]["message"], response.text
    response = posted(path, **formed(path, SCHEMA), tools=TOOLS[path])
    assert response.status_code == 400 and name in response.json()["error"]["message"]
    other = dict(type="function", function=dict(name="h")) if path == CHAT else dict(type="function", name="h")
    assert "no tool 'h'" in posted(path, tools=TOOLS[path], tool_choice=other).json()["error"]["message"]


def test_without_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    response = posted(CHAT, response_format=dict(type="json_object"))
    assert response.status_code == 400 and "pip install llguidance" in response.json()["error"]["message"]
    assert posted(CHAT, response_format=dict(type="text")).status_code == 200
