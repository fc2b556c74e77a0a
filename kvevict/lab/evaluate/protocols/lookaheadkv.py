from collections.abc import Iterator

from . import PROTOCOLS, Claim, Protocol, each

LEARNED = "lookahead{adapter}"
# Appendix F: 32 drafted rows and a window of 32 observe together, and the mean over a group counts.
LAQ = "laq:n_d=32,window=32,draft_keys=true"


def claims() -> Iterator[Claim]:
    for base in ("streaming", "snapkv", "pyramidkv"):
        yield from each("table 1: beats {than}", [LEARNED], base)
    yield Claim("table 1: beats SpecKV", LEARNED, LAQ + ",draft_model={draft}", least=64)
    yield Claim("its section 2: a smaller model's draft beats snapkv", "speckv:draft_model={draft}", "snapkv")
    yield from each("table 1: beats {than}", [LEARNED], LAQ, least=64)
    yield from each("ours: about as good as {than}, which drafts", [LEARNED], "laq", margin=0.05)
    yield from each("ours: about as good as the response's own rows", [LEARNED], "oracle", margin=0.05)
    yield from each("ours: EDIE over learned rows instead of attention", ["edie:rows=lookahead{and_adapter}"], LEARNED)


PROTOCOLS.add("lookaheadkv")(Protocol(
    "LookaheadKV, tables 1 and 4 (with --temperature)",
    tuple(claims()),
    ("Its numbers: LongBench and RULER with models of 1 to 8 billion parameters.",
     "SpecKV where no --draft is given: a smaller model of the same tokenizer.",
     "Table 5 (embeddings only, q and v, fewer rows) needs adapters of `kvevict train --targets` and `--tokens`.",
     "Table 8 (other responses)."),
))  # fmt: skip
