"""Agreement with the full cache on LongBench's prompts, by kind of work (kvevict/lab/evaluate/tasks/longbench.py):

    python tests/benchmarks/bench_agreement.py OUT.jsonl --model DIR --data FILE [--recall] [--runs take+edie@512 ...]

With --recall each context is read in one chunk by `take+edie` with recall=True and 128 slots, its question is
answered, and the unpatched model reads prompt and answer in one call: *same* is the share of the answer's tokens that
are its likeliest. With --runs, each POLICY@BUDGET, all slots are read once and write the answer; then each policy reads
the last 64 tokens of the context and the question, and chooses among all slots; the answer's tokens follow. So all
policies read in one chunk, and it is read once; what observes under `take+edie` are the words after the context.
--alone: runs that read the prompt anew, as policies need that score slots while they read, and packed slots. --later:
runs that read the context alone; all slots of the question, which comes after it, stay, as in `kvevict.answer`. *nats*
is an answer's mean negative log likelihood above that of all slots. --write: runs that also write an answer, which gets
LongBench's score. Writes a line per item and run, skips those that OUT has, and prints means by kind of work with 95 %
intervals (bootstrap over items). --against: a run from which the others' differences over the same items are printed,
too. Without --model it prints OUT's, and draws those of `take+edie` as --picture.
"""

import collections
import contextlib
import json
import math
import random
from pathlib import Path

import torch
from bench_read import arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict
from kvevict.answering.writing import written
from kvevict.asking.question import observing
from kvevict.context import within
from kvevict.lab.evaluate.ask import encode
from kvevict.lab.evaluate.following import followed, nats
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.plot import COLOURS, MARKERS
from kvevict.lab.evaluate.runs import KEEP_ALL
from kvevict.lab.evaluate.tasks import TaskSettings, find
from kvevict.models.compat import CACHE, cache_of

LAST = 64  # tokens of the context that a policy reads with the question
ONE = 2**20  # a chunk above every prompt
RECALL, POLICY = "recall", "take+edie"


def call(model, ids, cache=None):
    past = {} if cache is None else {CACHE: cache}
    return model(torch.tensor([ids]), **past, use_cache=True, logits_to_keep=1)


