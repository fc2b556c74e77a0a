"""Put policies to tasks: one JSON line per (case, run), in the file as soon as it is known.

A run is `full`, the unpatched model, which always comes first, or a policy at a budget, the prompt read whole or in
chunks, with the question known or not:

    aware      context and question are one prompt, read under the policy, which also evicts while decoding if it does
    agnostic   the context alone is read under the policy; then the question is appended to what was kept and the
               answer is decoded, and neither evicts nor is evicted: the budget is the context's. (An ordinary follow-up
               turn would be read like a prompt and evict again, this time knowing the question.)

The continuation of a perplexity case is scored in one call that evicts nothing either.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ..commands import parse_policy
from ..patch import evicting, patch, report
from ..policy import PRESETS, Policy, as_score, build
from .metrics import METRICS
from .tasks import TASKS, Settings

MODES = ("aware", "agnostic")
PERPLEXITY = "perplexity"  # the metric of cases whose score is the mean negative log likelihood of answers[0], in nats
WHOLE = 2**30  # a chunk size that no prompt reaches
KEEP_ALL = Policy(score="knorm", budget=2**30)
OBSERVERS = ("window", "probe", "recent")  # score options that count slots, so that a small budget needs small ones


@dataclass(frozen=True)
class Run:
    """What is done to a case. chunk_size None reads the prompt whole; mode is one of MODES, None for `full`."""

    policy: str  # NAME or NAME:OPTION=VALUE,...
    budget: int | float | None = None
    chunk_size: int | None = None
    mode: str | None = None


FULL = Run("full")


@dataclass(frozen=True)
class Plan:
    """Every task at every length and seed, put to every combination of policy, budget, chunk size and mode."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    policies: tuple[str, ...]
    budgets: tuple[int | float, ...]
    chunk_sizes: tuple[int | None, ...] = (None,)
    modes: tuple[str, ...] = MODES
    seeds: tuple[int, ...] = (0,)
    cases: int = 20  # per length and seed, and per depth where the task has depths
    depths: tuple[float, ...] = Settings.depths
    haystack: str | None = None
    data: str | None = None

    def runs(self) -> list:
        """`full` first. Raises ValueError for a policy that is unknown or that the budget does not fit."""
        names = [name for name in self.policies if name != FULL.policy]
        product = itertools.product(names, self.budgets, self.chunk_sizes, self.modes)
        runs = [FULL, *dict.fromkeys(itertools.starmap(Run, product))]
        for run in runs[1:]:
            policy_for(run, tokens=2**20, response=(0,))
        return runs

    def groups(self, tokenizer) -> list:
        """(task's function, its settings) of every seed, length and task."""
        haystack, data = (None if path is None else Path(path) for path in (self.haystack, self.data))
        return [
            (TASKS.find(task), Settings(tokenizer, length, self.cases, seed, self.depths, haystack, data))
            for seed in self.seeds for length in self.lengths for task in self.tasks
        ]  # fmt: skip


