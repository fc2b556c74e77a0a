"""OpenAI's client and vLLM's server with kvevict, beside plain vLLM's: `.ci/run vllm`."""

import concurrent.futures
import importlib.util
import json
import random
import re
import urllib.request

import pytest
import tiny
from vllm_server import serving

FOUND = [importlib.util.find_spec(name) for name in ("vllm", "openai")]
pytestmark = pytest.mark.skipif(
    not all(each and each.origin for each in FOUND), reason="vLLM is missing: .ci/run vllm has it"
)
LONGEST = 512
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
QUESTIONS = ["--scheduler-cls", "kvevict.vllm.scheduler.create", "--logits-processors"]
QUESTIONS += ["kvevict.vllm.copies:RequestCopies"]
SCHEMA = dict(
    type="object", properties=dict(of=dict(enum=["sea", "land"])), required=["of"], additionalProperties=False
)
LOOK = dict(type="function", function=dict(name="look", description="Look.", parameters=SCHEMA))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    made = tiny.model(vocab_size=259, bos_token_id=None, pad_token_id=None, max_position_embeddings=LONGEST)
    made.save_pretrained(folder)
    tiny.chat_tokenizer().save_pretrained(folder)
    return str(folder)


def client_of(address):
    import openai

    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120)


def said(answer):
    """What a chat's answer says, without its id and time."""
    choices = [
        (each.index, each.finish_reason, each.message.content,
         [(call.function.name, call.function.arguments) for call in each.message.tool_calls or ()])
        for each in answer.choices
    ]  # fmt: skip
    return choices, answer.usage.prompt_tokens, answer.usage.completion_tokens


def conversation(client):
    """The answers to requests of each kind."""
    turns = [dict(role="user", content="Who is there? " * 9)]
    common = dict(model="m", messages=turns, temperature=0, max_tokens=40)
    ask = client.chat.completions.create
    whole = ask(**common)
    text = whole.choices[0].message.content
    stop = text[len(text) // 2 :][:2] or "a"
    parts = [*ask(**common, stream=True, stream_options=dict(include_usage=True))]
    schema = dict(type="json_schema", json_schema=dict(name="of", schema=SCHEMA, strict=True))
    formed = ask(**common, response_format=schema)
    called = ask(**common, tools=[LOOK], tool_choice=dict(type="function", function=dict(name="look")))
    two = ask(**common | dict(temperature=1), n=2, seed=3)
    gone = ask(**common | dict(max_tokens=300), stream=True)
    next(iter(gone))
    gone.close()
    assert json.loads(formed.choices[0].message.content)["of"] in ("sea", "land")
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["of"] in ("sea", "land")
    assert len({each.message.content for each in two.choices}) == 2
    assert "".join(each.choices[0].delta.content or "" for each in parts if each.choices) == text
    stopped = ask(**common, stop=[stop])
    assert stopped.choices[0].finish_reason == "stop" and stop not in stopped.choices[0].message.content
    return [*map(said, (whole, formed, called, two, stopped)), parts[-1].usage.prompt_tokens, said(ask(**common))]


def gauge(address, name):
    with urllib.request.urlopen(f"{address}/metrics") as page:
        return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", page.read().decode(), re.M))


def test_a_client_gets_what_plain_vllm_answers(tmp_path, model):
    """Where everything fits. A question that is named counts in no number."""
    with serving(model, tmp_path, *TOOLS, longest=LONGEST) as address:
        plain = conversation(client_of(address))
    fits = dict(budget=LONGEST, period=64, policy="edie", window=8)
    with serving(model, tmp_path, *TOOLS, *QUESTIONS, kvevict=fits, longest=LONGEST) as address:
        client = client_of(address)
        assert conversation(client) == plain
        body = dict(vllm_xargs=dict(kvevict_question="Who is there?"))
        common = dict(model="m", messages=[dict(role="user", content="Who is there? " * 20)], max_tokens=9)
        asked, counted = (client.chat.completions.create(**common, **more) for more in (dict(extra_body=body), {}))
        assert asked.usage.prompt_tokens == counted.usage.prompt_tokens and asked.usage.completion_tokens == 9
        with pytest.raises(Exception, match="kvevict_question must be a text") as error:
            client.completions.create(model="m", prompt="a", extra_body=dict(vllm_xargs=dict(kvevict_question=3)))
        assert error.value.status_code == 400


def test_no_block_is_lost_and_no_answer_is_anothers(tmp_path, model):
    """Three clients with requests of random lengths, of which many are left early; vLLM's own counters end at 0."""
    options = dict(budget=32, period=16, policy="take+edie", probe=8)
    with serving(model, tmp_path, *QUESTIONS, kvevict=options, longest=LONGEST) as address:
        client, drawn = client_of(address), random.Random(0)
        texts = ["".join(drawn.choices("abcdefg ?.", k=drawn.randint(1, 300))) for _ in range(12)]

        def answer(text, leaves=False):
            parts = client.completions.create(model="m", prompt=text, temperature=0, max_tokens=30, stream=True)
            found = []
            for part in parts:
                found.append(part.choices[0].text)
                if leaves:
                    parts.close()
                    return None
            return "".join(found)

        alone = [answer(text) for text in texts]
        jobs = [(i % 12, drawn.random() < 0.3) for i in range(60)]
        with concurrent.futures.ThreadPoolExecutor(3) as clients:
            found = [*clients.map(lambda job: answer(texts[job[0]], job[1]), jobs)]
        assert all(mine in (None, alone[i]) for mine, (i, _) in zip(found, jobs, strict=True))
        assert sum(mine is not None for mine in found) > 30
        answer(texts[0])  # the requests that were left are gone by then
        assert gauge(address, "vllm:kv_cache_usage_perc") == gauge(address, "vllm:num_requests_running") == 0


def test_two_replicas_answer_alike(tmp_path, model):
    """vLLM's own data parallelism: each replica answers, and both answer what one of them does."""
    options = dict(budget=32, period=16, policy="take+edie", probe=8)
    replicas = ["--data-parallel-size", "2"]
    with serving(model, tmp_path, *QUESTIONS, *replicas, kvevict=options, longest=LONGEST) as address:
        client, drawn = client_of(address), random.Random(1)
        texts = ["".join(drawn.choices("abcdefg ?.", k=drawn.randint(1, 300))) for _ in range(8)]

        def answer(text):
            return client.completions.create(model="m", prompt=text, temperature=0, max_tokens=30).choices[0].text

        alone = [answer(text) for text in texts]
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            assert [*clients.map(answer, texts * 3)] == alone * 3
        with urllib.request.urlopen(f"{address}/metrics") as page:
            served = re.findall(r'^vllm:request_success_total{engine="(\d)".*} ([1-9]\S*)$', page.read().decode(), re.M)
        assert {engine for engine, _ in served} == {"0", "1"}
