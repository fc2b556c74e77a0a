"""Every field of the openai package's requests: obeyed with an effect, refused by its name, or harmless."""

import functools
import json

import pytest
import torch
from serving import FILLER, TEMPLATE, Client, asks, events, model, server, unpatched  # noqa: F401

from kvevict.serve.fields import CHAT, COMPLETIONS, HARMLESS, OBEYED, REFUSED, TABLE, TEXTS

pytest.importorskip("openai")
from openai.types.chat import ChatCompletion

from kvevict.serve.messages import of_chat

PATHS = CHAT, COMPLETIONS
WHO = f"The code of Naislet is 364735. {asks('Naislet')}"
OPENING = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% if enable_thinking %}Think.\n{% endif %}"
    "{% if reasoning_effort %}Effort: {{ reasoning_effort }}.\n{% endif %}"
)
TOOLS = [dict(type="function", function=dict(name="f", parameters=dict(type="object", properties={}), strict=False))]


@functools.cache
def client():
    return Client(server(template=OPENING + TEMPLATE))


def body_of(path, text=WHO) -> dict:
    if path == COMPLETIONS:
        return dict(prompt=f"{text}\nAnswer:", max_tokens=8)
    return dict(messages=[dict(role="user", content=text)], max_tokens=8)


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
    choice = said["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def counted(said: dict) -> tuple:
    """Tokens read, and written."""
    return said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]


def every(kind):
    return [(path, name) for path in PATHS for name, field in TABLE[path].items() if field.kind == kind]


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
        type="content", content="x"), "prompt_cache_options": {},
}  # fmt: skip


@pytest.mark.parametrize("path, name", every(HARMLESS))
def test_a_harmless_field(path, name):
    streams = dict(stream=True) if name.startswith("stream_options") else {}
    response = posted(path, **{name: SAMPLES.get(name, "auto")}, **streams)
    assert response.status_code == 200, response.text
    if not streams:
        assert text_of(response.json()) == text_of(usual(path))


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_field(path):
    for name, value in (("unknown", 3), ("stream_options.other", True), ("kvevict.bugdet", 3)):
        error = posted(path, **{name: value}, stream=True).json()["error"]
        assert error["param"] == name and name in error["message"]
    assert posted(path, stream_options=True).json()["error"]["param"] == "stream_options"


def draws(path, **changes) -> set:
    """Answers that are drawn with some seeds."""
    return {text_of(asked(path, temperature=1.5, seed=seed, **changes)) for seed in range(4)}


def is_greedy(name, value):
    """With this value the likeliest token is always drawn."""
    return lambda path: draws(path, **{name: value}) == {text_of(usual(path))} != draws(path)


def is_read(name, value):
    return lambda path: counted(asked(path, **{name: value}))[0] > counted(usual(path))[0]


def is_length(name, value):
    return lambda path: counted(asked(path, **dict(max_tokens=None) | {name: value}))[1] == 3


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
    "n": lambda path: len(asked(path, n=3)["choices"]) == 3,
    "stop": lambda path: text_of(asked(path, stop="code")) == text_of(asked(path)).partition("code")[0],
    "stream_options.include_usage": usage_comes, "logit_bias": is_biased, "logprobs": has_probabilities,
    "frequency_penalty": is_penalised("frequency_penalty"), "presence_penalty": is_penalised("presence_penalty"),
    "top_logprobs": lambda path: [len(each["top_logprobs"]) for each in asked(path, logprobs=True, top_logprobs=3)[
        "choices"][0]["logprobs"]["content"]] == [3] * 8,
    "tools": is_read("tools", TOOLS),
    "tool_choice": lambda path: counted(asked(path, tools=TOOLS, tool_choice="none")) == counted(usual(path)),
    "parallel_tool_calls": None,  # test_a_single_call
    "chat_template_kwargs": is_read("chat_template_kwargs", dict(enable_thinking=True)),
    "reasoning_effort": is_read("reasoning_effort", "low"),
    "messages": is_read("messages", [dict(role="user", content=WHO * 2)]),
    "prompt": is_read("prompt", WHO * 2),
}  # fmt: skip


@pytest.mark.parametrize("path, name", every(OBEYED))
def test_an_obeyed_field(path, name):
    effect = EFFECTS[name]
    assert effect is None or effect(path)


