"""Many clients who ask one `kvevict serve` about a few stored texts, for some minutes:

    python tests/benchmarks/bench_load.py --model DIR --haystack BOOKS [--clients 64] [--texts 8] [--seconds 300]
        [--policy take+edie:recall=false]

The texts and questions are those of `kvevict eval --tasks many`. Every question is asked alone first. Then each client
asks one after the other, drawn at random, at /v1/completions. Prints how many answers came, how many differ from those
alone and by how much where they part (`bench_clients.py`), how many requests were lost, seconds to the first token and
to the last (median, 99 of 100), and the memory of the server's process after each fifth of the time.
"""

import random
import threading
import time
from pathlib import Path

import openai
from bench_clients import of_100, parted
from bench_read import arguments, resident
from bench_serve import NEW, asked, served
from transformers import AutoTokenizer

from kvevict.lab.evaluate.tasks import TaskSettings, find


def questions_of(args, tokenizer) -> list:
    """[(name of a text, the text, its question)]"""
    found = []
    for seed in range(args.texts):
        settings = TaskSettings(tokenizer, args.length, 1, seed, TaskSettings.depths, Path(args.haystack), None)
        found += [(f"text {seed}", case.context, case.question) for case in find("many")(settings)]
    return found


def main():
    given = dict(clients=64, texts=8, length=1500, seconds=300.0, budget="512", dtype="float32", policy="")
    args = arguments(__doc__, model=..., haystack=..., **given)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    questions = questions_of(args, tokenizer)
    memory, said, lost, ended = [], [], [], threading.Event()
    with served("kvevict", args) as (process, client):
        name = Path(args.model).name
        for text, words in dict(each[:2] for each in questions).items():
            client.post("/kvevict/texts", body=dict(name=text, text=words), cast_to=object)

        client.bias = {str(tokenizer.eos_token_id): -100}

        def opened(text):
            return dict(extra_body=dict(kvevict=dict(text=text)))

        def ask(text, question):
            return asked(client, name, question, NEW, logit_bias=client.bias, **opened(text))[::-1]

        alone = {(text, question): ask(text, question)[0] for text, _, question in questions}

        def asks(seed):
            rng = random.Random(seed)
            while not ended.is_set():
                key, start = rng.choice(list(alone)), time.perf_counter()
                try:
                    answer, first = ask(*key)
                    said.append((key, answer, first, time.perf_counter() - start))
                except openai.OpenAIError as error:
                    lost.append(error)

        clients = [threading.Thread(target=asks, args=(seed,)) for seed in range(args.clients)]
        for each in clients:
            each.start()
        for _ in range(5):
            time.sleep(args.seconds / 5)
            memory.append(resident(process=process.pid))
        ended.set()
        for each in clients:
            each.join()
        differ = [(key, answer) for key, answer, *_ in said if answer != alone[key]]
        nats = [parted(client, name, NEW, key[1], answer, **opened(key[0])) for key, answer in set(differ)]
        firsts, wholes = ([each[at] for each in said if each[at] is not None] for at in (2, 3))
        print(
            f"{args.clients} clients, {args.texts} texts, {args.seconds:.0f} s: {len(said)} answers, "
            f"{len(differ)} differ from those alone, by {max(nats, default=0):.4f} nats at most where they part, "
            f"{len(lost)} lost; first token p50 "
            f"{of_100(firsts, 0.5):.2f} s, p99 {of_100(firsts, 0.99):.2f} s; whole answers {of_100(wholes, 0.5):.2f}, "
            f"{of_100(wholes, 0.99):.2f} s; MiB {', '.join(f'{each:.0f}' for each in memory)}"
        )


if __name__ == "__main__":
    main()
