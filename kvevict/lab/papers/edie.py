"""Tables and figures of EDIE and TADA."""

from . import Setting, Table, crossed, methods, paper, slots
from .measures import estimates
from .scores import scores
from .speed import batches, speed

MISTRAL = "Mistral-7B-v0.2"
ADAKV, OURS = "adakv:pool=avg", "edie+tada"  # mean pooling, as in the paper's appendix A
FULL = {"Full Cache": Setting(policy="full", budget=1)}
ALL = methods(StreamingLLM="streaming", PyramidKV="pyramidkv", AdaKV=ADAKV) | {"EDIE+TADA": Setting(policy=OURS)}
BOTH = {"LongBench": Setting(tasks="answers"), "NIAH": Setting(tasks="niah")}
KEPT = Setting(budget=128)
CONTEXTS = {f"{n}k": Setting(length=1024 * n) for n in (4, 8, 16, 32, 64, 128, 256)}


def ablation(name: str, says: str, rows: dict[str, str], printed: str) -> Table:
    settings = {label: Setting(policy=policy) for label, policy in rows.items()}
    return Table(name, says, scores, settings, BOTH, KEPT, {MISTRAL: printed}, layers=2)


TABLES = (
    Table(
        "table1", "LongBench with two budgets", scores, {**FULL, **crossed(slots(128, 512), ALL)},
        {"{task}": Setting(tasks="answers")},
        paper={"LLaMA-3.1-8B": """
                               average
            Full Cache         49.20
            128, StreamingLLM  38.43
            128, PyramidKV     41.78
            128, AdaKV         42.81
            128, EDIE+TADA     45.14
            512, StreamingLLM  41.37
            512, PyramidKV     46.59
            512, AdaKV         47.15
            512, EDIE+TADA     48.28""", MISTRAL: """
                               average
            Full Cache         42.83
            128, StreamingLLM  28.57
            128, PyramidKV     34.69
            128, AdaKV         35.48
            128, EDIE+TADA     38.35
            512, StreamingLLM  31.40
            512, PyramidKV     39.69
            512, AdaKV         40.58
            512, EDIE+TADA     41.61"""}, layers=2,
    ),
    Table(
        "fig5", "Needle in a haystack: depth by tokens (figures 7 and 8 have more budgets)", scores, slots(128, 512),
        {name: ALL[name] for name in ("AdaKV", "EDIE+TADA")}, Setting(tasks="niah"), kind="map", layers=2, kv_heads=2,
        paper={"LLaMA-3.1-8B": """
                 AdaKV  EDIE+TADA
            128  72.6   88.3"""},
    ),
    Table(
        "fig3", "The 16 slots of the largest removal error (eq. 7), and those that each estimate finds", estimates,
        {"found of 16": Setting()},
        methods(AAS="snapkv", PAASVN="paasvn") | {
            "EDIE without c_j": Setting(policy="edie:weight=none"), "EDIE": Setting(policy="edie"),
        }, paper={"": """
                         EDIE
            found of 16  100"""},
    ),
    ablation(
        "table2", "Ablation of EDIE, TADA and alpha with 128 slots", {
            "AAS + Uniform": ADAKV, "PAASVN + Uniform": "paasvn", "EDIE 0.1 w/o tw + Uniform": "edie:weight=none",
            "EDIE 0.1 + Uniform": "edie", "EDIE 0.05 + Uniform": "edie:alpha=0.05",
            "EDIE 0.2 + Uniform": "edie:alpha=0.2", "EDIE 0.1 + Pyramid": "edie:layers=pyramid",
            "EDIE 0.1 + TADA w/o cd": "edie+tada:cd=off", "EDIE 0.1 + TADA": OURS,
        }, """
                                       LongBench  NIAH
            AAS + Uniform              35.48      78.5
            PAASVN + Uniform           36.12      82.2
            EDIE 0.1 w/o tw + Uniform  36.73      83.1
            EDIE 0.1 + Uniform         37.49      89.0
            EDIE 0.05 + Uniform        37.42      88.9
            EDIE 0.2 + Uniform         37.43      88.9
            EDIE 0.1 + Pyramid         37.61      87.0
            EDIE 0.1 + TADA w/o cd     37.37      92.6
            EDIE 0.1 + TADA            38.35      91.6""",
    ),
    ablation(
        "table3", "The weight c_j of the window's rows, with EDIE and TADA and 128 slots", {
            "None": "edie+tada:weight=none", "max over all": "edie+tada:weight=all",
            "max over i <= t-2w": "edie+tada:weight=i<=t-2w", "max over i > w": "edie+tada:weight=i>w",
            "max over w < i <= t-2w": OURS,
        }, """
                                    LongBench  NIAH
            None                    37.60      86.2
            max over all            36.20      85.0
            max over i <= t-2w      36.32      85.7
            max over i > w          37.16      89.3
            max over w < i <= t-2w  38.35      91.6""",
    ),
    Table(
        "table4", "TADA with and without cosine dissimilarity, 128 slots", scores,
        methods(**{"w/o cd": "edie+tada:cd=off", "w/ cd": OURS}), BOTH, KEPT, layers=2,
        paper={"LLaMA-3.1-8B": """
                    LongBench  NIAH
            w/o cd  45.22      79.7
            w/ cd   45.16      88.3""", MISTRAL: """
                    LongBench  NIAH
            w/o cd  37.37      92.6
            w/ cd   38.35      91.6"""},
    ),
    Table(
        "fig6", "Time and memory by tokens, 64 new ones", speed,
        crossed({**FULL, "AdaKV": ALL["AdaKV"], "EDIE+TADA": ALL["EDIE+TADA"]}, {"{length}": Setting()}),
        {name: Setting() for name in ("first token s", "whole s", "peak MiB", "KV MiB")}, Setting(budget=128, new=64),
        kind="panels", unit="",
    ),
    Table(
        "table5", "Largest batch, a power of two, of Mistral-7B in 64 GB: computed by `kvevict plan` for 128 slots, "
        "EDIE+TADA also in chunks of 4,096", batches, CONTEXTS,
        {**FULL, "EDIE+TADA": Setting(policy="edie"), "EDIE+TADA, chunks": Setting(policy="edie", chunk=4096)},
        KEPT, unit="prompts",
        paper={"": """
                  Full Cache  EDIE+TADA
            4k    32          64
            8k    16          32
            16k   8           16
            32k   4           8
            64k   2           4
            128k  1           2
            256k  -           1"""},
    ),
    Table(
        "table5a", "Throughput by batch on this machine: new tokens a second, 64 new ones", speed,
        crossed({**FULL, "EDIE+TADA": ALL["EDIE+TADA"]}, {f"batch {n}": Setting(batch=n) for n in (1, 2, 4)}),
        {name: Setting() for name in ("new tokens/s", "tokens/s", "peak MiB")}, Setting(budget=128, new=64),
        kind="panels", unit="",
    ),
)  # fmt: skip

paper(
    "edie", "EDIE and TADA", TABLES, table6="it describes LongBench", table7="table1 with --data has its tasks",
    table8="table1 with --data has its tasks",
)  # fmt: skip
