"""Papers' claims about their methods, as comparisons of two runs that `kvevict eval --protocol NAME` repeats on any
model.

The two runs of a comparison differ in one thing. Both read the same cases, and are compared case by case.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...policy.registry import Registry
from .runs import FULL, RunSpec
from .tasks import FIDELITY

PROTOCOLS = Registry("protocol", listed=True)
TASKS = ("facts", "keyvalue", FIDELITY)  # the default of --tasks


@dataclass(frozen=True)
class Claim:
    """A claim that `better` answers better than `than` or, with a margin, that `better` is not worse by more than
    `margin` times the full cache's score.

    better, than   policies, `full`, NAME or NAME:OPTION=VALUE,... with words in braces: {B} and {B20} are the budget
                   and 20 times the budget; {L4}, {L2}, {L34} and {L} a quarter, half, three quarters and all of the
                   layers that evict; {adapter} or, after other options, {and_adapter} the option that names --adapter;
                   {draft} the folder of --draft (without --draft the claim is left out)
    chunks         tokens read at once by each of the two policies; None: the prompt is read in one pass
    least          smallest budget, in slots, at which the claim can be tested
    layers         fewest evicting layers of a model on which the claim can be tested
    """

    says: str  # the paper's claim, and its place in the paper
    better: str
    than: str
    margin: float | None = None
    chunks: tuple[int | None, int | None] = (None, None)
    least: int = 0
    layers: int = 1

    def runs(self, budget: int, mode: str, names: dict[str, object]) -> tuple[RunSpec, ...]:
        """Return the `RunSpec`s of `better` and `than`; `names` maps the words in braces to their values."""
        sides = zip((self.better, self.than), self.chunks)
        named = [(policy.format(**names), budget, chunk, mode) for policy, chunk in sides]
        return tuple(FULL if each[0] == FULL.policy else RunSpec(*each) for each in named)


@dataclass(frozen=True)
class Protocol:
    """A paper's claims; `cannot` says which claims cannot be tested here, and what differs from the paper."""

    paper: str
    claims: tuple[Claim, ...]
    cannot: tuple[str, ...] = ()


Claims = Callable[[], Iterable[Claim]]


def protocol(name: str, paper: str, *cannot: str) -> Callable[[Claims], Claims]:
    """Return a decorator that registers a `Protocol` under `name`, with the claims that the decorated function
    yields."""

    def register(claims: Claims) -> Claims:
        PROTOCOLS.add(name)(Protocol(paper, tuple(claims()), cannot))
        return claims

    return register


def each(says: str, policies: Iterable[str], than: str, **options: Any) -> list[Claim]:
    """Make a claim that each of the policies beats `than`; {better} and {than} in `says` become the two policies."""
    return [Claim(says.format(better=better, than=than), better, than, **options) for better in policies]


