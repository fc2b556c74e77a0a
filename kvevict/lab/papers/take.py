"""Tables and figures of TAKE. Chunks have 128 tokens here, and a needle's text is at most as long as the model's
context; the paper reads up to 131,072 tokens in chunks of 4,096."""

from . import Setting, Table, crossed, methods, paper, slots
from .measures import sparsity
from .scores import scores
from .speed import flops, speed

MODEL = "LLaMA-3.1-8B"
Z = 128
TAKE = "take:ema_alpha=0.2"
NO_PROBE, NO_DELAY = "take:append=false", "take:warmup_layers=none"
ONCE = methods(SnapKV="snapkv", AdaKV="adakv:pool=avg", FastKV="fastkv", CAKE="cake")
FIVE = {**ONCE, "TAKE": Setting(policy=TAKE, chunk=Z)}
FULL = {"Full KV": Setting(policy="full", budget=1)}
NEEDLES = {**ONCE, "TAKE": Setting(policy="take:ema_alpha=0.32", chunk=Z)}
BOTH = {"NIAH": Setting(tasks="niah"), "LongBench": Setting(tasks="answers")}
KEPT = Setting(budget=128, chunk=Z)

# Layers that wait, as shares of all, with B_warmup of 20 B; the words in braces are those of `protocols.words`
WAITS = "take:warmup_budget={B20},warmup_layers="
WARM = {
    "W = L/4": Setting(policy=WAITS + "{L4}"), "W = L/2": Setting(policy=WAITS + "{L2}"),
    "W = 3L/4": Setting(policy=WAITS + "{L34}"), "W = L": Setting(policy=WAITS + "{L}"),
    "B_warmup = B": Setting(policy="take:warmup_budget={B}"),
    "B_warmup = 20 B": Setting(policy="take:warmup_budget={B20}"),
}  # fmt: skip
TABLES = (
    Table(
        "table1", "LongBench by budget, and of table 3 with 256 and 1024 slots", scores,
        {**FULL, **crossed(slots(128, 256, 512, 1024), FIVE)}, {"{task}": Setting(tasks="answers")},
        paper={MODEL: """
                          average
            Full KV       48.63
            128, SnapKV   43.03
            128, AdaKV    43.30
            128, FastKV   42.71
            128, CAKE     42.03
            128, TAKE     44.09
            256, SnapKV   45.02
            256, AdaKV    44.98
            256, FastKV   45.16
            256, CAKE     44.65
            256, TAKE     45.60
            512, SnapKV   46.47
            512, AdaKV    46.21
            512, FastKV   46.66
            512, CAKE     46.37
            512, TAKE     47.45
            1024, SnapKV  47.31
            1024, AdaKV   47.45
            1024, FastKV  47.66
            1024, CAKE    47.47
            1024, TAKE    47.52"""},
    ),
    Table("fig4", "Attention of each layer to a text with a needle: slots that hold 90 % of it, the needle's share",
          sparsity, {}, {"slots with 90 %": Setting(), "on the needle, best head": Setting()}),
    Table("fig5", "Needle in a haystack: depth by tokens (figures 8 to 13 have other budgets)", scores, slots(64, 128),
          NEEDLES, Setting(tasks="niah"), kind="map"),
    Table(
        "fig6", "Time to the first token and memory by tokens", speed,
        crossed({**FULL, **FIVE}, {"{length}": Setting()}),
        {name: Setting() for name in ("first token s", "peak MiB", "KV MiB")}, Setting(budget=128, new=8),
        kind="panels", unit="",
    ),
    Table(
        "fig6a", "Computed for LLaMA-3.1-8B and 131,072 tokens: memory, and appendix B's FLOPs of attention", flops,
        {**FULL, **methods(SnapKV="snapkv", TAKE="take:warmup_budget=10240")},
        {name: Setting() for name in ("peak GB", "KV and activations, GB", "attention FLOPs, %")}, Setting(budget=512),
        kind="panels", unit="",
        paper={"H800": """
                     peak GB  KV and activations, GB  attention FLOPs, %
            Full KV  48.91    32.84                   100
            SnapKV   31.90    15.83                   -
            TAKE     18.99    2.92                    7.10"""},
    ),
    Table(
        "table2", "Ablation of probe and delay, with B_warmup of 20 B", scores,
        {
            "Chunk-only": Setting(policy=NO_PROBE + ",warmup_layers=none"),
            "w/o Probe": Setting(policy=NO_PROBE + ",warmup_budget={B20}"),
            "w/o Delay": Setting(policy=NO_DELAY), "TAKE": Setting(policy="take:warmup_budget={B20}"),
        }, BOTH, KEPT, layers=4,
        paper={MODEL: """
                        NIAH   LongBench
            Chunk-only  10.90  26.46
            w/o Probe   10.90  26.46
            w/o Delay   80.00  45.89
            TAKE        91.8   47.45"""},
    ),
    Table("fig7", "Layers W that wait, with B_warmup of 20 B, and B_warmup with W = L/2", scores, WARM, BOTH, KEPT,
          layers=4),
    Table("fig7a", "Time to the first token and memory by W and B_warmup", speed, WARM,
          {name: Setting() for name in ("first token s", "peak MiB")}, Setting(budget=128, chunk=Z, new=8), layers=4,
          kind="panels", unit=""),
)  # fmt: skip

paper(
    "take",
    "TAKE",
    TABLES,
    table3="table1 has its budgets",
    table4="another model: give it by --model",
    fig8="fig5 with another --model",
)
