"""Where a question's copy observes inside vLLM: at each period's end, or once before the text.

    python tests/benchmarks/bench_vllm_copies.py OUT.jsonl MODEL --haystack BOOKS --facts FACTS.jsonl
    python tests/benchmarks/bench_vllm_copies.py OUT.jsonl --table

FACTS.jsonl: the output of bench_vllm_facts.py; asked are the questions that its side "plain" answers right. Both read
the prompts by `kvevict.vllm.state` in the Transformers model, with the same policy. "ends": each whole period ends with
a copy, which is dropped. "before": one copy begins the prompt, and its queries, rotated to the place of a copy at each
period's end, observe every cut. "none": the period's last rows observe.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvevict.asking.prompts import ids_of
from kvevict.lab.analysis.run import encode
from kvevict.lab.evaluate.intervals import of_scores
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import TASKS, TaskSettings
from kvevict.policy.seen.rows import Observation, Observers
from kvevict.vllm.questions import with_copies
from kvevict.vllm.state import States

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
import policy_cases
import states_host

NEW = 40  # most tokens of an answer
SIDES = ["ends", "before", "none"]


class OneCopy(States):
    """States in which the queries of a request's first `size` rows observe every cut."""

    size, turn = 0, None

    def _read(self, q, k, v, block, tokens, first):
        if not tokens:
            self.asking = q[: self.size]
        return super()._read(q, k, v, block, tokens, first)

    def cut(self, block, tokens, copies):
        self.read_so_far = tokens
        super().cut(block, tokens, copies)

    def _observation(self, stored, block, copied):
        q = OneCopy.turn(self.asking, self.read_so_far).transpose(0, 1)[None]
        return Observation((Observers(q, self.none, self.none, False),))


def turning(model):
    """A function that rotates queries [R, H, D] by so many positions."""
    frequencies = model.model.rotary_emb.inv_freq

    def turn(q, positions):
        angle = (frequencies * positions).repeat(2)
        half = torch.cat([-q[..., q.shape[-1] // 2 :], q[..., : q.shape[-1] // 2]], -1)
        return (q * angle.cos() + half * angle.sin()).to(q.dtype)

    return turn


def answer(side, model, tokenizer, ids, question, budget, period):
    """The first line of an answer to a prompt of ids."""
    policy_cases.CHUNK = states_host.CHUNK = period
    states_host.States = OneCopy if side == "before" else States
    host = states_host.Host(model, "take+edie", budget, model.dtype, blocks=1)
    if side == "before":
        ids, OneCopy.size, OneCopy.turn = question + ids, len(question), turning(host.made)
    elif side == "ends":
        ids, host.copies = with_copies(ids, question, period)
    logits = host.read(torch.tensor(ids), range(period, len(ids), period))[-1]
    said = []
    while len(said) < NEW and "\n" not in tokenizer.decode(said):
        said.append(int(logits.argmax()))
        if said[-1] == tokenizer.eos_token_id:
            break
        logits = host.step(torch.tensor(said[-1:]), [0], [len(ids) + len(said) - 1])[-1]
    return tokenizer.decode(said, skip_special_tokens=True).partition("\n")[0]


def measure(a, lines):
    known = {(line["side"], line["id"]) for line in lines}
    facts = map(json.loads, a.facts.read_text("utf-8").splitlines())
    right = {line["id"] for line in facts if line["side"] == "plain" and line["right"]}
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=a.dtype).eval()
    settings = TaskSettings(tokenizer, a.tokens, a.texts, haystack=a.haystack)
    for case in TASKS.find("asked/opened")(settings):
        prompt = encode(tokenizer, case.context, case.question, opening=case.opening)
        for side in a.sides if case.id in right else ():
            if (side, case.id) in known:
                continue
            question = ids_of(tokenizer, case.said)[-32:]
            said = answer(side, model, tokenizer, prompt.context + prompt.question, question, a.budget, a.chunk)
            line = dict(side=side, id=case.id, said=said, right=METRICS.find(case.metric)(said, case.answers))
            with open(a.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("model", nargs="?")
    p.add_argument("--table", action="store_true")
    p.add_argument("--haystack", type=Path, help="a text, as for kvevict eval")
    p.add_argument("--facts", type=Path, help="the output of bench_vllm_facts.py")
    p.add_argument("--tokens", type=int, default=6000)
    p.add_argument("--texts", type=int, default=8, help="with eight questions each")
    p.add_argument("--budget", type=int, default=500)
    p.add_argument("--chunk", type=int, default=512, help="the period")
    p.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    p.add_argument("--dtype", default="bfloat16")
    a = p.parse_args()
    lines = [json.loads(line) for line in a.out.read_text("utf-8").splitlines()] if a.out.exists() else []
    if not a.table:
        return measure(a, lines)
    for side in SIDES:
        right = [line["right"] for line in lines if line["side"] == side]
        if not right:
            continue
        mean, low, high = (100 * x for x in of_scores(right))
        print(f"{side:8} {sum(right):3.0f} of {len(right)}, {mean:3.0f} % [{low:.0f}, {high:.0f}]")


if __name__ == "__main__":
    main()
