"""A server with the bundled model, asked in this process."""

import asyncio
import contextlib
import functools
import json

import pytest

import kvevict

for _package in ("fastapi", "uvicorn", "openai", "prometheus_client", "httpx", "transformers.cli.serving.completion"):
    pytest.importorskip(_package, reason="the extra `serve` is not installed")

import httpx  # noqa: E402
import pydantic  # noqa: E402
from openai.types import Completion, chat  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

# The bundled model continues text; these turns are what it knows.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}\n\n"
    "{% elif m['role'] == 'user' %}{{ m['content'] }}\nAnswer:{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
FILLER = "The baker counted the boats in the harbour and went home before it rained. "
FACTS = {"Naislet": 364735, "Orshan": 118204, "Velmora": 907142}
TEXT = FILLER * 12 + "".join(f"The code of {name} is {code}. " for name, code in FACTS.items()) + FILLER * 12


def asks(name: str) -> str:
    return f"Question: What is the code of {name}?"


@functools.cache
def model():
    return AutoModelForCausalLM.from_pretrained(kvevict.small_llama()).eval()


@functools.cache
def qwen():
    """The bundled model's weights in a type that has a response template in Transformers."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
        "tie_word_embeddings", "eos_token_id", "bos_token_id",
    )  # fmt: skip
    made = Qwen2ForCausalLM(Qwen2Config(**{name: getattr(model().config, name) for name in names}))
    made.load_state_dict(model().state_dict(), strict=False)
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            weight.data.zero_()
    return made.eval()


def server(
    folder=None, memory=1 << 28, disk=1 << 28, template=TEMPLATE, of=None, tokenizer=None, response_template=None,
    **changes,
):  # fmt: skip
    """A `kvevict.serve.server.Server`. folder: of its store; of: another model; tokenizer: another one; changes: of its
    options, and the model's context."""
    from kvevict.patch import patch
    from kvevict.serve.options import Options
    from kvevict.serve.policies import Policies
    from kvevict.serve.prefixes import Prefixes
    from kvevict.serve.server import Server
    from kvevict.serve.texts import Texts

    given = {name: changes.pop(name) for name in ("context",) if name in changes}
    options = Options(**dict(policy="take", budget=256, chunk_size=256) | changes)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(kvevict.small_llama())
    tokenizer.chat_template, of = template, of or model()
    if response_template is not None:
        tokenizer.response_template = response_template
    policies = Policies(options, **dict(context=2048) | given)
    patch(of, policies.built(), tokenizer=tokenizer)
    texts = Texts(disk, folder and folder / "texts")
    prefixes = Prefixes(of, memory, folder and folder / "prefixes", lambda: disk - texts.bytes, texts.gone)
    return Server("small", of, tokenizer, policies, prefixes, texts, options)


@pytest.fixture(autouse=True)
def unpatched():
    yield
    kvevict.unpatch(model())
    kvevict.unpatch(qwen())


SHAPES = {  # of whole answers, and of events
    "/v1/completions": (Completion, Completion),
    "/v1/chat/completions": (chat.ChatCompletion, chat.ChatCompletionChunk),
}
NULLABLE = {  # fields that OpenAI's specification requires, and that may be null: optional in the package
    "Choice": {"finish_reason", "logprobs"}, "CompletionChoice": {"logprobs"},
    "ChatCompletionMessage": {"content", "refusal"}, "ChoiceLogprobs": {"content", "refusal"},
    "ChatCompletionTokenLogprob": {"bytes"}, "TopLogprob": {"bytes"},
    "Logprobs": {"text_offset", "token_logprobs", "tokens", "top_logprobs"},
}  # fmt: skip
JSON = {"content-type": "application/json"}
OURS = {"kvevict", "reasoning_content", "name"}  # fields that the package's types do not have


def check_shapes(path, response) -> None:
    """Read an answer, or every event of a stream, as a client whose schema requires each field does."""
    whole, part = SHAPES[path]
    if not response.headers["content-type"].startswith("text/event-stream"):
        return complete(whole.model_validate(response.json(), strict=True))
    found = [each for each in events(response) if "error" not in each]
    for event in found:
        for choice in event["choices"] if path == "/v1/completions" else ():
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null is not in the package's type
        complete(part.model_validate(event, strict=True))
    assert len({(each["id"], each["created"], "usage" in each) for each in found}) <= 1
    assert not any(each.get("usage") for each in found[:-1])


def complete(value) -> None:
    if isinstance(value, pydantic.BaseModel):
        missing = NULLABLE.get(type(value).__name__, set()) - value.model_fields_set
        assert not missing and value.model_extra.keys() <= OURS, (missing, value)
        value = [getattr(value, name) for name in value.model_fields_set]
    for each in value if isinstance(value, list) else ():
        complete(each)


def scope_of(method, path, headers, **more) -> dict:
    """The ASGI scope of a request with these headers alone."""
    return dict(
        type="http", asgi={"version": "3.0", "spec_version": "2.3"}, method=method, path=path, raw_path=path.encode(),
        headers=[(name.encode(), value.encode()) for name, value in headers.items()], query_string=b"", scheme="http",
        root_path="", http_version="1.1", server=("here", 80), client=("here", 1),
    ) | more  # fmt: skip


class Client:
    """Asks a server without a network, each request in a task of its own, and checks the shapes of its answers."""

    def __init__(self, server, key=None):
        from kvevict.serve.app import application

        self.server, self.app = server, application(server)
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def ask(self, method, path, body=None, **options):
        return asyncio.run(self.asked(method, path, body, **options))

    async def asked(self, method, path, body=None, content=None):
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=self.headers) as client:
            given = {} if body is None else dict(json=body)
            given |= {} if content is None else dict(content=content, headers=JSON)
            response = await client.request(method, path, timeout=600, **given)
        if response.status_code == 200 and path in SHAPES:
            check_shapes(path, response)
        return response

    def together(self, bodies, path="/v1/chat/completions") -> list:
        """Responses to bodies that are all sent at once."""

        async def all_of():
            return await asyncio.gather(*(self.asked("POST", path, each) for each in bodies))

        return asyncio.run(all_of())

    def post(self, path, **body):
        return self.ask("POST", path, body)

    def chat(self, *messages, **body):
        """messages: texts of the user and, in between, of the assistant."""
        turns = [dict(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(messages)]
        return self.post("/v1/chat/completions", **dict(messages=turns, max_tokens=12) | body)

    def store(self, name="text", text=TEXT):
        return self.post("/v1/kvevict/texts", name=name, text=text)


def said(response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def cached(response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def events(response) -> list:
    """The data of server-sent events."""
    found = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(each) for each in found if each != "[DONE]"]


@contextlib.contextmanager
def saying(of, ids: list):
    """A model that answers with these ids."""
    at = 0

    def forced(module, args, kwargs, output):
        nonlocal at
        at = 0 if (args[0] if args else kwargs["input_ids"]).shape[1] > 1 else at
        if at < len(ids):
            output.logits[:], output.logits[..., ids[at]] = -1e4, 1e4
        at += 1

    hook = of.register_forward_hook(forced, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
