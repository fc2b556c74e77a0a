"""Long answers: how far a policy that evicts while decoding moves them from the full cache's.

    python tests/benchmarks/bench_answers.py --model DIR --haystack BOOKS --out FILE [--gates DIR] [--stats FILE]
    python tests/benchmarks/bench_answers.py --out FILE --table

BOOKS is a folder of texts (*.txt). A prompt of 128 tokens is followed by 1,024 tokens that are given ("forced"): a
book's own, numbers counted on, a list that goes round, or, after 1,024 tokens, those copied. Every policy holds the
prompt and 1/4 or 1/8 of what follows, and cuts the rest every 64 tokens. Of every text FILE gets a line: KL to the full
cache's next-token distributions, nats above it, and how often the likeliest token is the given one; lines that it has
are not measured again. Given tokens are read 64 at a time, which `--check` compares with decoding them one by one:
between two cuts nothing is lost either way.

    ... --free 600      policies write themselves, greedily, from chat prompts: length until the end and repetition
    ... --kvpress       kvpress's DecodingPress on the same tokens (KVPRESS_PYTHON: see kvpress_answers.py)
"""

import argparse
import calendar
import json
import os
import statistics
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import torch

PROMPT, EVERY, COPIED = 128, 64, 1024
POLICIES = {  # label: (preset, options, whether the prompt is kept)
    "random/redraw, prompt kept": ("random/redraw", {}, True),
    "streaming": ("streaming", {}, False),
    "h2o": ("h2o", {}, False),
    "snapkv": ("snapkv", {}, False),
    "random/redraw": ("random/redraw", {}, False),
    "tri, prompt kept": ("tri", {}, True),
    "rkv": ("rkv", {}, False),
    "expected, prompt kept": ("expected", {}, True),
    "gate, prompt kept": ("gate", dict(layers="uniform", recent=64), True),
    "h2o, prompt kept": ("h2o", {}, True),
    "snapkv, prompt kept": ("snapkv", {}, True),
    "tova": ("tova", {}, False),
    "random": ("random", {}, False),
    "streaming, prompt kept": ("streaming", {}, True),
    "rkv, prompt kept": ("rkv", {}, True),
    "tova, prompt kept": ("tova", {}, True),
    "tri": ("tri", {}, False),
    "expected": ("expected", {}, False),
    "gate": ("gate", dict(layers="uniform", recent=64), False),
}
PRESSES = {"SnapKV": dict(window_size=32), "KeyDiff": {}, "Knorm": {}}  # SnapKV's window is within a block
QUESTIONS = (
    "Write a long story about a lighthouse keeper who finds a map.",
    "Explain in detail how bread is made, from the field to the table.",
    "Describe the history of the bicycle and how it changed towns.",
    "Write a long letter to a friend about a journey by train across the mountains.",
    "List thirty animals and say one thing about each.",
    "Explain how the heart works, step by step, for a child.",
)
WORDS = list(calendar.month_name)[1:]