def evaluate(model, tokenizer, plan: Plan, out, name: str = "") -> None:
    """Append to the file `out` every line that it lacks, with a progress bar.

    Raises ValueError when `out` was begun with another plan or model (its `name` and weights), and for a prompt that
    is longer than the model's context.
    """
    runs, groups = plan.runs(), plan.groups(tokenizer)
    about = dict(model=name, weights=fingerprint(model), dtype=str(model.dtype), **dataclasses.asdict(plan))
    for task, settings in groups[: len(groups) // len(plan.seeds)]:  # what cannot work fails before hours of work
        for case in itertools.islice(task(settings), 1):
            encode(model, tokenizer, case)
    with Results(out, about) as results, tqdm(desc="evaluating", unit="run", disable=None) as bar:
        for done, (task, settings) in enumerate(groups):
            cases = list(task(settings))
            if len({case.id for case in cases}) < len(cases):
                raise ValueError(f"two cases of {cases[0].task} have the same id; give every case its own")
            bar.total = bar.n + len(cases) * len(runs) * (len(groups) - done)  # if the others are as many
            for case in cases:
                case.tags.setdefault("length", settings.length)
                _put(model, tokenizer, case, settings.seed, runs, results, bar)


def _put(model, tokenizer, case, seed, runs, results, bar) -> None:
    missing = [run for run in runs if key(case.task, case.id, seed, run) not in results.keys]
    bar.update(len(runs) - len(missing))
    prompt = encode(model, tokenizer, case) if missing else None
    for run in missing:
        measured = ask(model, tokenizer, case, prompt, run, results.responses.get((case.task, case.id, seed)))
        about = dict(task=case.task, id=case.id, seed=seed, **dataclasses.asdict(run), metric=case.metric)
        results.write(about | measured | dict(tags=case.tags))
        bar.update()


def key(task, id, seed, run: Run) -> tuple:
    """What no two lines share."""
    return task, id, seed, *dataclasses.astuple(run)


class Results:
    """The file of a plan's results: a line {"settings": ...}, then one line per key. Lines are added, never changed;
    what a killed process left of its last line is cut off."""

    def __init__(self, path, settings: dict):
        self.keys, self.responses = set(), {}
        settings = json.loads(json.dumps(settings))
        path = Path(path)
        begun = path.exists() and _whole_lines(path)
        if begun:
            before, lines = read(path)
            _same(path, before, settings)
            for line in lines:
                self._note(line)
        self.file = path.open("a", encoding="utf-8")
        if not begun:
            self._append({"settings": settings})

    def write(self, line: dict) -> None:
        self._append(line)
        self._note(line)

    def _append(self, line):
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def _note(self, line):
        run = Run(**{f.name: line[f.name] for f in dataclasses.fields(Run)})
        self.keys.add(key(line["task"], line["id"], line["seed"], run))
        if run == FULL:
            self.responses[line["task"], line["id"], line["seed"]] = line["response"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def read(path) -> tuple:
    """(settings, lines) of a results file; a half-written last line is left out."""
    text = Path(path).read_bytes()
    lines = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError:
            raise ValueError(f"line {number} of {path} is damaged; take it out to have it measured again") from None
    if not lines or not isinstance(lines[0], dict) or "settings" not in lines[0]:
        raise ValueError(f"{path} holds no results of `kvevict eval`; give another file")
    return lines[0]["settings"], lines[1:]


def _whole_lines(path) -> int:
    """Cut a half-written last line off; bytes left."""
    size = path.read_bytes().rfind(b"\n") + 1
    with path.open("r+b") as file:
        return file.truncate(size)


def _same(path, before: dict, now: dict) -> None:
    names = [name for name in before | now if before.get(name) != now.get(name)]
    if names:
        differs = "; ".join(f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in names)
        raise ValueError(f"{path} was begun with other settings: {differs}; repeat those or give another --out")


def fingerprint(model) -> str:
    """A hash of the first weights of every parameter: the same folder may hold a model trained anew."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().flatten()[:1024].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# -- one case -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """Token ids of a case. `answer`: the continuation of a perplexity case."""

    context: list
    question: list
    answer: list | None


def encode(model, tokenizer, case) -> Prompt:
    """The case's ids, in the tokenizer's chat template if it has one, unless the case's tag `chat` is False."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if tokenizer.chat_template and case.tags.get("chat") is not False:
        mark = "\u0001"  # stands for the context, so that the template does not trim it
        chat = [{"role": "user", "content": mark + case.question}]
        before, after = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).split(mark)
        head, question = ids(before), ids(after)
    else:
        head, question = tokenizer("")["input_ids"], ids(case.question)
    answer = ids(case.answers[0]) if case.metric == PERPLEXITY else None
    prompt = Prompt(head + ids(case.context), question, answer)
    tokens, new = len(prompt.context) + len(question), case.new_tokens if answer is None else len(answer)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and tokens + new > limit:
        raise ValueError(
            f"case {case.id} takes {tokens} tokens and {new} new ones, the model's context is {limit}; give smaller "
            "--lengths"
        )
    return prompt


def policy_for(run: Run, tokens: int, response) -> Policy:
    """The policy of a run that reads `tokens` tokens under it.

    Windows, probes and recent slots that the run does not name are at most half the budget. A score with an option
    `response` (the oracle) is given the ids that follow.
    """
    name, given = parse_policy(run.policy)
    if {"budget", "chunk_size"} & given.keys():
        raise ValueError(f"policy {run.policy!r}: give budget and chunk_size by --budgets and --chunk-size")
    score = as_score(PRESETS.find(name)["score"])
    slots = run.budget if isinstance(run.budget, int) else math.ceil(run.budget * tokens)
    defaults = {f.name: getattr(score, f.name) for f in dataclasses.fields(score)}
    sizes = {option: defaults[option] for option in OBSERVERS if isinstance(defaults.get(option), int)}
    options = {option: min(size, max(1, slots // 2)) for option, size in sizes.items()}
    if "response" in defaults:
        options["response"] = tuple(response)
    return build(name, budget=run.budget, chunk_size=run.chunk_size or WHOLE, **options | given)


@torch.no_grad()
def ask(model, tokenizer, case, prompt: Prompt, run: Run, response) -> dict:
    """One run of one case: what its line says beyond the key.

    response    ids that the full run generated, which an oracle may look at
    Seconds are those of reading (an appended question too) and of decoding. kept ([layer][kv head] slots, None for
    sliding-window layers) and cache_bytes are what is held after the read under the policy.
    """
    agnostic, scored = run.mode == "agnostic", prompt.answer is not None
    first, later = (prompt.context, prompt.question) if agnostic else (prompt.context + prompt.question, [])
    result = dict(prompt_tokens=len(prompt.context) + len(prompt.question))
    policy = None
    if run != FULL:
        policy = policy_for(run, len(first), later + (prompt.answer if scored else response))
        result["options"] = dataclasses.asdict(policy.score) | parse_policy(run.policy)[1]
        result["options"].pop("response", None)
    with nullcontext() if policy is None else evicting(model, policy):
        start = time.perf_counter()
        out = model(_row(model, first), use_cache=True, logits_to_keep=1)
        read_seconds = time.perf_counter() - start
        cache = out.past_key_values
        held = _held_by_all(cache) if policy is None else _held(model)
        if policy is not None and (agnostic or scored):
            patch(model, KEEP_ALL)
        start = time.perf_counter()
        if later:
            out = model(_row(model, later), past_key_values=cache, logits_to_keep=1)
        read_seconds += time.perf_counter() - start
        start = time.perf_counter()
        if scored:
            result |= dict(prediction="", score=_loss(model, out.logits[0, -1:], cache, prompt.answer))
        else:
            tokens = _greedy(model, tokenizer, out.logits, cache, case.new_tokens)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            result |= dict(prediction=text, score=METRICS[case.metric](text, case.answers))
    if policy is None:
        result["response"] = [] if scored else tokens
    return result | dict(read_seconds=read_seconds, decode_seconds=time.perf_counter() - start, **held)


def _row(model, ids):
    return torch.tensor([ids], device=model.device)


def _greedy(model, tokenizer, logits, cache, new_tokens) -> list:
    """Ids up to and with the first end-of-sequence token."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < new_tokens and tokens[-1] not in ends:
        logits = model(_row(model, tokens[-1:]), past_key_values=cache).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def _loss(model, first, cache, answer) -> float:
    """Mean negative log likelihood of `answer` in nats; `first` [1, vocabulary] are the logits of its first token."""
    rows = [first]
    if len(answer) > 1:
        rows.append(model(_row(model, answer[:-1]), past_key_values=cache).logits[0])
    return float(torch.nn.functional.cross_entropy(torch.cat(rows).float(), _row(model, answer)[0]))


def _held(model) -> dict:
    seen = report(model)
    kept = [None if layer is None else layer[0] for layer in seen["kept"]]
    return dict(kept=kept, cache_bytes=seen["cache_bytes"], peak_cache_bytes=seen["peak_cache_bytes"])


def _held_by_all(cache) -> dict:
    """What an unpatched model's cache holds; as in a report, its full-attention layers are counted."""
    own = [None if layer.is_sliding else layer for layer in cache.layers]
    live = sum(layer.keys.nbytes + layer.values.nbytes for layer in own if layer is not None)
    kept = [None if layer is None else [layer.keys.shape[2]] * layer.keys.shape[1] for layer in own]
    return dict(kept=kept, cache_bytes=live, peak_cache_bytes=live)
