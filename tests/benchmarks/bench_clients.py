"""Many clients of one `kvevict serve`, and short requests while a long text is read:

    python tests/benchmarks/bench_clients.py --model DIR --haystack BOOK [--clients 1 8 32] [--requests 32] [--runs 3]

The same of another server that runs, with its name for the same model (and without the long text):

    python tests/benchmarks/bench_clients.py --model DIR --haystack BOOK --url http://127.0.0.1:8080/v1 --name NAME

Prompts are parts of the book, of about --prompt tokens, after the same --shared tokens of it, if any; an answer has
--tokens, at temperature 0. Every prompt is first asked alone: answers that differ later are counted, and of each the
nats between the two tokens where they part, as the model has them alone. All numbers of clients are timed in turn,
--runs times. Prints tokens/s of all clients, and seconds to the first token: median and 99 of 100. Then a request comes
every --every seconds while a text of --long tokens is read; prints the same of these requests.
"""

import contextlib
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import openai
from bench_read import arguments
from bench_serve import asked, client_of, served
from transformers import AutoTokenizer


def of_100(seconds, share):
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def measured(client, name, prompts, clients, tokens):
    """(tokens per second, seconds to each first token, answers) of so many clients that ask one after the other."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda prompt: asked(client, name, prompt, tokens, logit_bias=client.bias), prompts))
    seconds = time.perf_counter() - start
    written = sum(len(client.tokenizer(said)["input_ids"]) for _, said in found)
    return written / seconds, [first for first, _ in found], [said for _, said in found]


def parted(client, name, tokens, prompt, said, **more):
    """Nats between the token of the answer alone and that of another one where the two part; infinite if the other one
    is not among the five likeliest."""
    asks = dict(model=name, prompt=prompt, max_tokens=tokens, temperature=0, logit_bias=client.bias, **more)
    alone, place = client.completions.create(**asks, logprobs=5).choices[0].logprobs, 0
    for token, known, others in zip(alone.tokens, alone.token_logprobs, alone.top_logprobs, strict=True):
        if not said.startswith(token, place):
            others = [value for other, value in others.items() if other and said.startswith(other, place)]
            return known - max(others, default=-math.inf)
        place += len(token)
    return 0.0


def beside(client, name, prompts, long, tokens, every):
    """Seconds to the first tokens of requests that come while a text is read, and the seconds of that."""
    done, taken = threading.Event(), []

    def store():
        start = time.perf_counter()
        client.post("/kvevict/texts", body=dict(name="long", text=long), cast_to=object)
        taken.append(time.perf_counter() - start)
        done.set()

    with ThreadPoolExecutor(64) as pool:
        pool.submit(store)
        time.sleep(every)
        found = []
        for prompt in prompts * 100:
            if done.is_set():
                break
            found.append(pool.submit(asked, client, name, prompt, tokens, logit_bias=client.bias))
            time.sleep(every)
        return [each.result()[0] for each in found], taken[0]


def main():
    given = dict(clients=[1, 8, 32], requests=32, prompt=200, shared=0, tokens=64, long=20000, every=2.0, runs=3)
    own = dict(budget="512", policy=None, dtype="bfloat16", url=None, name=None)
    args = arguments(__doc__, model=..., haystack=..., **given, **own)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    most = args.shared + args.long + args.requests * args.prompt
    ids = tokenizer(Path(args.haystack).read_text("utf-8")[: 8 * most])["input_ids"]
    shared, ids = tokenizer.decode(ids[: args.shared]), ids[args.shared :]
    begins = [n * args.prompt for n in range(args.requests)]
    prompts = [shared + tokenizer.decode(ids[at : at + args.prompt - n % 7]) for n, at in enumerate(begins)]
    rest = ids[args.requests * args.prompt :]
    name = args.name or Path(args.model).name
    server = contextlib.nullcontext((None, client_of(args.url))) if args.url else served("kvevict", args)
    with server as (_, client):
        client.bias = openai.NOT_GIVEN if args.url else {str(tokenizer.eos_token_id): -100}
        client.tokenizer = tokenizer
        alone = [asked(client, name, prompt, args.tokens, logit_bias=client.bias)[1] for prompt in prompts]
        speeds, firsts, differ = ({clients: [] for clients in args.clients} for _ in range(3))
        for _ in range(args.runs):
            for clients in args.clients:
                speed, seconds, said = measured(client, name, prompts, clients, args.tokens)
                speeds[clients].append(speed)
                firsts[clients] += seconds
                pairs = zip(prompts, alone, said, strict=True)
                differ[clients] += [(prompt, other) for prompt, one, other in pairs if one != other]
        base = median(speeds[args.clients[0]])
        for clients in args.clients:
            speed = median(speeds[clients])
            nats = [0.0 if args.url else parted(client, name, args.tokens, *each) for each in differ[clients]]
            print(
                f"{clients} clients: {speed:.1f} tokens/s, {speed / base:.2f} times; first token p50 "
                f"{of_100(firsts[clients], 0.5):.2f} s, p99 {of_100(firsts[clients], 0.99):.2f} s; "
                f"{len(nats)} of {args.runs * len(prompts)} answers differ from those alone, by "
                f"{max(nats, default=0):.3f} nats at most where they part",
                flush=True,
            )
        if args.long and not args.url:
            long = tokenizer.decode(rest[: args.long])
            seconds, taken = beside(client, name, prompts, long, 8, args.every)
            print(
                f"while {args.long} tokens are read ({taken:.1f} s): {len(seconds)} requests, first token p50 "
                f"{of_100(seconds, 0.5):.2f} s, p99 {of_100(seconds, 0.99):.2f} s"
            )


if __name__ == "__main__":
    main()