class Item:
    """A case, and its answer with all slots."""

    def __init__(self, model, tokenizer, case, most):
        self.model, self.tokenizer, self.case = model, tokenizer, case
        prompt = encode(model, tokenizer, case)
        ids, at = prompt.context + prompt.question, len(prompt.context)
        at = at if prompt.question else at - LAST  # some prompts end with their context
        self.context, self.question, self.said = ids[:at], ids[at:], prompt.said
        self.most = min(most, max(64, case.new_tokens))

    def write(self, out, cache):
        choose = [torch.argmax]
        return written(self.model, self.tokenizer, out.logits, cache, [self.most], choose, self.case.one_line)[0]

    def score(self, answer):
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return METRICS[self.case.metric](text, self.case.answers, *([self.case.classes] if self.case.classes else []))

    def evicting(self, policy, **options):
        return kvevict.evicting(self.model, policy, tokenizer=self.tokenizer, **options)

    def all_slots(self):
        with kvevict.evicting(self.model, KEEP_ALL, tokenizer=False):
            self.text = cache_of(call(self.model, self.context[:-LAST]))
            cache = self.text.fork()
            out = call(self.model, self.context[-LAST:] + self.question, cache)
            self.answer = self.write(out, cache.fork())
            (logits,) = followed(self.model, out.logits, cache, [self.answer])
        self.nats = nats(logits, self.answer)
        return dict(same=1.0, nats=0.0, score=self.score(self.answer), new=len(self.answer))

    def recall(self):
        with self.evicting(POLICY, budget=128, recall=True, chunk_size=ONE):
            with within(asks=False):
                cache = cache_of(call(self.model, self.context))
            answer = self.write(call(self.model, self.question, cache), cache)
        ids = torch.tensor([self.context + self.question + answer])
        logits = self.model(ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
        return self.compared(logits, answer) | dict(score=self.score(answer))

    def compared(self, logits, answer):
        right = (logits.argmax(1) == torch.tensor(answer)).tolist()
        return dict(same=sum(right) / len(right), first=[*right, False].index(False), new=len(right))

    def chosen(self, policy, budget, how, write):
        cache, ids = None, self.context + self.question
        if how == "runs":
            cache, ids = self.text.fork(), self.context[-LAST:] + self.question
        elif how == "later":
            ids = self.context
        before = len(self.context) + len(self.question) - len(ids)
        probes = self.said and policy.startswith("take") and self.said[0] >= before and how != "later"
        named = observing(tuple(end - before for end in self.said)) if probes else contextlib.nullcontext()
        chunk = {} if policy.startswith("read-") else dict(chunk_size=ONE)
        with self.evicting(policy, budget=budget, **chunk), named:
            out = call(self.model, ids, cache)
        cache = cache_of(out)
        with kvevict.evicting(self.model, KEEP_ALL, tokenizer=False):
            if how == "later":
                out = call(self.model, self.question, cache)
            more = dict(score=self.score(self.write(out, cache.fork()))) if write else {}
            (logits,) = followed(self.model, out.logits, cache, [self.answer])
        return self.compared(logits, self.answer) | dict(nats=nats(logits, self.answer) - self.nats) | more


def interval(values, others=None):
    """The mean of values, or its ratio to the mean of others, and its 95 % interval by the bootstrap."""
    rng, others = random.Random(0), others or [1.0] * len(values)

    def of(places):
        below = sum(others[at] for at in places)
        return sum(values[at] for at in places) / below if below else math.nan

    drawn = sorted(filter(math.isfinite, (of(rng.choices(range(len(values)), k=len(values))) for _ in range(2000))))
    ends = (drawn[len(drawn) // 40], drawn[-1 - len(drawn) // 40]) if drawn else (math.nan, math.nan)
    return of(range(len(values))), *ends


def shown(lines):
    """Print, by run and kind of work: share of same tokens, nats, items whose answer is the same, scores' ratio."""
    groups, full = collections.defaultdict(list), {}
    for line in lines:
        groups[line["run"]].append(line)
        if line["run"] == "all slots":
            full[line["id"]] = line["score"]
    for run, own in groups.items():
        for work in ("all", *dict.fromkeys(line["work"] for line in own)):
            mine = [line for line in own if work in ("all", line["work"])]
            same, low, high = interval([line["same"] for line in mine])
            text = f"{run:34} {work:10} n {len(mine):3} same {100 * same:5.1f} [{100 * low:.1f}, {100 * high:.1f}]"
            text += f" whole {sum(line['same'] == 1 for line in mine)}"
            if run != RECALL:
                text += f" nats {sum(line['nats'] for line in mine) / len(mine):+.3f}"
            scored = [line for line in mine if "score" in line and line["id"] in full]
            if scored:
                ratio = interval([line["score"] for line in scored], [full[line["id"]] for line in scored])
                mean = sum(line["score"] for line in scored) / len(scored)
                text += " score {:.3f} ratio {:.2f} [{:.2f}, {:.2f}]".format(mean, *ratio)
            print(text)


def differences(lines, base):
    """Print, by run, the mean differences from the run `base` over the items of both."""
    runs = collections.defaultdict(dict)
    for line in lines:
        runs[line["run"]][line["id"]] = line
    others = runs.pop(base)
    for run, own in runs.items():
        both = [(own[item], other) for item, other in others.items() if item in own]
        for name in ("same", "nats", "score"):
            apart = [mine[name] - other[name] for mine, other in both if name in mine and name in other]
            if apart:
                mean, low, high = interval(apart)
                print(f"{run:34} {name} above {base} {mean:+.4f} [{low:+.4f}, {high:+.4f}] n {len(apart)}")


def drawn(lines, path):
    """Draw the share of same tokens of `take+edie` against the share kept, a line for each kind of work."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 3.2), layout="constrained", dpi=150)
    axes, points = figure.subplots(), collections.defaultdict(list)
    for line in lines:
        policy, _, share = line["run"].rpartition("@")
        if policy == POLICY and "." in share:
            points[line["work"], float(share)].append(line["same"])
    shares = sorted({share for _, share in points})
    for at, work in enumerate(dict.fromkeys(work for work, _ in points)):
        own = {share: points[work, share] for share in shares if (work, share) in points}
        same, items = [100 * sum(each) / len(each) for each in own.values()], max(map(len, own.values()))
        style = dict(color=COLOURS[at], marker=MARKERS[at], markersize=5)
        axes.plot([*own, 1], [*same, 100], **style, label=f"{work} ({items})")
    axes.set_xscale("log", base=2)
    axes.set_xticks([*shares, 1], [*(f"1/{1 / share:.0f}" for share in shares), "all"])
    axes.minorticks_off()
    axes.set(xlabel="share of the slots kept by take+edie", ylabel="tokens as with all slots, %", ylim=(None, 101))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path)


@torch.no_grad()
def main():
    args = arguments(
        __doc__, "out", model="", data="", dtype="bfloat16", length=4000, cases=3, most=160, task="longbench",
        haystack="", recall=False, runs=[""], alone=[""], later=[""], write=[""], against="", picture="",
    )  # fmt: skip
    torch.set_num_threads(1)
    out = Path(args.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if not args.model:
        shown(done)
        if args.against:
            differences(done, args.against)
        return drawn(done, args.picture) if args.picture else None
    known = {(line["id"], line["run"]) for line in done}
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data, haystack = (Path(path) if path else None for path in (args.data, args.haystack))
    settings = TaskSettings(tokenizer, args.length, args.cases, haystack=haystack, data=data)
    cases = sorted(find(args.task)(settings), key=lambda case: int(case.id.rsplit("/", 1)[1]))
    with out.open("a") as file:
        for case in cases:
            item = Item(model, tokenizer, case, args.most)
            runs = [(run, how) for how in ("runs", "alone", "later") for run in getattr(args, how) if run]
            missing = [(run, how) for run, how in runs if (case.id, run) not in known]

            def note(run, line, case=case, item=item):
                work, tokens = case.tags.get("work", args.task), len(item.context + item.question)
                about = dict(id=case.id, run=run, work=work, tokens=tokens)
                print(json.dumps(about | line), file=file, flush=True)
                done.append(about | line)

            if args.recall and (case.id, RECALL) not in known:
                note(RECALL, item.recall())
            if missing:
                line = item.all_slots()
                if (case.id, "all slots") not in known:
                    note("all slots", line)
            for run, how in missing:
                policy, _, budget = run.rpartition("@")
                slots = float(budget) if "." in budget else int(budget)
                note(run, item.chosen(policy, slots, how, run in args.write))
    shown(done)


if __name__ == "__main__":
    main()
