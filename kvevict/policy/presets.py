"""Presets: policies by the names of their methods, each a score and the other choices of the method's paper."""

import inspect
from typing import Any

from .checks import CHUNK
from .heads import HEADS
from .layers import LAYERS
from .peers import PRESETS as GONE
from .refinements import REFINEMENTS
from .registry import Registry
from .rows import ROWS
from .scores import SCORES
from .selections import SELECTIONS

PRESETS: Registry = Registry("policy", gone=GONE)
REMARKS = {  # name -> what the preset does, where the first line of its score's docstring does not say so
    "random/redraw": "Random Attention (2609.03430): while decoding a new draw every 64 tokens, the prompt is kept.",
    "adakv": "AdaKV (Feng et al. 2024): SnapKV's scores; a layer's heads compete for its slots.",
    "pyramidkv": "PyramidKV (Cai et al. 2024): SnapKV's scores; slots decrease from the first layer to the last.",
    "cake": "CAKE (Qin et al. 2025): layers share by entropy and variance of the window's attention, in a cascade.",
    "chunkkv": "ChunkKV (Liu et al. 2025): SnapKV's scores over runs of 10 tokens, the last cut; one choice per layer.",
    "kvzip": "KVzip (Kim et al. 2025) in bounded memory, ours: each chunk is read twice; questions may come later.",
    "read-twice": "The best measured for questions that come later: `kvzip` in chunks of 1,024, each read twice, ours.",
    "read-once": "The best measured that reads each chunk once, without gates: `compactor`, and heads compete, ours.",
    "kvzip+": "KVzip+ (Jegou and Jeblick 2026) in bounded memory, ours: KVzip, weighted by what a slot adds.",
    "gate": "KVzap's gates (Jegou and Jeblick 2026), one ranking of all layers, ours: KVzip's numbers, read once.",
    "paasvn": "PAASVN (EDIE eq. 4): SnapKV's sums times the value's 1-norm, pooled; heads compete as in AdaKV.",
    "edie+tada": "EDIE (eq. 9-11) with TADA's layer budgets (eq. 12-18), by the errors of the task's earlier contexts.",
    "take+chunkkv": "TAKE's probe and delay with ChunkKV's runs of 10 tokens, one choice per layer, ours.",
    "take+edie": "TAKE's probe asks, EDIE's error (eq. 9-11) answers, the mean of 31 digits; first tokens stay, ours.",
    "take+edie/half": "`take+edie`; layers above the half read the best quarter of each 512 tokens (as FastKV), ours.",
    "take+caote": "TAKE's scores (eq. 7-13) refined by CAOTE (eq. 6), ours.",
}


def preset(name: str, **choices: Any) -> None:
    """Register a preset: the name of a policy, and the fields of `Policy` that it sets."""
    PRESETS.add(name)(choices)


def describe(name: str) -> str:
    """Return one line with what a preset does and its source."""
    choices = PRESETS.find(name)
    return REMARKS.get(name) or inspect.getdoc(type(choices["score"])).splitlines()[0]


_POOL = dict(heads=HEADS["flat"](), layers=LAYERS["pool"]())
_TAKE = dict(score=SCORES["take"](), chunk_size=CHUNK, warmup_layers="half")
_ASKED = dict(score=SCORES["edie"](kernel="digits", pool="avg"), rows=ROWS["probe"](), keep_first=4)

preset("streaming", score=SCORES["streaming"](), chunk_size=CHUNK)
preset("h2o", score=SCORES["h2o"](), chunk_size=CHUNK)
preset("tova", score=SCORES["tova"](), chunk_size=CHUNK)
preset("snapkv", score=SCORES["snapkv"]())
preset("fastkv", score=SCORES["fastkv"](), tsp="half")
preset("random", score=SCORES["random"]())
preset("random/redraw", score=SCORES["random"](redraw=True), decode=True, interval=64, keep_prompt=True)
preset("knorm", score=SCORES["knorm"]())
preset("keydiff", score=SCORES["keydiff"]())
preset("tri", score=SCORES["tri"](), decode=True, interval=128, keep_prompt=True)
preset("rkv", score=SCORES["rkv"](), decode=True, interval=128)
preset("take", **_TAKE)
preset("oracle", score=SCORES["oracle"]())
preset("lookahead", score=SCORES["lookahead"]())
preset("laq", score=SCORES["laq"]())
# the official SpecKV observes with 8 drafted tokens and one more
preset("speckv", score=SCORES["speckv"](), rows=ROWS["drafted"](n_d=9, window=32, draft_model=None))
preset("adakv", score=SCORES["snapkv"](), heads=HEADS["ada"]())
preset("pyramidkv", score=SCORES["snapkv"](), layers=LAYERS["pyramid"]())
preset("cake", score=SCORES["cake"](), layers=LAYERS["cake"]())
preset("chunkkv", score=SCORES["snapkv"](pool="none"), select=SELECTIONS["chunk"]())
preset("kvzip", score=SCORES["kvzip"](), **_POOL, chunk_size=512)
preset("read-twice", score=SCORES["kvzip"](), **_POOL, chunk_size=1024)
preset("read-once", score=SCORES["compactor"](), heads=HEADS["flat"](), chunk_size=512)
preset("kvzip+", score=SCORES["kvzip+"](), **_POOL, chunk_size=512)
preset("gate", score=SCORES["gate"](), **_POOL, chunk_size=512)
preset("expected", score=SCORES["expected"](), heads=HEADS["ada"]())
preset("defensive", score=SCORES["defensive"](), heads=HEADS["ada"]())
preset("compactor", score=SCORES["compactor"]())
preset("lagkv", score=SCORES["lagkv"]())
preset("vatp", score=SCORES["vatp"]())
preset("paasvn", score=SCORES["paasvn"](), heads=HEADS["ada"]())
preset("edie", score=SCORES["edie"](), heads=HEADS["flat"]())
preset("edie-exact", score=SCORES["edie-exact"](), heads=HEADS["flat"]())
preset("edie+tada", score=SCORES["edie"](), heads=HEADS["flat"](), layers=LAYERS["tada"]())
preset("take+chunkkv", **_TAKE, select=SELECTIONS["chunk"]())
preset("take+edie", **_ASKED, chunk_size=CHUNK)
preset("take+edie/half", **_ASKED, chunk_size=512, tsp="half", tsp_len=0.25)
preset("take+caote", **_TAKE, refine=REFINEMENTS["caote"]())
for _refine, _caote in (("caote", "CAOTE (Goel et al. 2025, eq. 6)"), ("fastcaote", "FastCAOTE (eq. 8)")):
    for _base, _score in (("h2o", {}), ("tova", dict(per_head=True)), ("snapkv", {})):
        _name, _parts = f"{_base}+{_refine}", dict(score=SCORES[_base](**_score), refine=REFINEMENTS[_refine]())
        REMARKS[_name] = f"{_caote} over {_base}'s scores, in chunks of 128 and at every decoded token."
        preset(_name, **_parts, chunk_size=128, decode=True, interval=1)