def words(budget: float, layers: int, adapter: str | None = None, draft: str | None = None) -> dict[str, object]:
    """Return {a word in braces of a policy's text: its value} at a budget, for a model in which `layers` layers
    evict."""
    option = f"adapter={adapter}" if adapter else ""
    return dict(
        B=budget, B20=20 * budget, L4=max(1, layers // 4), L2=max(1, layers // 2), L34=max(1, 3 * layers // 4),
        L=layers, adapter=option and f":{option}", and_adapter=option and f",{option}", draft=draft,
    )  # fmt: skip


def pairs(
    name: str, budgets: Iterable[int], mode: str, layers: int, adapter: str | None = None, draft: str | None = None
) -> list[tuple[Claim, list[tuple[RunSpec, RunSpec]]]]:
    """List (claim, [its two runs at each budget that can test it]) for a protocol's claims on a model in which `layers`
    layers evict. Claims that the model or the budgets cannot test are left out, and so are claims whose two sides are
    equal, as shares of few layers may be."""
    found = []
    for claim in PROTOCOLS.find(name).claims:
        if layers < claim.layers or ("{draft}" in claim.better + claim.than and not draft):
            continue
        sides = []
        for budget in budgets:
            better, than = claim.runs(budget, mode, words(budget, layers, adapter, draft))
            if budget >= claim.least and better != than:
                sides.append((better, than))
        if sides:
            found.append((claim, sides))
    return found


def runs(*args: Any) -> list[RunSpec]:
    """List every run of a protocol once, the full cache's run first; takes the arguments of `pairs`."""
    return list(dict.fromkeys([FULL, *(run for _, sides in pairs(*args) for both in sides for run in both)]))


# -- papers -----------------------------------------------------------------------------------------------------------


BLOCK = (128, 128)
REFINED = "caote", "fastcaote"
SNAPKV = "snapkv:decode=True,interval=1"
UNKEPT = {"h2o": "recent=0", "snapkv": "keep_window=false"}  # the option with which a base protects no slot


@protocol(
    "caote",
    "CAOTE (Goel et al. 2025), tables 2 to 5",
    "Its numbers: LongBench and Booksum with models of 3 to 8 billion parameters; for table 4 add --tasks perplexity.",
    "Table 6's overhead, and table 7's correlation.",
    "Fidelity scores a response that evicts nothing, so its numbers are the same whatever is evicted while decoding.",
)
def caote_claims() -> Iterator[Claim]:
    for name, base in (("h2o", "h2o"), ("tova", "tova:per_head=True"), ("snapkv", SNAPKV)):
        for refine in REFINED:
            yield Claim(f"tables 2 to 5: {refine} improves {name}", f"{name}+{refine}", base, chunks=BLOCK)
        yield Claim(f"table 4: evicting by {name} costs something", "full", base, chunks=BLOCK)
        yield Claim(f"tables 10 and 11: {name} with caote beats Sink", f"{name}+caote", "streaming", chunks=BLOCK)
        says = f"tables 2 to 5: fastcaote is about as good over {name}"
        yield Claim(says, f"{name}+fastcaote", f"{name}+caote", margin=0.05, chunks=BLOCK)
    for name, base in (("h2o", "h2o:decode=False"), ("tova", "tova:per_head=True,decode=False"), ("snapkv", "snapkv")):
        for refine in REFINED:
            says = f"the same, nothing evicted while decoding: {refine} improves {name}"
            yield Claim(says, f"{name}+{refine}:decode=False", base, chunks=BLOCK)
    for name, refine in itertools.product(UNKEPT, REFINED):
        says = f"section 3: {refine} is about as good if nothing is kept for being recent, over {name}"
        yield Claim(says, f"{name}+{refine}:{UNKEPT[name]}", f"{name}+{refine}", margin=0.05, chunks=BLOCK)
    says = "eq. 7: caote with the squared distance is about as good over snapkv"
    yield Claim(says, "snapkv+caote:squared=true", "snapkv+caote", margin=0.05, chunks=BLOCK)
    for refine, size in itertools.product(REFINED, (64, 256, 512)):
        says = f"section 4: {refine} improves snapkv in blocks of {size}, too"
        yield Claim(says, f"snapkv+{refine}", SNAPKV, chunks=(size, size))


ALONE = "chunkkv:per_head=True"  # each head chooses its own runs of slots, as in SnapKV
# runs of slots in lower layers; above them single slots, or these by SnapKV's pooled scores as in the paper
HYBRIDS = ('chunkkv:select_by_layer=[[{L2},null,"token"]]', 'chunkkv:select_by_layer=[[{L2},null,"pooled"]]')
PRINTED = "over_kept=true"  # the appendix's algorithm: runs have the window's slots, and no run is cut


@protocol(
    "chunkkv",
    "ChunkKV (Liu et al. 2025), its tables of LongBench, needles, chunk sizes and index reuse",
    "Its numbers: LongBench, GSM8K and needles with models of 7 and 8 billion parameters.",
    "Latencies of reuse: scoring is below 1 % of a read here, so sharing it saves less than can be measured.",
)
def chunkkv_claims() -> Iterator[Claim]:
    yield Claim("its tables of LongBench and needles: ChunkKV beats SnapKV", "chunkkv", "snapkv")
    yield Claim("its idea alone: runs of 10 instead of single slots, no pooling", ALONE, "snapkv:pool=none")
    yield Claim("runs of 10 instead of pooling over 7", ALONE, "snapkv")
    yield Claim("one choice for all heads is about as good as one each", "chunkkv", ALONE, 0.05)
    for c in (3, 5, 20, 30):
        yield Claim(f"its table of chunk sizes: 10 beats {c}", "chunkkv", f"chunkkv:c={c}")
    yield Claim("runs in every layer beat single slots in the upper half", "chunkkv", HYBRIDS[0])
    yield Claim("its hybrid: runs in every layer beat SnapKV in the upper half", "chunkkv", HYBRIDS[1])
    says = "its algorithms' runs, over the window and whole, are about as good"
    yield Claim(says, f"chunkkv:{PRINTED}", "chunkkv", 0.05)
    says = "ours: attention instead of its algorithms' products q k helps"
    yield Claim(says, f"chunkkv:{PRINTED}", f"chunkkv:score=products,{PRINTED}")
    reuse = [f"chunkkv:n_reuse={n}" for n in (2, 3, 4)]
    yield from each("its table of index reuse: {better} costs little", reuse, "chunkkv", margin=0.05)


ADAKV = "adakv:pool=avg"  # mean pooling, as in EDIE's appendix
WEIGHTS = ("none", "all", "i<=t-2w", "i>w")


@protocol(
    "edie",
    "EDIE and TADA, tables 1 to 4",
    "Its numbers: LongBench with models of 7 and 8 billion parameters.",
    "Table 5's batch sizes in 64 GB: `kvevict plan` prices them.",
)
def edie_claims() -> Iterator[Claim]:
    yield Claim("table 2: EDIE instead of attention times value norm, heads as in AdaKV", "edie:heads=ada", "paasvn")
    yield Claim("table 2: attention times value norm instead of attention", "paasvn", ADAKV)
    yield Claim("table 1: EDIE beats AdaKV", "edie", ADAKV)
    yield Claim("table 1: EDIE with TADA beats AdaKV", "edie+tada", ADAKV)
    yield Claim("table 1: EDIE with TADA beats SnapKV", "edie+tada", "snapkv")
    yield Claim("table 2: alpha 0.05 is about as good as 0.1", "edie:alpha=0.05", "edie", 0.05)
    yield Claim("table 2: alpha 0.2 is about as good as 0.1", "edie:alpha=0.2", "edie", 0.05)
    yield Claim("table 2: TADA instead of uniform layers", "edie+tada", "edie")
    yield Claim("table 2: TADA instead of PyramidKV's layers", "edie+tada", "edie:layers=pyramid")
    yield Claim("table 4: TADA with the cosine instead of without", "edie+tada", "edie+tada:cd=off")
    for weight in WEIGHTS:
        says = f"table 3: rows weighed by the middle instead of {weight}"
        yield Claim(says, "edie+tada", f"edie+tada:weight={weight}")
    yield Claim("table 2: rows weighed by the middle, uniform layers", "edie", "edie:weight=none")
    yield Claim("ours: the exact error is about as good as the bound", "edie", "edie-exact", 0.05)
    yield Claim("ours: drafted rows instead of the window's", "edie:rows=drafted", "edie")


LEARNED = "lookahead{adapter}"
# LookaheadKV's appendix F: 32 drafted tokens and a window of 32 score slots together, by the mean over a GQA group.
LAQ = "laq:n_d=32,window=32,draft_keys=true"


@protocol(
    "lookaheadkv",
    "LookaheadKV, tables 9 to 14 (its figure 4), 7, and 4 (with --temperature)",
    "Its numbers: LongBench and RULER with models of 1 to 8 billion parameters.",
    "SpecKV where no --draft is given: a smaller model of the same tokenizer.",
    "Table 5 (embeddings only, q and v, fewer rows) needs adapters of `kvevict train --targets` and `--tokens`.",
    "Table 8 (other responses) needs adapters of `kvevict train --responses model --temperature T`.",
)
def lookaheadkv_claims() -> Iterator[Claim]:
    for base in ("streaming", "snapkv", "pyramidkv"):
        yield from each("tables 9 to 14: beats {than}", [LEARNED], base)
    yield Claim("tables 9 to 14: beats SpecKV", LEARNED, LAQ + ",draft_model={draft}", least=64)
    yield Claim("its section 2: a smaller model's draft beats snapkv", "speckv:draft_model={draft}", "snapkv")
    yield from each("tables 9 to 14: beats {than}", [LEARNED], LAQ, least=64)
    says = "table 7: learned rows alone instead of these and the prompt's last 32 rows"
    yield Claim(says, LEARNED, "lookahead:window=32{and_adapter}", least=64)
    yield from each("ours: about as good as {than}, which drafts", [LEARNED], "laq", margin=0.05)
    yield from each("ours: about as good as the response's own rows", [LEARNED], "oracle", margin=0.05)
    yield from each("ours: EDIE over learned rows instead of attention", ["edie:rows=lookahead{and_adapter}"], LEARNED)


Z = (256, 256)
NO_PROBE = "take:append=false"  # table 2's ablation: the queries of a chunk's last 32 tokens score
NO_DELAY = "take:warmup_layers=none"  # no layer delays its eviction
NEITHER = NO_PROBE + ",warmup_layers=none"
RELAXED = "take:warmup_budget={B20},warmup_layers="  # B_warmup is 20 times the budget, as in the paper
LARGEST = "edie:rows=probe,heads=equal,kernel=31"
MEAN = LARGEST + ",pool=avg"


@protocol(
    "take",
    "TAKE, tables 1 and 2, figure 7",
    "Its numbers: LongBench and needles at 128k tokens with models of 7 and 8 billion parameters.",
    "Delay with fewer than four layers that evict: none would wait.",
    "Time and memory of figure 6: `kvevict bench` and `kvevict plan` have ours.",
)
def take_claims() -> Iterator[Claim]:
    yield Claim("table 2: the probe helps", "take", NO_PROBE, chunks=Z)
    yield Claim("table 2: the probe helps without delay", NO_DELAY, NEITHER, chunks=Z)
    yield Claim("table 2: delay helps", RELAXED + "{L2}", NO_DELAY, chunks=Z, layers=4)
    says = "table 2: delay without probe neither helps nor harms"
    yield Claim(says, NO_PROBE + ",warmup_budget={B20}", NEITHER, 0.05, Z, layers=4)
    for fewer, more, said in (("{L4}", "{L2}", "L/4 beats L/2"), ("{L2}", "{L34}", "L/2 beats 3L/4"),
                              ("{L34}", "{L}", "3L/4 beats L")):  # fmt: skip
        yield Claim(f"figure 7: W = {said}", RELAXED + fewer, RELAXED + more, chunks=Z)
    yield Claim("figure 7: B_warmup of 20 B beats B", RELAXED + "{L2}", "take:warmup_budget={B}", chunks=Z, layers=4)
    yield Claim("eq. 9: the accumulated probe helps", "take", "take:ema_alpha=0.0", chunks=Z)
    says = "eq. 9: queries rotated before they are averaged instead of as printed"
    yield Claim(f"ours: {says}", "take", "take:ema=before", chunks=Z)
    says = "eq. 11 and 12: each query head's best slots instead of the mean over a group"
    yield Claim(says, "take:per_query=true", "take", chunks=Z)
    yield from each("section 4: 0.32 instead of 0.2 helps retrieval", ["take:ema_alpha=0.32"], "take", chunks=Z)
    for tokens in (16, 48, 64, 128):
        says = f"ours: a probe of {tokens} tokens is about as good as one of 32"
        yield Claim(says, f"take:probe={tokens}", "take", 0.05, Z, least=tokens + 16)
    yield Claim(
        "table 1: no worse than SnapKV, which reads the prompt in one pass", "take", "snapkv", 0.05, (256, None)
    )
    yield Claim("ours: runs of 10 tokens help", "take+chunkkv", "take", chunks=Z)
    yield Claim("ours: EDIE's error instead of attention", "edie:rows=probe,heads=equal", NO_DELAY, chunks=Z)
    yield Claim("ours: pooling over 31 slots instead of 7", LARGEST, "edie:rows=probe,heads=equal", chunks=Z)
    yield Claim("ours: their mean instead of the largest", MEAN, LARGEST, chunks=Z)
    yield Claim("ours: the first four tokens are kept", "take+edie", MEAN, chunks=Z)
