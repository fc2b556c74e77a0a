"""The methods by their papers' names: each is a score and what else the paper chooses."""

import inspect

from .errors import ERRORS
from .heads import HEADS
from .layers import LAYERS
from .registry import Registry
from .scores import SCORES
from .selections import SELECTIONS

PRESETS = Registry("policy")


def preset(name: str, remark: str = "", **choices) -> None:
    """Register a combination: fields of `Policy`, and in one line what it is where its score does not say so."""
    PRESETS.add(name)(choices)
    if remark:
        _remarks[name] = remark


def describe(name: str) -> str:
    """In one line what a preset is and where it comes from."""
    choices = PRESETS.find(name)
    return _remarks.get(name) or inspect.getdoc(type(choices["score"])).splitlines()[0]


_remarks = {}
_Z = 4096  # chunk size of the methods that evict chunk by chunk
_KVPRESS = dict(window=64, kernel=5, pool="avg", reduce="mean")

preset("streaming", score=SCORES["streaming"](), chunk_size=_Z)
preset("h2o", score=SCORES["h2o"](), chunk_size=_Z)
preset("h2o/kvcf", score=SCORES["h2o"](recent=8), chunk_size=_Z)
preset("tova", score=SCORES["tova"](), chunk_size=_Z)
preset("snapkv", score=SCORES["snapkv"]())
preset("snapkv/kvcf", score=SCORES["snapkv"](window=8))
preset("snapkv/kvpress", score=SCORES["snapkv"](**_KVPRESS))
preset("fastkv", score=SCORES["fastkv"]())
preset("random", score=SCORES["random"]())
preset("knorm", score=SCORES["knorm"]())
preset("keydiff", score=SCORES["keydiff"]())
preset(
    "keydiff/kvpress", "KeyDiff as its paper and kvpress have it: the mean is of keys scaled to length 1.",
    score=SCORES["keydiff"](unit=True),
)  # fmt: skip
preset("take", score=SCORES["take"](), chunk_size=_Z, warmup_layers="half")
preset("take/no-probe", score=SCORES["take"](append=False), chunk_size=_Z, warmup_layers="half")
preset("take/no-delay", score=SCORES["take"](), chunk_size=_Z)
preset("take/chunk-only", score=SCORES["take"](append=False), chunk_size=_Z)
preset("oracle", score=SCORES["oracle"]())
preset("laq", score=SCORES["laq"]())
preset("speckv", score=SCORES["speckv"]())
_PAPER = dict(n_d=32, window=0, reduce="sum", draft_keys=True)
preset("laq/paper", "LAQ as LookaheadKV ran it (app. F): 32 drafted rows alone.", score=SCORES["laq"](**_PAPER))
preset(
    "speckv/paper", "SpecKV as LookaheadKV ran it (app. F): 32 drafted rows alone.", score=SCORES["speckv"](**_PAPER)
)
preset(
    "adakv", "AdaKV (Feng et al. 2024): SnapKV's scores; a layer's heads compete for its slots.",
    score=SCORES["snapkv"](), heads=HEADS["ada"](),
)  # fmt: skip
preset(
    "adakv/edie", "AdaKV as in EDIE's tables: mean pooling.",
    score=SCORES["snapkv"](pool="avg"), heads=HEADS["ada"](),
)  # fmt: skip
preset(
    "adakv/kvpress", "AdaKV as kvpress has it: every head keeps its own best fifth of the average, window included.",
    score=SCORES["snapkv"](**_KVPRESS), heads=HEADS["ada"](floor="all"),
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
    "chunkkv", "ChunkKV (Liu et al. 2025): SnapKV's scores, not pooled, over runs of 10 tokens; one choice per layer.",
    score=SCORES["snapkv"](pool="none"), select=SELECTIONS["chunk"](),
)  # fmt: skip
preset(
    "chunkkv+reuse", "ChunkKV with index reuse (algorithm 3): two layers share the choice of the first.",
    score=SCORES["snapkv"](pool="none"), select=SELECTIONS["chunk"](), n_reuse=2,
)  # fmt: skip
preset(
    "chunkkv/kvpress", "ChunkKV as kvpress has it: whole runs of 20 tokens by its own SnapKV's scores.",
    score=SCORES["snapkv"](**_KVPRESS), select=SELECTIONS["chunk"](c=20, exact=False),
)  # fmt: skip
preset("vatp", score=SCORES["vatp"]())
preset(
    "paasvn", "PAASVN (EDIE eq. 4): VATP over a window's attention, without sinks.",
    score=SCORES["vatp"](base="snapkv", sink=0),
)  # fmt: skip
preset("edie", score=SCORES["edie"](), heads=HEADS["flat"]())
preset("edie-exact", score=SCORES["edie-exact"](), heads=HEADS["flat"]())
preset(
    "edie+tada", "EDIE with TADA's layer budgets: slots go where earlier contexts of the task had large errors.",
    score=SCORES["edie"](), heads=HEADS["flat"](), layers=LAYERS["tada"](),
)  # fmt: skip
preset(
    "edie+tada/chunked", "EDIE+TADA read in chunks, ours: a prompt's own earlier chunks set the layer budgets.",
    score=SCORES["edie"](), heads=HEADS["flat"](), layers=LAYERS["tada"](), chunk_size=_Z,
)  # fmt: skip
preset(
    "chunkkv/edie", "ChunkKV's runs over EDIE's scores, ours: every head ranks its own, and heads compete.",
    score=SCORES["edie"](pool="none"), heads=HEADS["flat"](), select=SELECTIONS["chunk"](per_head=True),
)  # fmt: skip
preset(
    "take+caote", "TAKE's scores refined by CAOTE, ours.",
    score=SCORES["take"](), error=ERRORS["caote"](), chunk_size=_Z, warmup_layers="half",
)  # fmt: skip
for _error in ("caote", "fastcaote"):
    for _base, _score in (("h2o", {}), ("tova", dict(per_head=True)), ("snapkv", {})):
        preset(
            f"{_base}+{_error}", f"{'CAOTE' if _error == 'caote' else 'FastCAOTE'} (2025) over {_base}'s scores.",
            score=SCORES[_base](**_score), error=ERRORS[_error](), chunk_size=128, decode=True, interval=1,
        )  # fmt: skip
