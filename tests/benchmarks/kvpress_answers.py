"""kvpress's answers beside ours to questions that come after the text (task `many`), and what a read takes:

    KVPRESS_PYTHON=DIR/bin/python python tests/benchmarks/kvpress_answers.py --model DIR --haystack BOOKS --out FILE

KVPRESS_PYTHON is the Python of an environment with kvpress 0.5.5, as tests/policies/test_kvpress.py describes. FILE
holds lines of `kvevict eval --dtype float32 --tasks many --lengths 2000 --mode agnostic --share-reads` with at least as
many --cases. The lines of each press at each share that it lacks are added, its policy "kvpress NAME", and `kvevict
eval --table-only --out FILE` compares all on the same questions. A press reads and answers by kvpress's own pipeline,
from the ids that ours gets.

    ... --memory kvzip compactor --shares 1/4 --chunk-size 512

prints the seconds and the growth of peak memory of reading the first text instead, each in a process of its own: of
every press, of these policies and of the unpatched model ("full").
"""

import argparse
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import torch
from bench_read import measured

WARM = 64  # tokens read before a read is measured
PRESSES = {  # of kvpress; heads compete in Expected Attention, as in its paper
    "KVzip": lambda kvpress, ratio: kvpress.KVzipPress(ratio),
    "Expected": lambda kvpress, ratio: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio, epsilon=0.01)),
    "Compactor": lambda kvpress, ratio: kvpress.CompactorPress(ratio),
    "KeyDiff": lambda kvpress, ratio: kvpress.KeyDiffPress(ratio),
}


def cost(read) -> dict:
    _, seconds, growth = measured(read)
    return dict(seconds=seconds, growth=growth)


def of_kvpress(model, tokenizer, name, share, texts):
    """Yields of each text what it read and its answers."""
    import kvpress
    from transformers import DynamicCache

    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    for text in texts:
        ids, cache = torch.tensor([text["context"]]), DynamicCache()
        given = dict(context_ids=ids, questions_ids=[])
        pipe._forward(given | dict(context_ids=ids[:, :WARM]))
        press = PRESSES[name](kvpress, 1 - share)
        said = cost(lambda given=given, press=press, cache=cache: pipe._forward(given, press=press, cache=cache))
        said["answers"] = []
        for question, most in text["asked"]:
            lengths = [layer.keys.shape[2] for layer in cache.layers]
            said["answers"].append(pipe.generate_answer(torch.tensor([question]), cache, ids.shape[1], most))
            pipe._remove_answer_from_cache(cache, lengths)
        yield said


def of_kvevict(model, run, share, chunk, texts):
    from contextlib import nullcontext

    import kvevict
    from kvevict.evaluate.ask import Run, policy_for

    for text in texts:
        ids = torch.tensor([text["context"]])
        policy = None if run == "full" else policy_for(Run(run, share, chunk, "agnostic"), ids.shape[1], ())
        with nullcontext() if policy is None else kvevict.evicting(model, policy):
            model(ids[:, :WARM])
            yield cost(lambda ids=ids: model(ids, use_cache=True, logits_to_keep=1))


@torch.no_grad()
def child(side, folder, name, share, chunk):
    """Reads texts as JSON from standard input and prints a line for each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    texts, share = json.load(sys.stdin), float(share)
    if side == "kvpress":
        said = of_kvpress(model, AutoTokenizer.from_pretrained(folder), name, share, texts)
    else:
        said = of_kvevict(model, name, share, int(chunk) or None, texts)
    for each in said:
        print(json.dumps(each), flush=True)


def apart(args, side, name, share, texts):
    """Yields what a process of its own says of each text, as soon as it says so."""
    python = os.environ["KVPRESS_PYTHON"] if side == "kvpress" else sys.executable
    command = [python, __file__, "--child", side, args.model, name, str(float(share)), str(args.chunk_size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        json.dump(texts, process.stdin)
        process.stdin.close()
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        raise SystemExit(f"{side} {name} ended with {process.returncode}")


def prompts(args) -> list:
    """Of each text its [(case, prompt)], as `kvevict eval` has them."""
    from transformers import AutoConfig, AutoTokenizer

    from kvevict.evaluate.ask import encode
    from kvevict.evaluate.run import _texts
    from kvevict.evaluate.tasks import Settings, find

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = SimpleNamespace(config=AutoConfig.from_pretrained(args.model))  # of which only the context's length is read
    settings = Settings(tokenizer, 2000, args.cases, 0, Settings.depths, Path(args.haystack), None)
    return [[(case, encode(model, tokenizer, case)) for case in text] for text in _texts(list(find("many")(settings)))]


def as_json(text, asked=True) -> dict:
    return dict(context=text[0][1].context, asked=[(p.question, case.new_tokens) for case, p in text if asked])


def compare(args, texts):
    from kvevict.evaluate.metrics import METRICS
    from kvevict.evaluate.results import KEY, read

    _, lines = read(args.out)
    known = {tuple(line[name] for name in KEY) for line in lines}
    if missing := {case.id for text in texts for case, _ in text} - {x["id"] for x in lines if x["policy"] == "full"}:
        raise SystemExit(f"{args.out} lacks the full cache's answers of {min(missing)}; run kvevict eval with --cases")
    for name in PRESSES:
        for share in args.shares:
            setting = f"kvpress {name}", float(share), None, "agnostic"
            left = [text for text in texts if any((c.task, c.id, 0, *setting) not in known for c, _ in text)]
            for text, said in zip(left, apart(args, "kvpress", name, share, [as_json(text) for text in left])):
                scores = [
                    METRICS[case.metric](answer, case.answers) for (case, _), answer in zip(text, said["answers"])
                ]
                with open(args.out, "a", encoding="utf-8") as file:
                    for (case, prompt), answer, score in zip(text, said["answers"], scores, strict=True):
                        line = dict(zip(KEY, (case.task, case.id, 0, *setting), strict=True), metric=case.metric)
                        line |= dict(prediction=answer, score=score)
                        line |= dict(read_seconds=said["seconds"], prompt_tokens=len(prompt.context + prompt.question))
                        file.write(json.dumps(line | dict(tags=case.tags | dict(length=2000))) + "\n")
                print(*setting[:2], sum(scores))


def memory(args, texts):
    print(f"{'':30} seconds   MiB")
    for side, names in (("kvevict", ("full", *args.memory)), ("kvpress", PRESSES)):
        for name in names:
            (said,) = apart(args, side, name, args.shares[0], [as_json(texts[0], asked=False)])
            print(f"{side + ' ' + name:30} {said['seconds']:7.2f} {said['growth']:5.0f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--haystack", required=True)
    parser.add_argument("--out")
    parser.add_argument("--cases", type=int, default=5)
    parser.add_argument("--shares", type=Fraction, nargs="+", default=[Fraction(1, n) for n in (8, 4, 2)])
    parser.add_argument("--memory", nargs="*")
    parser.add_argument("--chunk-size", type=int, default=512)
    args = parser.parse_args()
    with torch.no_grad():
        (compare if args.memory is None else memory)(args, prompts(args))
