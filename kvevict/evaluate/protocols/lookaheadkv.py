from . import PROTOCOLS, Protocol, each

LEARNED = "lookahead{adapter}"


def claims():
    for base in ("streaming", "snapkv", "pyramidkv"):
        yield from each("table 1: beats {than}", [LEARNED], base)
    yield from each("table 1: beats {than}", [LEARNED], "laq/paper")
    yield from each("ours: about as good as {than}, which drafts", [LEARNED], "laq", margin=0.05)
    yield from each("ours: about as good as the response's own rows", [LEARNED], "oracle", margin=0.05)
    yield from each("ours: EDIE over learned rows instead of attention", ["edie:rows=lookahead"], LEARNED)


PROTOCOLS.add("lookaheadkv")(Protocol(
    "LookaheadKV, tables 1, 4 (with --temperature), 5 and 8",
    tuple(claims()),
    ("Its numbers: LongBench and RULER with models of 1 to 8 billion parameters.",
     "SpecKV: it needs a smaller draft model of the same tokenizer.",
     "Table 5 (embeddings only, q and v, fewer rows) needs adapters that were trained so; docs/results.md has some."),
))  # fmt: skip
