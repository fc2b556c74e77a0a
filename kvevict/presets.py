"""The methods by their papers' names: each is a score and what else the paper chooses."""

import inspect

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
preset("random", score=SCORES["random"]())
preset("knorm", score=SCORES["knorm"]())
preset("keydiff", score=SCORES["keydiff"]())
preset("take", score=SCORES["take"](), chunk_size=_Z, warmup_layers="half")
preset("take/no-probe", score=SCORES["take"](append=False), chunk_size=_Z, warmup_layers="half")
preset("take/no-delay", score=SCORES["take"](), chunk_size=_Z)
preset("take/chunk-only", score=SCORES["take"](append=False), chunk_size=_Z)
preset("oracle", score=SCORES["oracle"]())
preset(
    "adakv", "AdaKV (Feng et al. 2024): SnapKV's scores; a layer's heads compete for its slots.",
    score=SCORES["snapkv"](), heads=HEADS["ada"](),
)  # fmt: skip
preset(
    "adakv/edie", "AdaKV as in EDIE's tables: mean pooling.",
    score=SCORES["snapkv"](pool="avg"), heads=HEADS["ada"](),
)  # fmt: skip
preset(
    "adakv/kvpress", "AdaKV as kvpress has it: every head keeps its own best fifth of the average.",
    score=SCORES["snapkv"](**_KVPRESS), heads=HEADS["ada"](floor="max"),
)  # fmt: skip
preset(
    "pyramidkv", "PyramidKV (Cai et al. 2024): SnapKV's scores; slots decrease from the first layer to the last.",
    score=SCORES["snapkv"](), layers=LAYERS["pyramid"](),
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
