import itertools
from collections.abc import Iterator

from . import PROTOCOLS, Claim, Protocol

BLOCK = (128, 128)
REFINED = "caote", "fastcaote"
SNAPKV = "snapkv:decode=True,interval=1"
BASES = {"h2o": "h2o", "tova": "tova:per_head=True", "snapkv": SNAPKV}


def refined() -> Iterator[Claim]:
    for name, base in BASES.items():
        for refine in REFINED:
            yield Claim(f"tables 2 to 5: {refine} improves {name}", f"{name}+{refine}", base, chunks=BLOCK)
        says = f"tables 2 to 5: fastcaote is about as good over {name}"
        yield Claim(says, f"{name}+fastcaote", f"{name}+caote", margin=0.05, chunks=BLOCK)


def on_the_prompt() -> Iterator[Claim]:
    """Yield claims of which neither side evicts while decoding."""
    for name, base in (("h2o", "h2o:decode=False"), ("tova", "tova:per_head=True,decode=False"), ("snapkv", "snapkv")):
        for refine in REFINED:
            says = f"the same, nothing evicted while decoding: {refine} improves {name}"
            yield Claim(says, f"{name}+{refine}:decode=False", base, chunks=BLOCK)


def blocks() -> Iterator[Claim]:
    for refine, size in itertools.product(REFINED, (64, 256, 512)):
        says = f"section 4: {refine} improves snapkv in blocks of {size}, too"
        yield Claim(says, f"snapkv+{refine}", SNAPKV, chunks=(size, size))


PROTOCOLS.add("caote")(Protocol(
    "CAOTE (Goel et al. 2025), tables 2 to 5",
    (*refined(), *on_the_prompt(), *blocks()),
    ("Its numbers: LongBench and Booksum with models of 3 to 8 billion parameters.",
     "Table 6's overhead, and table 7's correlation.",
     "Fidelity scores a response that evicts nothing, so its numbers are the same whatever is evicted while decoding."),
))  # fmt: skip