REMOVED = [  # field, value, what its error advises
    *(("tool_choice", value, "ask for a call in a message, or use vLLM's server")
      for value in ("required", "any", dict(type="function", function=dict(name="f")), ["auto"], True)),
    *(("response_format", dict(type=kind), "ask for JSON in a message, or use vLLM's server")
      for kind in ("json_object", "json_schema", "xml", None)),
    *(("tools", [tool], said) for tool, said in (
        (dict(type="custom", name="f"), "functions"), (dict(type="web_search"), "functions"),
        (dict(type="function", name="f", parameters={}), "functions"),
        (dict(type="function", function=dict(name="f", strict=True)), "leave it out, or use vLLM's server"),
    )),
    ("max_output_tokens", 3, "has no field"), ("input", "Once", "has no field"),
]  # fmt: skip


@pytest.mark.parametrize("field, value, said", REMOVED)
def test_values_that_are_refused(field, value, said):
    response = posted(CHAT, **{field: value})
    error = response.json()["error"]
    assert response.status_code == 400 and field in error["message"] and said in error["message"]
    assert error["param"] == field


def test_an_endpoint_that_is_gone():
    response = client().post("/v1/responses", model="small", input="Once", max_output_tokens=3)
    message = "/v1/responses is not an endpoint of this server: ask at /v1/chat/completions"
    assert response.status_code == 404 and response.json()["error"]["message"] == message


def calling(arguments) -> list:
    call = dict(id="1", type="function", function=dict(name="f", arguments=arguments))
    said = [dict(role="assistant", content=None, tool_calls=[call]), dict(role="tool", tool_call_id="1", content="3")]
    return [dict(role="user", content=WHO), *said]


def test_calls_without_arguments():
    """A client that joins the parts of a stream has no letters of them."""
    assert text_of(asked(CHAT, messages=calling(""))) == text_of(asked(CHAT, messages=calling("{}")))


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
    *((CHAT, dict(messages=calling(arguments)), "messages") for arguments in (
        "no", '{"x": NaN}', '{"x": 1e999}', '{"x": "\\ud83d"}', '{"\\udc00": 1}', '{"x": ' * 120 + "1" + "}" * 120,
    )),
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


@pytest.mark.parametrize("path", PATHS)
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


@pytest.mark.parametrize("path", PATHS)
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


@pytest.mark.parametrize("path", PATHS)
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


@pytest.mark.parametrize("path", PATHS)
def test_nulls(path):
    """As `model_dump()` writes them."""
    nulls = {name: None for name in TABLE[path] if "." not in name and name not in body_of(path)}
    assert text_of(asked(path, **nulls)) == text_of(usual(path))
    if path == COMPLETIONS:
        return
    call = dict(id="1", type="function", function=dict(name="f", arguments='{"x": null}'))
    before = ChatCompletion.model_validate(asked(CHAT)).choices[0].message
    assert None in before.model_dump().values()
    result = dict(role="tool", tool_call_id="1", content="3", name=None)
    turns = [*body_of(path)["messages"], dict(before.model_dump(), tool_calls=[call]), result]
    assert counted(asked(path, messages=turns))[0] > counted(usual(path))[0]


def test_messages():
    call = dict(id="1", type="function", function=dict(name="f", arguments='{"x": null}'))
    given = [
        dict(role="developer", content="Be kind."), dict(role="user", content=[dict(type="text", text="Well?")]),
        dict(role="assistant", content=None, reasoning_content="Hm.", tool_calls=[call]),
        dict(role="tool", content="3", tool_call_id="1"),
    ]  # fmt: skip
    want = dict(call, function=dict(name="f", arguments=dict(x=None)))
    assert of_chat(client().server.tokenizer, given) == [
        dict(role="system", content="Be kind."), dict(role="user", content="Well?"),
        dict(role="assistant", content="", reasoning_content="Hm.", tool_calls=[want]), given[3],
    ]  # fmt: skip
    knows = type("Knows", (), dict(chat_template=f"{TEMPLATE}{{# developer #}}"))
    assert of_chat(knows, given[:1]) == given[:1]


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


def test_roles():
    """OpenAI's are taken, and those that the template names."""
    named = "{% for m in messages if m.role != 'bob' %}{{ m.content }}{% endfor %}"
    for role, template, want in (
        ("bob", TEMPLATE, 400), ("bob", named, 200), ("developer", TEMPLATE, 200), ("tool", TEMPLATE, 200),
    ):  # fmt: skip
        turns = [dict(role="user", content="Once"), dict(role=role, content="upon a time")]
        response = Client(server(template=template)).post(CHAT, messages=turns, max_tokens=2)
        assert response.status_code == want, response.text
        if want == 400:
            error = response.json()["error"]
            assert error["param"] == "messages" and "user, assistant, tool or function" in error["message"]
