"""Tables and figures of ChunkKV (Liu et al. 2025), numbered as its LaTeX source counts them."""

from . import Setting, Table, crossed, methods, paper, slots
from .measures import losses, similarity
from .scores import scores
from .speed import speed

MODEL, REUSED = "LLaMA-3-8B", "chunkkv:n_reuse=2"
FIVE = methods(SLM="streaming", H2O="h2o", SKV="snapkv", PKV="pyramidkv", ChunkKV="chunkkv")
THREE = methods(H2O="h2o", SnapKV="snapkv", ChunkKV="chunkkv")
SIZES = {str(c): Setting(policy=f"chunkkv:c={c}") for c in (1, 3, 5, 10, 15, 20, 30)}
REUSE = {label: Setting(policy=f"chunkkv:n_reuse={n}")
         for label, n in {**{str(n): n for n in (1, 2, 3, 5, 10, 20)}, "all": "{L}"}.items()}  # fmt: skip
RATIOS = {f"{percent} %": Setting(budget=percent / 100) for percent in (10, 20, 30)}
NIAH = slots(512, 256, 128, 96)
TENTH = Setting(budget=0.1, tasks="answers")
OURS = {"this model": TENTH}
FULL = Setting(policy="full", budget=1)
HYBRID = 'chunkkv:select_by_layer=[[{L2},null,"pooled"]]'
COSTS = {name: Setting() for name in ("first token s", "ms per token", "whole s", "tokens/s", "KV MiB")}

NEEDLES = """
         SLM   H2O   SKV   PKV   ChunkKV
    512  32.0  68.6  71.2  72.6  74.5
    256  28.0  61.7  68.8  69.5  74.1
    128  23.7  47.9  58.9  65.1  73.8
    96   21.5  41.0  56.2  63.2  70.3"""

