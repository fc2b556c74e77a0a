from collections.abc import Iterator

from . import PROTOCOLS, Claim, Protocol

ADAKV = "adakv:pool=avg"  # EDIE's appendix: mean pooling
WEIGHTS = ("none", "all", "i<=t-2w", "i>w")


def claims() -> Iterator[Claim]:
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
        yield Claim(f"table 3: rows weighed by the middle instead of {weight}", "edie", f"edie:weight={weight}")
    yield Claim("ours: the exact error is about as good as the bound", "edie", "edie-exact", 0.05)
    yield Claim("ours: drafted rows instead of the window's", "edie:rows=drafted", "edie")


PROTOCOLS.add("edie")(Protocol(
    "EDIE and TADA, tables 1 to 4",
    tuple(claims()),
    ("Its numbers: LongBench with models of 7 and 8 billion parameters.",
     "Table 5's batch sizes in 64 GB: `kvevict plan` prices them."),
))  # fmt: skip
