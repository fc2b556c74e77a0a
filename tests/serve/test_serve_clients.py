"""Requests as OpenAI's clients send them: LangChain's ChatOpenAI and OpenAI (langchain-openai 1.7), Open WebUI, and
`transformers chat`, written down from a record, so that the tests need none of these; and streams of responses that the
openai package reads."""

import asyncio
import functools
import json
import time

import httpx
import pytest
from serving import CHATML, FILLER, Client, asks, complete, events, model, qwen, saying, server, unpatched  # noqa: F401
from transformers import AutoTokenizer

import kvevict
from kvevict.serve import call, outgoing

openai = pytest.importorskip("openai", reason="the openai package is not installed")

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [dict(role="user", content="The code of Naislet?")]
MADE = dict(name="Naislet", code=364735)
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


def response(*items, stream=False, **more) -> tuple:
    given = [dict(content=HI[0]["content"], role="user", type="message"), *items]
    return RESPONSES, dict(model="small", stream=stream, input=given) | more


USAGE = dict(stream_options=dict(include_usage=True))
FORCED = dict(type="function", function=dict(name="look_up"))
SCHEMA = dict(type="json_schema", json_schema=dict(name="Code", strict=True, schema=CODE))
CALLED = dict(type="function_call", name="look_up", arguments='{"name": "Naislet"}', call_id="c1")
TEXT = dict(format=dict(type="json_schema", strict=True, name="Code", schema=CODE))
GENERATION = json.dumps(dict(do_sample=False, max_new_tokens=12, transformers_version="5.24.0"))
REQUESTS = {  # name: request, kind of its answer
    "LangChain": (chat(), "text"),
    "LangChain, a stream": (chat(stream=True), "text"),
    "LangChain, all settings": (chat(
        frequency_penalty=0.1, logit_bias={"5": 1}, logprobs=True, max_completion_tokens=5, n=2, presence_penalty=0.1,
        seed=3, stop=["x"], temperature=0.5, top_logprobs=2, top_p=0.9, user=None,
    ), "text"),
    "LangChain, bind_tools": (chat(tools=tool(LOOK_UP)), "text"),
    "LangChain, bind_tools, any": (chat(tools=tool(LOOK_UP), tool_choice="required"), "call"),
    "LangChain, bind_tools, a strict one": (chat(
        tools=tool(LOOK_UP, strict=True), tool_choice=FORCED, parallel_tool_calls=False,
    ), "call"),
    "LangChain, a tool's result": (chat(LOOKED_UP, tools=tool(LOOK_UP)), "text"),
    "LangChain, with_structured_output": (chat(response_format=SCHEMA), "JSON"),
    "LangChain, with_structured_output, a stream": (chat(response_format=SCHEMA, stream=True), "JSON"),
    "LangChain, with_structured_output, function_calling": (chat(
        tools=tool(dict(LOOK_UP, name="Code", parameters=CODE)), parallel_tool_calls=False,
        tool_choice=dict(type="function", function=dict(name="Code")),
    ), "call"),
    "LangChain, with_structured_output, json_mode": (chat(response_format=dict(type="json_object")), "JSON"),
    "LangChain, responses": (response(), "text"),
    "LangChain, responses, a stream": (response(stream=True), "text"),
    "LangChain, responses, bind_tools": (response(tools=[dict(type="function") | LOOK_UP]), "text"),
    "LangChain, responses, a tool's result": (response(
        CALLED, dict(type="function_call_output", output="364735", call_id="c1"),
        tools=[dict(type="function") | LOOK_UP],
    ), "text"),
    "LangChain, responses, with_structured_output": (response(text=TEXT), "JSON"),
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
    if path == RESPONSES:
        found = events(response)[-1]["response"] if body["stream"] else response.json()
        said = openai.types.responses.Response.model_validate(found)
        assert said.status == "completed"
        return said.output_text, [each.arguments for each in said.output if each.type == "function_call"]
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
    if kind != "text":
        pytest.importorskip("llguidance", reason="llguidance is not installed")
    forced = body.get("tools") and kind == "call"
    asked = body["tools"][0]["function"]["name"] if forced else None
    arguments = MADE if asked == "Code" else dict(name="Naislet")
    answer = json.dumps([dict(name=asked, arguments=arguments)] if forced else MADE if kind == "JSON" else "Hello.")
    with saying(qwen(), ids(answer)):
        text, calls = finished(path, body, client().post(path, **body))
    if kind == "call":
        assert [json.loads(each) for each in calls] == [arguments] and not text
    elif kind == "JSON":
        assert json.loads(text) == MADE
    else:
        assert text and not calls


def of_openai(served, function):
    """What a coroutine function gets from the openai package's client of a server."""

    async def run():
        transport = httpx.ASGITransport(served.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport) as http:
            return await function(openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http))

    return asyncio.run(run())


async def streamed(client, most=None) -> tuple:
    """All events of a stream of a response, and the stream."""
    given = {} if most is None else dict(max_output_tokens=most)
    async with client.responses.stream(model="small", input="Once " * 40 + asks("Naislet"), **given) as stream:
        return [event async for event in stream], stream


def test_a_stream_of_a_response():
    """The openai package's final response is that of `response.completed`; an incomplete one is in the last event."""

    async def whole(client):
        found, stream = await streamed(client)
        return found, await stream.get_final_response()

    with saying(qwen(), ids("Hello.")):
        found, final = of_openai(client(), whole)
    assert final.output_text == "Hello." and found[-1].type == "response.completed"
    found, _ = of_openai(client(), functools.partial(streamed, most=3))
    assert found[-1].type == "response.incomplete" and found[-1].response.output_text
    assert found[-1].response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_of_a_response_that_fails(begun, monkeypatch):
    """The events of its error are of the same response, and counted on."""
    served, token = Client(server()), call.Call.token

    def late(self):
        token(self)
        if self.new_tokens == 3 or not begun:
            self.deadline = 0.0

    def slow(self, *args):
        time.sleep(0.3)
        if not begun:
            self.deadline = 0.0
        self.check()

    monkeypatch.setattr(call.Call, "token", late)
    monkeypatch.setattr(call.Call, "reads", slow)
    monkeypatch.setattr(outgoing, "PAUSE", 0.05)
    with saying(model(), ids(FILLER)):
        found, _ = of_openai(served, streamed)
    assert [each.type for each in found[:2]] == ["response.created", "response.in_progress"]
    assert [each.sequence_number for each in found] == list(range(len(found)))
    assert [each.type for each in found[-2:]] == ["error", "response.failed"]
    assert found[-1].response.id == found[0].response.id
    complete([each for each in found if each.type in ("error", "response.failed", "response.created")])
    assert found[-1].response.error.message.startswith("the request took longer")
    assert any(each.type == "response.output_text.delta" for each in found) == begun