TABLES = (
    Table(
        "table2", "Jaccard index of the slots that neighbouring layers keep (first head), at 10 % of the slots. The "
        "heat maps are figure 2: every pair of layers", similarity, OURS, THREE, layers=2,
        paper={"": """
                        H2O    SnapKV  ChunkKV
            LLaMA-3-8B  25.31  27.95   57.74
            Qwen2-7B    14.91  16.50   44.26
            Mistral-7B  15.15  15.78   52.16"""},
    ),
    Table(
        "table6", "LongBench at three compression ratios: score above the full cache's", scores, RATIOS, FIVE,
        Setting(tasks="answers"), unit="% of the full cache's score", against="gap",
        paper={MODEL: """
                  SLM     H2O     SKV    PKV    ChunkKV
            10 %  -13.80  -10.61  -3.16  -3.33  -2.29
            20 %  -6.42   -8.85   -2.24  -2.00  -1.74
            30 %  -2.36   -5.38   -0.07  -0.22  +0.31"""},
    ),
    Table("table7", "Needle in a haystack by KV cache size", scores, NIAH, FIVE, Setting(tasks="niah"),
          {"LLaMA-3.1-8B": NEEDLES}),
    Table("fig3", "Needle in a haystack with 128 slots: depth by tokens", scores, slots(128), FIVE,
          Setting(tasks="niah"), {"LLaMA-3-8B": """
                 SLM   H2O   SKV   PKV   ChunkKV
            128  23.7  47.9  58.9  65.1  73.8"""}, kind="map"),
    Table(
        "table9", "Index reuse over two layers, LongBench", scores, OURS,
        {"Baseline": Setting(policy="chunkkv"), "Index reuse": Setting(policy=REUSED)}, layers=2,
        paper={"": """
                        Baseline  Index reuse
            LLaMA-3-8B  40.51     40.27
            Mistral-7B  46.71     46.43
            Qwen2-7B    40.88     40.76"""},
    ),
    Table(
        "table10", "Chunk sizes, LongBench at 10 % and needles with 128 slots", scores,
        {"LongBench": TENTH, "NIAH": Setting(budget=128, tasks="niah")},
        {"Full KV": FULL, **{f"size={c}": SIZES[c] for c in ("3", "5", "10", "20", "30")},
         "SnapKV": FIVE["SKV"], "H2O": FIVE["H2O"]},
        paper={MODEL: """
                       Full KV  size=3  size=5  size=10  size=20  size=30  SnapKV  H2O
            LongBench  41.46    40.49   40.47   40.51    40.05    39.57    40.15   37.06
            NIAH       74.6     65.6    69.1    73.8     72.0     71.2     58.9    47.9"""},
    ),
    Table(
        "table12", "Hybrid: runs in the lower half of the layers, SnapKV above, at 10 %", scores,
        {"FullKV": FULL, **methods(SnapKV="snapkv", Hybrid=HYBRID, ChunkKV="chunkkv")}, {"{task}": TENTH}, layers=2,
        paper={MODEL: """
                     average
            FullKV   41.46
            SnapKV   40.15
            Hybrid   39.80
            ChunkKV  40.51"""},
    ),
    Table(
        "table13", "L1 loss of the cache and cosine of attention, at 10 %; of figure 4 each layer. The paper's are of "
        "LongBench's single-document questions", losses, OURS, THREE, unit="",
        paper={MODEL: """
                        H2O, L1 loss  H2O, cosine  SnapKV, L1 loss  SnapKV, cosine  ChunkKV, L1 loss  ChunkKV, cosine
            all layers  0.8905        0.3491       0.8921           0.3513          0.8741            0.3567"""},
    ),
    Table(
        "table15", "Index reuse over 1 layer to all, LongBench at 10 %", scores, OURS, REUSE, layers=2,
        paper={"": """
                        1      2      3      5      10     20     all
            LLaMA-3-8B  40.51  40.27  39.45  40.05  39.59  37.42  35.67
            Mistral-7B  46.71  46.43  46.48  45.90  44.36  41.84  39.56
            Qwen2-7B    40.88  40.76  40.91  41.58  40.19  37.42  36.79"""},
    ),
    Table(
        "table19", "Chunk sizes by compression ratio, LongBench", scores, RATIOS, SIZES, Setting(tasks="answers"),
        {MODEL: """
                  1      3      5      10     15     20     30
            10 %  37.32  40.49  40.47  40.51  40.21  40.05  39.57
            20 %  38.80  40.66  40.57  40.74  40.53  40.46  40.04
            30 %  39.23  41.02  41.29  41.59  41.38  41.33  41.02"""},
    ),
    Table(
        "table20", "Chunk sizes by KV cache size, needles", scores, NIAH, SIZES, Setting(tasks="niah"),
        {MODEL: """
                 1     3     5     10    15    20    30
            96   41.0  63.2  65.2  70.3  67.2  65.3  53.1
            128  47.9  65.6  69.1  73.8  72.3  72.0  71.2
            256  61.7  70.3  71.2  74.1  73.2  72.3  71.1
            512  68.6  72.6  72.5  74.5  74.3  74.0  72.6"""},
    ),
    Table(
        "table25", "Time to the first token and per token at 10 %, and tables 8 and 26: whole time and tokens/s. The "
        "paper reads 4,096 tokens and writes 1,024", speed,
        crossed({"FullKV": FULL, **methods(StreamingLLM="streaming", SnapKV="snapkv", ChunkKV="chunkkv",
                                           ChunkKV_reuse=REUSED)}, {"{length}": Setting()}),
        COSTS, Setting(budget=0.1, new=64), kind="panels", unit="",
        paper={"LLaMA-3-8B, A40": """
                                         first token s  ms per token  whole s  tokens/s
            FullKV, 4096 tokens          1.17           42.58         43.60    105.92
            StreamingLLM, 4096 tokens    1.02           35.94         -        -
            SnapKV, 4096 tokens          1.04           36.24         37.92    120.42
            ChunkKV, 4096 tokens         1.03           36.64         37.52    118.85
            ChunkKV reuse, 4096 tokens   1.00           36.47         37.35    124.09
            FullKV, 16384 tokens         -              -             49.60    323.24
            SnapKV, 16384 tokens         -              -             39.20    381.11
            ChunkKV, 16384 tokens        -              -             38.82    381.61
            ChunkKV reuse, 16384 tokens  -              -             36.96    389.21"""},
    ),
)  # fmt: skip

paper(
    "chunkkv", "ChunkKV (Liu et al. 2025)", TABLES,
    table3="GSM8K: `kvevict.lm_eval` runs lm-eval's task; a small model answers nothing of it",
    table4="GSM8K with 50 examples: the same", table5="JailbreakV is not among our tasks",
    table11="KIVI is not implemented; slots of 8 and 4 bits are kv=int8, k8v4 and int4",
    table14="GSM8K: as table 3", table17="LongBench by task: table6 with --data has the average",
    table18="a model of 70 billion parameters", table22="as table 6 with LongBench's Chinese records by --data",
    table23="KIVI is not implemented", table24="Palu is not implemented",
)  # fmt: skip
