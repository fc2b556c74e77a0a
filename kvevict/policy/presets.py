"""The methods by their papers' names: each is a score and the paper's other choices."""

import inspect
from typing import Any

from .heads import HEADS
from .layers import LAYERS
from .peers import PRESETS as GONE
from .refinements import REFINEMENTS
from .registry import Registry
from .rows import ROWS
from .scores import SCORES
from .selections import SELECTIONS

PRESETS: Registry = Registry("policy", gone=GONE)


_remarks: dict[str, str] = {}


def preset(name: str, remark: str = "", **choices: Any) -> None:
    """Register fields of `Policy` under a name. remark: one line about the preset; by default its score's first."""
    PRESETS.add(name)(choices)
    _remarks[name] = remark or inspect.getdoc(type(choices["score"])).splitlines()[0]


def describe(name: str) -> str:
    """Return a preset's meaning and source, in one line."""
    PRESETS.find(name)  # raises ValueError for an unknown name
    return _remarks[name]


_Z = 4096  # chunk size of the methods that evict chunk by chunk
_KVZIP = dict(score=SCORES["kvzip"](), heads=HEADS["flat"](), layers=LAYERS["pool"]())

preset("streaming", score=SCORES["streaming"](), chunk_size=_Z)
preset("h2o", score=SCORES["h2o"](), chunk_size=_Z)
preset("tova", score=SCORES["tova"](), chunk_size=_Z)
preset("snapkv", score=SCORES["snapkv"]())
preset("fastkv", score=SCORES["fastkv"](), tsp="half")
preset("random", score=SCORES["random"]())
preset(
    "random/redraw", "Random Attention (2609.03430): while decoding a new draw every 64 tokens, the prompt is kept.",
    score=SCORES["random"](redraw=True), decode=True, interval=64, keep_prompt=True,
)  # fmt: skip
preset("knorm", score=SCORES["knorm"]())
preset("keydiff", score=SCORES["keydiff"]())
preset("tri", score=SCORES["tri"](), decode=True, interval=128, keep_prompt=True)
preset("rkv", score=SCORES["rkv"](), decode=True, interval=128)
preset("take", score=SCORES["take"](), chunk_size=_Z, warmup_layers="half")
preset("oracle", score=SCORES["oracle"]())
preset("lookahead", score=SCORES["lookahead"]())
preset("laq", score=SCORES["laq"]())
# 8 drafted tokens, and one more row
preset("speckv", score=SCORES["speckv"](), rows=ROWS["drafted"](n_d=9, window=32, draft_model=None))
preset(
    "adakv", "AdaKV (Feng et al. 2024): SnapKV's scores; a layer's heads compete for its slots.",
    score=SCORES["snapkv"](), heads=HEADS["ada"](),
)  # fmt: skip
preset(
    "pyramidkv", "PyramidKV (Cai et al. 2024): SnapKV's scores; slots decrease from the first layer to the last.",
    score=SCORES["snapkv"](), layers=LAYERS["pyramid"](),
)  # fmt: skip
preset(
    "cake", "CAKE (Qin et al. 2025): layers share by entropy and variance of the window's attention, in a cascade.",
    score=SCORES["cake"](), layers=LAYERS["cake"](),
)  # fmt: skip
preset(
    "chunkkv", "ChunkKV (Liu et al. 2025): SnapKV's scores over runs of 10 tokens, the last cut; one choice per layer.",
    score=SCORES["snapkv"](pool="none"), select=SELECTIONS["chunk"](),
)  # fmt: skip
preset(
    "kvzip", "KVzip (Kim et al. 2025) in bounded memory, ours: each chunk is read twice; questions may come later.",
    **_KVZIP, chunk_size=512,
)  # fmt: skip
preset(
    "read-twice", "The best measured for questions that come later: `kvzip` in chunks of 1,024, each read twice, ours.",
    **_KVZIP, chunk_size=1024,
)  # fmt: skip
preset(
    "read-once", "The best measured that reads each chunk once, without gates: `compactor`, and heads compete, ours.",
    score=SCORES["compactor"](), heads=HEADS["flat"](), chunk_size=512,
)  # fmt: skip
preset(
    "kvzip+", "KVzip+ (Jegou and Jeblick 2026) in bounded memory, ours: KVzip, weighted by what a slot adds.",
    score=SCORES["kvzip+"](), heads=HEADS["flat"](), layers=LAYERS["pool"](), chunk_size=512,
)  # fmt: skip
preset(
    "gate", "KVzap's gates (Jegou and Jeblick 2026), one ranking of all layers, ours: KVzip's numbers, read once.",
    score=SCORES["gate"](), heads=HEADS["flat"](), layers=LAYERS["pool"](), chunk_size=512,
)  # fmt: skip
preset("expected", score=SCORES["expected"](), heads=HEADS["ada"]())
preset("defensive", score=SCORES["defensive"](), heads=HEADS["ada"]())
preset("compactor", score=SCORES["compactor"]())
preset("lagkv", score=SCORES["lagkv"]())
preset("vatp", score=SCORES["vatp"]())
preset(
    "paasvn", "PAASVN (EDIE eq. 4): SnapKV's sums times the value's 1-norm, pooled; heads compete as in AdaKV.",
    score=SCORES["paasvn"](), heads=HEADS["ada"](),
)  # fmt: skip
preset("edie", score=SCORES["edie"](), heads=HEADS["flat"]())
preset("edie-exact", score=SCORES["edie-exact"](), heads=HEADS["flat"]())
preset(
    "edie+tada", "EDIE (eq. 9-11) with TADA's layer budgets (eq. 12-18), by the errors of the task's earlier contexts.",
    score=SCORES["edie"](), heads=HEADS["flat"](), layers=LAYERS["tada"](),
)  # fmt: skip
preset(
    "take+chunkkv", "TAKE's probe and delay with ChunkKV's runs of 10 tokens, one choice per layer, ours.",
    score=SCORES["take"](), select=SELECTIONS["chunk"](), chunk_size=_Z, warmup_layers="half",
)  # fmt: skip
_ASKED = dict(score=SCORES["edie"](kernel="digits", pool="avg"), rows=ROWS["probe"](), keep_first=4)
preset(
    "take+edie", "TAKE's probe asks, EDIE's error (eq. 9-11) answers, the mean of 31 digits; first tokens stay, ours.",
    **_ASKED, chunk_size=_Z,
)  # fmt: skip
preset(
    "take+edie/half", "`take+edie`; layers above the half read the best quarter of each 512 tokens (as FastKV), ours.",
    **_ASKED, chunk_size=512, tsp="half", tsp_len=0.25,
)  # fmt: skip
preset(
    "take+caote", "TAKE's scores (eq. 7-13) refined by CAOTE (eq. 6), ours.",
    score=SCORES["take"](), refine=REFINEMENTS["caote"](), chunk_size=_Z, warmup_layers="half",
)  # fmt: skip
for _refine, _caote in (("caote", "CAOTE (Goel et al. 2025, eq. 6)"), ("fastcaote", "FastCAOTE (eq. 8)")):
    for _base, _score in (("h2o", {}), ("tova", dict(per_head=True)), ("snapkv", {})):
        preset(
            f"{_base}+{_refine}", f"{_caote} over {_base}'s scores, in chunks of 128 and at every decoded token.",
            score=SCORES[_base](**_score), refine=REFINEMENTS[_refine](), chunk_size=128, decode=True, interval=1,
        )  # fmt: skip
