"""Many clients who ask one `kvevict serve` about a few stored texts, for some minutes:

    python tests/benchmarks/bench_load.py --model DIR --haystack BOOKS [--clients 64] [--texts 8] [--seconds 300]

The texts and questions are those of `kvevict eval --tasks many`. Every question is asked alone first. Then each client
asks one after the other, drawn at random, at /v1/completions. Prints how many answers came, how many differ from those
alone and by how much where they part (`bench_clients.py`), how many requests were lost, seconds to the first token and
to the last (median, 99 of 100), and the memory of the server's process after each fifth of the time.
"""

import argparse
import random
import sys
import threading
import time
from pathlib import Path

import openai
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from bench_clients import of_100, parted
from bench_read import resident
from bench_serve import NEW, asked, started

from kvevict.lab.evaluate.tasks import TaskSettings, find


def questions_of(args, tokenizer) -> list:
    """[(name of a text, the text, its question)]"""
    found = []
    for seed in range(args.texts):
        settings = TaskSettings(tokenizer, args.length, 1, seed, TaskSettings.depths, Path(args.haystack), None)
        found += [(f"text {seed}", case.context, case.question) for case in find("many")(settings)]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--haystack", required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--budget", default="512")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    questions = questions_of(args, tokenizer)
    process, port = started("kvevict", args)
    memory, said, lost, ended = [], [], [], threading.Event()
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=3600, max_retries=0)
        name = Path(args.model).name
        for text, words in dict(each[:2] for each in questions).items():
            client.post("/kvevict/texts", body=dict(name=text, text=words), cast_to=object)

        client.bias = {str(tokenizer.eos_token_id): -100}

        def opened(text):
            return dict(extra_body=dict(kvevict=dict(text=text)))

        def ask(text, question):
            return asked(client, name, question, logit_bias=client.bias, **opened(text))[::-1]

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
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
