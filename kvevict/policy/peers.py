"""Option names of other libraries (kvpress, KVCache-Factory, AdaKV) and removed names of this one, with what to write
instead. docs/migrating.md lists them, too."""

from collections.abc import Iterable

BUDGET = "budget=, the slots kept per kv head (int)"
SINKS = "sink= of streaming, keep_first= of every policy"
NAMES = {
    "compression_ratio": "budget=, the fraction that is kept: 1 - compression_ratio",
    **dict.fromkeys(
        ("max_capacity_prompt", "max_capacity_prompts", "max_capacity", "base_capacity", "cache_size"), BUDGET
    ),
    "target_size": f"{BUDGET}, with decode=True",
    "compression_interval": "interval=, with decode=True",
    **dict.fromkeys(("window_size", "observation_window"), "window="),
    "recent_size": "recent=",
    "kernel_size": "kernel=",
    "pooling": "pool=",
    **dict.fromkeys(("n_sink", "num_sinks", "start_size"), SINKS),
    **dict.fromkeys(("chunk_length", "block_size"), "chunk_size=, the tokens that are read at once"),
    **dict.fromkeys(("alpha_safeguard", "floor_alpha"), "f="),
}
KVPRESS = "window=64,kernel=5,pool=avg,reduce=mean"
DRAFTS = "n_d=32,window=32,draft_keys=true"
PRESETS = {  # name of a removed preset -> text of an equal policy
    "h2o/kvcf": "h2o:recent=8",
    "snapkv/kvcf": "snapkv:window=8",
    "snapkv/kvpress": f"snapkv:{KVPRESS}",
    "adakv/kvpress": f"adakv:{KVPRESS},floor=all",
    "chunkkv/kvpress": f"chunkkv:{KVPRESS},c=20,exact=false",
    "keydiff/kvpress": "keydiff:unit=true",
    "take/no-probe": "take:append=false",
    "take/no-delay": "take:warmup_layers=none",
    "take/chunk-only": "take:append=false,warmup_layers=none",
    "laq/paper": f"laq:{DRAFTS}",
    "speckv/paper": f"laq:{DRAFTS},draft_model=FOLDER",
    "adakv/edie": "adakv:pool=avg",
    "chunkkv+reuse": "chunkkv:n_reuse=2",
    "chunkkv/edie": "edie:pool=none,select=chunk,per_head=true",
    "snapkv+critical": "snapkv:refine=critical",
    "adakv+critical": "adakv:refine=critical",
    "defensive/pool": "defensive:heads=flat,layers=pool",
    "edie+tada/chunked": "edie+tada:own=true,chunk_size=4096",
}
OPTIONS = {  # removed option -> what to know or write; some parts may still have the option
    "beta": "it is 20, as in the source: the last layer gets a twentieth of the average",
    "blend": "it is 0.35",
    "ema_space": "the accumulated probe is always rotated; ema_alpha=0.0 takes each chunk's probe alone",
    "eps": "it is 0.01",
    "group": "each method has its own: speckv the largest, fastkv the sum, the others the mean",
    "instruction": "nothing stands between a chunk and its repetition",
    "lag": "a part has 128 tokens",
    "most": "all of a chunk is repeated",
    "reduce": "each method has its own; score='snapkv' has the option, with any rows",
    "sink": "write keep_first=, which every policy has",
    "span": "it is 512 positions",
    "support": "the softmax is over the chunk, its repetition and the first slots",
}


FIXED = {"beta": 20, "blend": 0.35, "eps": 0.01, "instruction": []}  # constants that saved policies have as options


def check(names: Iterable[str]) -> None:
    """Raise ValueError for an option name of another library. The error has the name of the option in kvevict."""
    for name in names:
        if name in NAMES:
            raise ValueError(
                f"unknown option {name!r}: here it is {NAMES[name]}; docs/migrating.md has other libraries' names"
            )
