"""Requests as OpenAI's clients send them: LangChain's ChatOpenAI and OpenAI (langchain-openai 1.7), Open WebUI, and
`transformers chat`, written down from a record, so that the tests need none of these."""

import functools
import json

import pytest
from serving import CHATML, Client, events, qwen, saying, server, unpatched  # noqa: F401
from transformers import AutoTokenizer

import kvevict

openai = pytest.importorskip("openai", reason="the openai package is not installed")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [dict(role="user", content="The code of Naislet?")]
NAMED = dict(properties=dict(name=dict(type="string")), required=["name"], type="object")
LOOK_UP = dict(name="look_up", description="Look a code up.", parameters=NAMED)
CODE = dict(
    description="A code.", title="Code", type="object", required=["name", "code"], additionalProperties=False,
    properties=dict(name=dict(title="Name", type="string"), code=dict(title="Code", type="integer")),
)  # fmt: skip
LOOKED_UP = [
    dict(role="system", content="Be brief."), *HI,
    dict(role="assistant", content=None, tool_calls=[
        dict(type="function", id="c1", function=dict(name="look_up", arguments='{"name": "Naislet"}')),
    ]),
    dict(role="tool", content="364735", tool_call_id="c1"),
]  # fmt: skip


def tool(function: dict, **more) -> list:
    return [dict(type="function", function=function | more)]


def chat(messages=HI, stream=False, **more) -> tuple:
    return CHAT, dict(model="small", stream=stream, messages=messages) | more


USAGE = dict(stream_options=dict(include_usage=True))
FORCED = dict(type="function", function=dict(name="look_up"))
SCHEMA = dict(type="json_schema", json_schema=dict(name="Code", strict=True, schema=CODE))
GENERATION = json.dumps(dict(do_sample=False, max_new_tokens=12, transformers_version="5.24.0"))
REQUESTS = {  # name: request, "text" or the field that is refused
    "LangChain": (chat(), "text"),
    "LangChain, a stream": (chat(stream=True), "text"),
    "LangChain, all settings": (chat(
        frequency_penalty=0.1, logit_bias={"5": 1}, logprobs=True, max_completion_tokens=5, n=2, presence_penalty=0.1,
        seed=3, stop=["x"], temperature=0.5, top_logprobs=2, top_p=0.9, user=None,
    ), "text"),
    "LangChain, bind_tools": (chat(tools=tool(LOOK_UP)), "text"),
    "LangChain, bind_tools, any": (chat(tools=tool(LOOK_UP), tool_choice="required"), "tool_choice"),
    "LangChain, bind_tools, a strict one": (chat(
        tools=tool(LOOK_UP, strict=True), tool_choice=FORCED, parallel_tool_calls=False,
    ), "tool_choice"),
    "LangChain, a tool's result": (chat(LOOKED_UP, tools=tool(LOOK_UP)), "text"),
    "LangChain, with_structured_output": (chat(response_format=SCHEMA), "response_format"),
    "LangChain, with_structured_output, a stream": (chat(response_format=SCHEMA, stream=True), "response_format"),
    "LangChain, with_structured_output, function_calling": (chat(
        tools=tool(dict(LOOK_UP, name="Code", parameters=CODE)), parallel_tool_calls=False,
        tool_choice=dict(type="function", function=dict(name="Code")),
    ), "tool_choice"),
    "LangChain, with_structured_output, json_mode": (
        chat(response_format=dict(type="json_object")), "response_format",
    ),
    "LangChain, OpenAI": ((COMPLETIONS, dict(
        model="small", prompt=["The code"], frequency_penalty=0, logprobs=None, max_tokens=256, n=1,
        presence_penalty=0, seed=None, temperature=0.7, top_p=1,
    )), "text"),
    "Open WebUI": (chat(stream=True, **USAGE), "text"),
    "Open WebUI, all settings": (chat(
        [dict(role="system", content="Be brief."), *HI], stream=True, temperature=0.8, top_p=0.9, min_p=0.05,
        max_tokens=20, frequency_penalty=1.1, presence_penalty=0.0, seed=42, stop=["###"], logit_bias={"5": -100},
        **USAGE,
    ), "text"),
    "Open WebUI, parts of a message": (chat(
        [dict(role="user", content=[dict(type="text", text="The code?")])], stream=True,
    ), "text"),
    "Open WebUI, a title": (chat(max_completion_tokens=1000), "text"),
    "Open WebUI, native tools": (chat(stream=True, tools=tool(LOOK_UP), **USAGE), "text"),
    "transformers chat": (chat(
        stream=True, generation_config=GENERATION, stop=None, tools=None, seed=None, temperature=None, **USAGE,
    ), "text"),
}  # fmt: skip


@functools.cache
def client():
    tools = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    return Client(server(of=qwen(), template=tools + CHATML))


@functools.cache
def ids(text: str) -> tuple:
    tokenizer = AutoTokenizer.from_pretrained(kvevict.small_llama())
    return *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id


def finished(path, body, response) -> tuple:
    """(text, calls) of an answer that is complete."""
    assert response.status_code == 200, response.text
    if body.get("stream"):
        chunks = [openai.types.chat.ChatCompletionChunk.model_validate(each) for each in events(response)]
        assert ("stream_options" in body) == (chunks[-1].usage is not None)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        deltas = [choice.delta for choice in choices]
        calls = [each.function.arguments for delta in deltas for each in delta.tool_calls or []]
        assert choices[-1].finish_reason in ("stop", "length")
        return "".join(delta.content or "" for delta in deltas), calls
    if path == COMPLETIONS:
        return openai.types.Completion.model_validate(response.json()).choices[0].text, []
    said = openai.types.chat.ChatCompletion.model_validate(response.json())
    assert len(said.choices) == body.get("n", 1)
    message = said.choices[0].message
    return message.content, [each.function.arguments for each in message.tool_calls or []]


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_of_clients(name):
    (path, body), kind = REQUESTS[name]
    with saying(qwen(), ids("Hello.")):
        response = client().post(path, **body)
    if kind != "text":
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == kind and "use vLLM's server" in error["message"]
        return
    text, calls = finished(path, body, response)
    assert text and not calls
