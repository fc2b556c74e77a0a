from collections.abc import Iterator

from . import PROTOCOLS, Claim, Protocol, each

Z = (256, 256)
NO_PROBE = "take:append=false"  # table 2's ablations: a chunk's last 32 rows observe
NO_DELAY = "take:warmup_layers=none"  # no layer waits
NEITHER = NO_PROBE + ",warmup_layers=none"
RELAXED = "take:warmup_budget={B20},warmup_layers="  # B_warmup is 20 times the budget, as in the paper
LARGEST = "edie:rows=probe,heads=equal,kernel=31"
MEAN = LARGEST + ",pool=avg"


def claims() -> Iterator[Claim]:
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


PROTOCOLS.add("take")(Protocol(
    "TAKE, tables 1 and 2, figure 7",
    tuple(claims()),
    ("Its numbers: LongBench and needles at 128k tokens with models of 7 and 8 billion parameters.",
     "Delay with fewer than four layers that evict: none would wait.",
     "Time and memory of figure 6: `kvevict bench` and `kvevict plan` have ours."),
))  # fmt: skip
