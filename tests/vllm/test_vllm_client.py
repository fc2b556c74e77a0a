"""OpenAI's client and vLLM's server with kvevict."""

import concurrent.futures
import contextlib
import importlib.util
import random
import re
import urllib.request

import pytest
import tiny
from in_vllm import QUESTIONS, needed, serving

pytestmark = [needed, pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs openai")]
LONGEST = 512
ASKING = ["--scheduler-cls", QUESTIONS["scheduler_cls"], "--logits-processors", *QUESTIONS["logits_processors"]]
EVICTS = dict(budget=32, period=16, policy="take+edie", probe=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    made = tiny.model(vocab_size=259, bos_token_id=None, pad_token_id=None, max_position_embeddings=LONGEST)
    made.save_pretrained(folder)
    tiny.chat_tokenizer().save_pretrained(folder)
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


def test_three_clients_get_their_own_answers(tmp_path, model):
    """20 requests each, of which some are left early: each answer is that given alone, and no memory is lost by the
    server's own numbers."""
    drawn = random.Random(0)
    texts = ["".join(drawn.choices("abcdefg ?.", k=drawn.randint(1, 300))) for _ in range(12)]
    with client(model, tmp_path, *ASKING, kvevict=EVICTS) as one:

        def answer(text, leaves=False):
            found = []
            with one.completions.create(model="m", prompt=text, temperature=0, max_tokens=30, stream=True) as parts:
                for part in parts:
                    found.append(part.choices[0].text)
                    if leaves:
                        return None
            return "".join(found)

        alone = [answer(text) for text in texts]
        assert len({*alone}) == len(alone)
        asked = [[(drawn.randrange(12), drawn.random() < 0.3) for _ in range(20)] for _ in range(3)]
        with concurrent.futures.ThreadPoolExecutor(3) as clients:
            found = clients.map(lambda own: [answer(texts[i], leaves) for i, leaves in own], asked)
        want = [[None if leaves else alone[i] for i, leaves in own] for own in asked]
        assert [*found] == want
        answer(texts[0])  # the requests that were left have ended before this one
        assert [gauge(one, name) for name in ("kv_cache_usage_perc", "num_requests_running")] == [0, 0]


def test_two_replicas_answer_alike(tmp_path, model):
    """vLLM's own data parallelism: both replicas answer, as one does alone."""
    drawn = random.Random(1)
    texts = ["".join(drawn.choices("abcdefg ?.", k=drawn.randint(1, 300))) for _ in range(8)]

    def answer(one, text):
        return one.completions.create(model="m", prompt=text, temperature=0, max_tokens=30).choices[0].text

    with client(model, tmp_path, *ASKING, kvevict=EVICTS) as one:
        alone = [answer(one, text) for text in texts]
    with client(model, tmp_path, *ASKING, "--data-parallel-size", "2", kvevict=EVICTS) as one:
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            assert [*clients.map(lambda text: answer(one, text), texts * 3)] == alone * 3
        served = re.findall(r'^vllm:request_success_total{engine="(\d)".*} ([1-9]\S*)$', page(one, "metrics"), re.M)
        assert {engine for engine, _ in served} == {"0", "1"}