def policy_for(label, share, prompt, tokens, gates, stats):
    """(preset, options) that hold the prompt and a share of the tokens, all told."""
    name, options, keeps = POLICIES[label]
    most = round(share * (tokens - 1))
    options = options | dict(budget=prompt + most)
    if keeps:
        options["keep_first"] = prompt
        options |= dict(recent=most // 2) if name == "h2o" else {}
    if name in ("expected", "tri"):
        options["stats"] = stats
    if name == "gate":
        options["gates"] = gates
    return name, options | dict(chunk_size=EVERY, decode=False)


def texts(tokenizer, haystack, count, tokens):
    """Yields (kind, id, prompt [P], given [T])."""
    length = PROMPT + tokens + 1  # the last one is only predicted
    for path in sorted(Path(haystack).glob("*.txt"))[:count]:
        text = path.read_text(encoding="utf-8")
        ids = tokenizer(text[len(text) // 2 :][: 12 * length], add_special_tokens=False).input_ids
        yield "book", path.stem, ids[:PROMPT], ids[PROMPT:length]
    for start in (1, 401):
        ids = tokenizer(", ".join(map(str, range(start, start + length)))).input_ids
        yield "count", str(start), ids[:PROMPT], ids[PROMPT:length]
    for start in (0, 5):
        turn = [WORDS[(start + i) % 12] + f" {1900 + i}" for i in range(length)]
        ids = tokenizer("\n".join(turn)).input_ids
        yield "list", str(start), ids[:PROMPT], ids[PROMPT:length]
    for path in sorted(Path(haystack).glob("*.txt"))[count : count + 2]:
        text = path.read_text(encoding="utf-8")
        ids = tokenizer(text[len(text) // 2 :][: 12 * COPIED], add_special_tokens=False).input_ids[:COPIED]
        yield "copy", path.stem, ids, ids + ids[:1]


def batches(tokenizer, args):
    """(kind, ids of texts, prompts [B, P], given tokens [B, T]) of texts that are measured together."""
    groups: dict = {}
    for kind, name, prompt, given in texts(tokenizer, args.haystack, args.texts, args.tokens):
        groups.setdefault(kind, []).append((name, prompt, given))
    for kind, each in groups.items():
        names, prompts, given = zip(*each, strict=True)
        yield kind, names, torch.tensor(prompts), torch.tensor(given)


def measures(model, full, hidden, given):
    """Yields of each text what its states hidden [B, T, E] say beside the full cache's."""
    head = model.get_output_embeddings()
    for want, got, ids in zip(full, hidden, given, strict=True):
        found = []
        for part in range(0, len(ids), 250):
            rows = slice(part, part + 250)
            p, q = (head(x[rows]).float().log_softmax(-1) for x in (want, got))
            at = ids[rows, None]
            kl = (p.exp() * (p - q)).sum(-1)
            found.append(torch.stack([kl, (p - q).gather(1, at)[:, 0], (q.argmax(-1) == at[:, 0]).float(),
                                      (p.argmax(-1) == at[:, 0]).float()]))  # fmt: skip
        kl, nats, right, best = torch.cat(found, 1).mean(1).tolist()
        yield dict(kl=kl, nats=nats, right=right, full_right=best)


def states(model, prompts, given, chosen=None):
    """The last hidden states [B, T, E] that predict each given token; chosen: (preset, options), None: the full cache,
    in one pass."""
    decoder, ids = model.model, torch.cat([prompts, given], 1)[:, :-1]
    if chosen is None:
        return decoder(ids, use_cache=False).last_hidden_state[:, prompts.shape[1] - 1 :]
    import kvevict

    with kvevict.evicting(model, chosen[0], **chosen[1]):
        first = decoder(prompts, use_cache=True)
        rest = decoder(ids[:, prompts.shape[1] :], past_key_values=first.past_key_values, use_cache=True)
    return torch.cat([first.last_hidden_state[:, -1:], rest.last_hidden_state], 1)


def one_by_one(model, prompts, given, chosen):
    """`states`, of tokens that are decoded."""
    import kvevict

    name, options = chosen
    keeps = options.pop("keep_first", 0)
    options |= dict(decode=True, interval=EVERY, chunk_size=None, budget=options["budget"] - keeps)
    options["keep_prompt"] = keeps > 0
    ample, decoder = kvevict.evicting(model, "streaming", budget=1 << 20), model.model
    with ample:
        out = decoder(prompts, use_cache=True)
    found = [out.last_hidden_state[:, -1:]]
    with kvevict.evicting(model, name, **options):
        for token in given[:, :-1].split(1, 1):
            out = decoder(token, past_key_values=out.past_key_values, use_cache=True)
            found.append(out.last_hidden_state)
    return torch.cat(found, 1)


def known(out) -> list:
    return [json.loads(line) for line in open(out, encoding="utf-8")] if os.path.exists(out) else []


def note(out, **line) -> None:
    with open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def of_presses(folder, args):
    """kvpress's side, in its own process: DecodingPress after every block of given tokens."""
    import kvpress
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    done = {(x["policy"], x["share"], x["kind"]) for x in known(args.out)}
    for kind, names, prompts, given in batches(tokenizer, args):
        full = None
        for name in PRESSES:
            for share in map(Fraction, args.shares):
                if (f"kvpress {name}", float(share), kind) in done or kind not in args.kinds:
                    continue
                full = states(model, prompts, given) if full is None else full
                base = getattr(kvpress, f"{name}Press")(**PRESSES[name])
                most = prompts.shape[1] + round(share * (given.shape[1] - 1))
                press = kvpress.DecodingPress(base, compression_interval=1, target_size=most)
                cache, ids, found = DynamicCache(), torch.cat([prompts, given], 1)[:, :-1], []
                with press(model):
                    at = prompts.shape[1]
                    found.append(model.model(ids[:, :at], past_key_values=cache).last_hidden_state[:, -1:])
                    for start in range(at, ids.shape[1], EVERY):
                        block = ids[:, start : start + EVERY]
                        place = torch.arange(start, start + block.shape[1])[None]
                        # A target that is not reached yet is none: DecodingPress would repeat slots.
                        press.target_size = min(most, cache.get_seq_length() + block.shape[1])
                        where = dict(position_ids=place, past_key_values=cache)
                        found.append(model.model(block, **where).last_hidden_state)
                hidden = torch.cat(found, 1)
                for text, each in zip(names, measures(model, full, hidden, given), strict=True):
                    note(args.out, policy=f"kvpress {name}", share=float(share), kind=kind, text=text, **each)
                print(kind, "kvpress", name, share, flush=True)


def forced(model, tokenizer, args):
    done = {(x["policy"], x["share"], x["kind"]) for x in known(args.out)}
    for kind, names, prompts, given in batches(tokenizer, args):
        if kind not in args.kinds:
            continue
        full = None
        for label in args.policies or POLICIES:
            for share in map(Fraction, args.shares):
                if (label, float(share), kind) in done:
                    continue
                chosen = policy_for(label, share, prompts.shape[1], given.shape[1], args.gates, args.stats)
                full = states(model, prompts, given) if full is None else full
                try:
                    hidden = states(model, prompts, given, chosen)
                except ValueError as error:
                    print(label, error, flush=True)
                    continue
                for text, each in zip(names, measures(model, full, hidden, given), strict=True):
                    note(args.out, policy=label, share=float(share), kind=kind, text=text, **each)
                print(kind, label, share, flush=True)


def repeated(ids, n=8) -> float:
    """The share of runs of n tokens that occurred before."""
    runs = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def free(model, tokenizer, args):
    """Greedy answers of at most `--free` tokens: length until the end, repeated runs of 8 tokens."""
    import kvevict

    tokenizer.padding_side = "left"
    asked, more = QUESTIONS[: args.texts], dict(return_dict=True, return_tensors="pt", padding=True)
    if tokenizer.chat_template:
        turns = [[dict(role="user", content=each)] for each in asked]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, **more)
    else:
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        inputs = tokenizer(list(asked), **more)
    done = {(x["policy"], x["share"]) for x in known(args.out) if x["kind"] == "free"}
    prompt = inputs["input_ids"].shape[1]
    for each in map(Fraction, args.shares):
        for label in ("full", *(args.policies or POLICIES)):
            share = Fraction(1) if label == "full" else each
            if (label, float(share)) in done:
                continue
            most, how = round(share * args.free), dict(max_new_tokens=args.free, do_sample=False)
            if label == "full":
                out = model.generate(**inputs, **how)
            else:
                name, _, keeps = POLICIES[label]
                given = policy_for(label, share, prompt, args.free, args.gates, args.stats)[1]
                given = {key: value for key, value in given.items() if key not in ("keep_first", "chunk_size")}
                given |= dict(decode=True, interval=EVERY, keep_prompt=keeps)
                given["budget"] = max(most, prompt) if keeps else prompt + most
                with kvevict.evicting(model, name, **given):
                    out = model.generate(**inputs, **how)
            done.add((label, float(share)))
            ends = model.generation_config.eos_token_id
            ends = set(ends if isinstance(ends, list) else [ends])
            for number, ids in enumerate(out[:, prompt:].tolist()):
                end = next((i for i, token in enumerate(ids) if token in ends), len(ids))
                said = dict(length=end, ended=end < len(ids), repeated=repeated(ids[:end]))
                words = tokenizer.decode(ids[:end])
                note(args.out, policy=label, share=float(share), kind="free", text=str(number), said=words, **said)
            print("free", label, share, flush=True)


def interval(values) -> str:
    from kvevict.evaluate.intervals import student

    return f"{statistics.mean(values):.3f}" + (f" ± {student(values):.3f}" if len(values) > 1 else "")


def table(args):
    """Means over texts; beside KL its difference from `random/redraw, prompt kept` on the same texts, Student's
    intervals of 95 %."""
    lines = known(args.out)
    for kind in dict.fromkeys(line["kind"] for line in lines if line["kind"] != "free"):
        for share in sorted({x["share"] for x in lines if x["kind"] == kind}, reverse=True):
            mine = {(x["policy"], x["text"]): x for x in lines if (x["kind"], x["share"]) == (kind, share)}
            of_full = statistics.mean([x["full_right"] for x in mine.values()])
            print(f"\n{kind}, {Fraction(share).limit_denominator(64)} of the answer; full cache right {of_full:.3f}")
            print("| policy | n | KL | KL less random redrawn | nats above full | right |\n|---|---|---|---|---|---|")
            base = {text: x["kl"] for (policy, text), x in mine.items() if policy == next(iter(POLICIES))}
            rows = []
            for policy in dict.fromkeys(policy for policy, _ in mine):
                own = [(text, x) for (name, text), x in mine.items() if name == policy]
                pairs = [x["kl"] - base[text] for text, x in own if text in base]
                kl, nats, right = ([x[key] for _, x in own] for key in ("kl", "nats", "right"))
                rows.append((statistics.mean(kl), f"| {policy} | {len(own)} | {interval(kl)} | {interval(pairs)} | "
                             f"{statistics.mean(nats):.3f} | {statistics.mean(right):.3f} |"))  # fmt: skip
            print("\n".join(row for _, row in sorted(rows)))
    written = [x for x in lines if x["kind"] == "free"]
    if written:
        print("\n| policy | share | n | tokens | ended | repeated runs of 8 |\n|---|---|---|---|---|---|")
    for policy, share in dict.fromkeys((x["policy"], x["share"]) for x in written):
        own = [x for x in written if (x["policy"], x["share"]) == (policy, share)]
        length, repeats = ([x[key] for x in own] for key in ("length", "repeated"))
        print(f"| {policy} | {Fraction(share).limit_denominator(64)} | {len(own)} | {statistics.mean(length):.0f} | "
              f"{sum(x['ended'] for x in own)} | {interval(repeats)} |")  # fmt: skip


def check(model, tokenizer, args):
    """Blocks of given tokens beside decoding them: the largest difference of a state, in units of their mean size."""
    _, _, prompts, given = next(batches(tokenizer, args))
    prompts, given = prompts[:1], given[:1, :321]
    for label in args.policies or ("h2o", "h2o, prompt kept", "snapkv, prompt kept", "random/redraw, prompt kept"):
        chosen = lambda label=label: policy_for(label, Fraction(2, 5), PROMPT, 321, args.gates, args.stats)  # noqa: E731
        a, b = states(model, prompts, given, chosen()), one_by_one(model, prompts, given, chosen())
        print(label, float((a - b).abs().max() / a.abs().mean()), flush=True)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--haystack")
    parser.add_argument("--out", required=True)
    parser.add_argument("--gates")
    parser.add_argument("--stats", help="file of `kvevict statistics`, for expected and tri")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--shares", nargs="+", default=["1/4", "1/8"])
    parser.add_argument("--kinds", nargs="+", default=["book", "count", "list", "copy"])
    parser.add_argument("--policies", nargs="+")
    parser.add_argument("--free", type=int)
    parser.add_argument("--kvpress", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return table(args)
    if args.child:
        return of_presses(args.model, args)
    if args.kvpress:
        given = [each for each in sys.argv[1:] if each != "--kvpress"]
        return subprocess.run([os.environ["KVPRESS_PYTHON"], __file__, "--child", *given], check=True)
    from kvevict.analysis.run import load_model

    model, tokenizer = load_model(args.model, "float32", "cpu")
    (check if args.check else free if args.free else forced)(model, tokenizer, args)


if __name__ == "__main__":
    main()
