from collections.abc import Iterator

from . import PROTOCOLS, Claim, Protocol, each

ALONE = "chunkkv:per_head=True"  # runs chosen by every head, like SnapKV's slots
HYBRID = 'chunkkv:select_by_layer=[[{L2},null,"token"]]'  # runs in the lower half of the layers, single slots above


def claims() -> Iterator[Claim]:
    yield Claim("its tables of LongBench and needles: ChunkKV beats SnapKV", "chunkkv", "snapkv")
    yield Claim("its idea alone: runs of 10 instead of single slots, no pooling", ALONE, "snapkv:pool=none")
    yield Claim("runs of 10 instead of pooling over 7", ALONE, "snapkv")
    yield Claim("one choice for all heads is about as good as one each", "chunkkv", ALONE, 0.05)
    for c in (3, 5, 20, 30):
        yield Claim(f"its table of chunk sizes: 10 beats {c}", "chunkkv", f"chunkkv:c={c}")
    yield Claim("its hybrid: runs in every layer beat single slots in the upper half", "chunkkv", HYBRID)
    reuse = [f"chunkkv:n_reuse={n}" for n in (2, 3, 4)]
    yield from each("its table of index reuse: {better} costs little", reuse, "chunkkv", margin=0.05)


PROTOCOLS.add("chunkkv")(Protocol(
    "ChunkKV (Liu et al. 2025), its tables of LongBench, needles, chunk sizes and index reuse",
    tuple(claims()),
    ("Its numbers: LongBench, GSM8K and needles with models of 7 and 8 billion parameters.",
     "Its hybrid with SnapKV above: there SnapKV's pooling comes back too; here the selection alone changes.",
     "Latencies of reuse: scoring is below 1 % of a read here, so sharing it saves less than can be measured."),
))  # fmt: skip
