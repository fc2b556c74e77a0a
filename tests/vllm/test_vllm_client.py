"""OpenAI's client and vLLM's server with kvevict."""

import concurrent.futures
import contextlib
import json
import random
import re
import urllib.request

import pytest
import tiny
from in_vllm import QUESTIONS, needed, serving

pytestmark = needed
LONGEST = 512
ASKING = ["--scheduler-cls", QUESTIONS["scheduler_cls"], "--logits-processors", *QUESTIONS["logits_processors"]]
ASKING += ["--middleware", "kvevict.vllm.asked.InPrompt"]
EVICTS = dict(budget=32, period=16, policy="take+edie", probe=8)
FITS = dict(budget=LONGEST, period=16, policy="snapkv", window=8)
PLACE = dict(
    type="object", required=["city", "days"], additionalProperties=False,
    properties=dict(city=dict(enum=["Rome", "Oslo"]), days=dict(enum=[1, 2, 3])),
)  # fmt: skip
SCHEMA = dict(type="json_schema", json_schema=dict(name="place", schema=PLACE))
WEATHER = dict(type="function", function=dict(name="weather", parameters=PLACE, strict=True))
NAMED = dict(type="function", function=dict(name="weather"))
NO_SPACE = {str(token): -100 for token in tiny.byte_tokenizer()(" \t\r\n")["input_ids"]}
CALL = dict(tools=[WEATHER], logit_bias=NO_SPACE | {"259": 100}, max_tokens=120)  # one call that ends
# A random model would fill an answer of any form with spaces.
FORMS = ["--structured-outputs-config", json.dumps(dict(backend="xgrammar", disable_any_whitespace=True))]
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
CHAT = dict(model="m", messages=[dict(role="user", content="abc? " * 40)], temperature=0, max_tokens=80)
LINE = dict(model="m", temperature=0, max_tokens=30, stream=True, extra_body=dict(ignore_eos=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    more, tokenizer = dict(bos_token_id=None, pad_token_id=None, eos_token_id=259), tiny.chat_tokenizer()
    tokenizer.add_special_tokens(dict(eos_token="<end>"))  # a form's last token
    made = tiny.model(vocab_size=260, max_position_embeddings=LONGEST, **more)
    made.generation_config.eos_token_id = 259
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def client(*options, **more):
    """OpenAI's client of a server."""
    import openai

    with serving(*options, longest=LONGEST, **more) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0)


def page(client, name):
    with urllib.request.urlopen(f"{client.base_url}".replace("v1/", name)) as found:
        return found.read().decode()


def gauge(client, name):
    """The sum of one of the server's numbers over its engines."""
    values = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", page(client, "metrics"), re.M)
    assert values, name
    return sum(map(float, values))


def drawn_texts(drawn, number):
    return ["".join(drawn.choices("abcdefg ?.", k=drawn.randint(1, 300))) for _ in range(number)]


def answer(client, text, leaves=False, **more):
    """A streamed answer to a text; leaves: the client goes away after its first part, and the result is None."""
    asked, found = LINE | dict(prompt=text) | more, []
    with client.completions.create(**asked) as parts:
        for part in parts:
            found.append(part.choices[0].text)
            if leaves:
                return None
    return "".join(found)


def refusal(ask, **request):
    """The status and the words with which a server refuses a request."""
    import openai

    with pytest.raises(openai.APIStatusError) as refused:
        ask(**request)
    return refused.value.status_code, refused.value.message


def tour(one):
    """What a client gets that uses each part of the API; a client that leaves comes before the last answer."""
    chat, completion = one.chat.completions.create, one.completions.create
    first, second = drawn_texts(random.Random(3), 2)
    prompt = dict(model="m", prompt=first, temperature=1, seed=5, max_tokens=60)
    talk = CHAT | dict(messages=[dict(role="user", content=second)])
    whole, plain = chat(**talk, logprobs=True, top_logprobs=2), completion(**prompt)
    streamed = [*chat(**talk, stream=True, stream_options=dict(include_usage=True))]
    form = chat(**CHAT, response_format=SCHEMA).choices[0]
    calls = [chat(**CHAT | CALL, tool_choice=choice).choices[0].message.tool_calls for choice in (NAMED, "required")]
    stop = re.search("[ -~]{2}", plain.choices[0].text[12:])[0]
    bad = [dict(max_tokens=-1), dict(prompt="a" * (LONGEST + 1)), dict(temperature=-1), dict(n=0)]
    return dict(
        chat=[whole.choices[0].message.content, whole.usage.model_dump(), whole.choices[0].finish_reason],
        likely=[[other.token for other in each.top_logprobs] for each in whole.choices[0].logprobs.content],
        stream="".join(part.choices[0].delta.content or "" for part in streamed if part.choices),
        end=[streamed[-1].usage.model_dump(), streamed[-2].choices[0].finish_reason],
        form=[form.message.content, form.finish_reason],
        calls=[[call.function.model_dump() for call in each or ()] for each in calls],
        text=[plain.choices[0].text, plain.usage.model_dump()],
        stop=[stop, completion(**prompt, stop=[stop]).choices[0].model_dump()],
        two=[sorted(each.text for each in completion(**prompt, n=2).choices) for _ in range(2)],
        refused=[refusal(completion, **prompt | each) for each in bad],
        left=answer(one, first, leaves=True),
        last=answer(one, first),
    )  # fmt: skip


def test_a_client_gets_what_plain_vllm_gives(tmp_path, model):
    """Where everything fits: chat, stream, tool calls, a JSON schema, usage, logprobs, stop, n, bad requests, a client
    that leaves. Then kvevict's own refusals."""
    found = []
    for options in (None, FITS):
        with client(model, tmp_path, *FORMS, *TOOLS, *(ASKING if options else []), kvevict=options) as one:
            found.append(tour(one))
            if options:
                asked = [
                    CHAT | dict(extra_body=dict(vllm_xargs=dict(kvevict_question=question)))
                    for question in ("abc? abc?", "xyz", " ")
                ]
                assert one.chat.completions.create(**asked[0]).usage == one.chat.completions.create(**CHAT).usage
                for bad, why in zip(asked[1:], ("is not in the prompt", "must be a text"), strict=True):
                    status, said = refusal(one.chat.completions.create, **bad)
                    assert status == 400 and f"kvevict_question {why}" in said
    plain, mine = found
    assert mine == plain
    assert plain["stream"] == plain["chat"][0] != "" and plain["left"] is None and plain["last"]
    assert json.loads(plain["form"][0])["city"] in ("Rome", "Oslo")
    for (call,) in plain["calls"]:
        assert call["name"] == "weather" and json.loads(call["arguments"])["days"] in (1, 2, 3)
    stop, stopped = plain["stop"]
    assert stopped["finish_reason"] == "stop" and stopped["text"] == plain["text"][0].partition(stop)[0] != ""
    assert plain["two"][0] == plain["two"][1] and len({*plain["two"][0]}) == 2
    assert [status for status, _ in plain["refused"]] == [400] * 4


def test_three_clients_get_their_own_answers(tmp_path, model):
    """20 requests each, of which some are left early: each answer is that given alone, and no memory is lost by the
    server's own numbers. Answers whose slots are evicted also have a form, a seed and counts."""
    drawn = random.Random(0)
    texts = drawn_texts(drawn, 12)
    with client(model, tmp_path, *ASKING, *FORMS, kvevict=EVICTS) as one:
        alone = [answer(one, text) for text in texts]
        assert len({*alone}) == len(alone)
        asked = [[(drawn.randrange(12), drawn.random() < 0.3) for _ in range(20)] for _ in range(3)]
        with concurrent.futures.ThreadPoolExecutor(3) as clients:
            found = clients.map(lambda own: [answer(one, texts[i], leaves) for i, leaves in own], asked)
        want = [[None if leaves else alone[i] for i, leaves in own] for own in asked]
        assert [*found] == want
        longest = max(texts, key=len)
        two = [one.completions.create(model="m", prompt=longest, n=2, temperature=1, seed=5) for _ in range(2)]
        assert [each.text for each in two[0].choices] == [each.text for each in two[1].choices]
        assert len({each.text for each in two[0].choices}) == 2 and two[0].usage.prompt_tokens == len(longest)
        assert json.loads(one.chat.completions.create(**CHAT, response_format=SCHEMA).choices[0].message.content)
        answer(one, texts[0])  # the requests that were left have ended before this one
        assert [gauge(one, name) for name in ("kv_cache_usage_perc", "num_requests_running")] == [0, 0]


def test_a_killed_engine_ends_the_server_and_no_answer_is_wrong(tmp_path, model):
    """Three requests are there when the engine's process is killed: each ends with an error or with a beginning of its
    answer. A new server gives all answers."""
    import openai
    import psutil

    texts, errors, ended = drawn_texts(random.Random(2), 3), [], []

    def beginning(one, text, killed):
        found = []
        try:
            with one.completions.create(**LINE | dict(prompt=text, max_tokens=150)) as parts:
                for part in parts:
                    found.append(part.choices[0].text)
                    if len(found) == 3:
                        killed.result()
        except (openai.APIError, ConnectionError) as error:
            errors.append(error)
        return "".join(found)

    with client(model, tmp_path, *ASKING, kvevict=EVICTS) as one:
        (engine,) = [each for each in psutil.Process().children(True) if "EngineCore" in "".join(each.cmdline())]
        server = psutil.Process(engine.ppid())
        killed = concurrent.futures.Future()
        with concurrent.futures.ThreadPoolExecutor(3) as clients:
            found = [clients.submit(beginning, one, text, killed) for text in texts]
            while gauge(one, "num_requests_running") < 3:
                assert not all(each.done() for each in found)
            engine.kill()
            killed.set_result(None)
        ended += psutil.wait_procs([server], 60)[0]
    assert ended and len(errors) == 3
    with client(model, tmp_path, *ASKING, kvevict=EVICTS) as one:
        whole = [answer(one, text, max_tokens=150) for text in texts]
    assert all(all_of.startswith(each.result()) for all_of, each in zip(whole, found, strict=True))


def test_two_replicas_answer_alike(tmp_path, model):
    """vLLM's own data parallelism: both replicas answer, as one does alone."""
    texts = drawn_texts(random.Random(1), 8)
    with client(model, tmp_path, *ASKING, kvevict=EVICTS) as one:
        alone = [answer(one, text) for text in texts]
    with client(model, tmp_path, *ASKING, "--data-parallel-size", "2", kvevict=EVICTS) as one:
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            assert [*clients.map(lambda text: answer(one, text), texts * 3)] == alone * 3
        served = re.findall(r'^vllm:request_success_total{engine="(\d)".*} ([1-9]\S*)$', page(one, "metrics"), re.M)
        assert {engine for engine, _ in served} == {"0", "1"}
