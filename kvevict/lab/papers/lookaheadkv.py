"""Tables and figures of LookaheadKV."""

from . import Setting, Table, crossed, methods, paper, slots
from .measures import responses
from .scores import scores
from .speed import CONFIGS, parameters, speed, theory

MODEL = "LLaMA3.1-8B"
# Appendix F: 32 drafted tokens and a window of 32 score slots together, by the mean over a GQA group.
LAQ = "laq:n_d=32,window=32,draft_keys=true"
OURS = methods(LookaheadKV="lookahead{adapter}")
DRAFTING = methods(SpecKV="speckv:draft_model={draft}", LAQ=LAQ)
SIX = methods(PyramidKV="pyramidkv", SnapKV="snapkv", StreamingLLM="streaming") | DRAFTING | OURS
FULL = {"FullKV": Setting(policy="full", budget=1)}
FOUR = {"SnapKV": SIX["SnapKV"], **DRAFTING, **OURS}
KEPT = Setting(budget=128)

TABLES = (
    Table(
        "table1", "Trainable parameters of 32 lookahead rows and their LoRA", parameters,
        {name: Setting() for name in (*CONFIGS, "this model") if name != "Mistral-7B"},
        {"millions": Setting(), "% of the model": Setting()}, kind="panels", unit="",
        paper={"": """
                         millions  % of the model
            LLaMA3.2-1B  5.4       0.44
            LLaMA3.2-3B  11.9      0.37
            LLaMA3.1-8B  20.6      0.26
            Qwen3-1.7B   8.5       0.49
            Qwen3-4B     16.2      0.40
            Qwen3-8B     21.5      0.26"""},
    ),
    Table(
        "table3", "Computed costs of LLaMA3.1-8B on an H100 with 128 slots (the lengths of tables 3 and 15)",
        theory,
        crossed({f"{n}": Setting(length=n) for n in (4096, 8192, 16384, 32768)},
                {"Forward": Setting(policy="full"), "SnapKV": Setting(policy="snapkv"),
                 "LookaheadKV": Setting(policy="oracle"), "SpecKV": Setting(policy="speckv"),
                 "LAQ": Setting(policy=LAQ)}),
        {name: Setting() for name in ("TFLOPs", "GB", "TTFT ms", "overhead ms")}, KEPT, kind="panels", unit="",
        paper={"": """
                                TFLOPs  GB  TTFT ms  overhead ms
            4096, Forward       60      13  113      -
            4096, SnapKV        60      13  113      0.01
            4096, LookaheadKV   60      13  114      0.92
            4096, SpecKV        70      77   165      52.10
            4096, LAQ           61      444  347     233.81
            8192, Forward       136     13  257      -
            8192, SnapKV        136     13  257      0.01
            8192, LookaheadKV   137     13  258      1.03
            8192, SpecKV        159     81   337      79.53
            8192, LAQ           137     445  492     234.59
            16384, Forward      336     13  635      -
            16384, SnapKV       336     13  635      0.01
            16384, LookaheadKV  337     13  636      1.27
            16384, SpecKV       398     89   792      157.05
            16384, LAQ          337     447  871     236.15
            32768, Forward      928     13  1754     -
            32768, SnapKV       928     13  1754     0.01
            32768, LookaheadKV  929     13  1755     1.74
            32768, SpecKV       1115    106  2156     402.80
            32768, LAQ          930     451  1993     239.26"""},
    ),
    Table("fig3", "Time to the first token by tokens, measured (the empirical columns of tables 3 and 15)", speed,
          crossed({**FULL, **OURS, **FOUR}, {"{length}": Setting()}), {"first token s": Setting()},
          Setting(budget=128, new=2), kind="panels", unit=""),
    Table("fig4", "LongBench by budget; the paper's numbers are a picture's, but table 4's", scores,
          slots(64, 128, 256, 512), {**FULL, **SIX}, Setting(tasks="answers"), {MODEL: """
                 FullKV  SnapKV  SpecKV  LAQ    LookaheadKV
            128  49.88   43.50   45.45   46.61  47.72"""}),
    Table("fig4a", "RULER by tokens with 128 slots (table 6 has 64k and 128k tokens)", scores,
          {"{length}": Setting()}, {**FULL, **SIX}, Setting(tasks="ruler", budget=128), {MODEL: """
                   FullKV  SnapKV  SpecKV  LAQ    LookaheadKV
            64k    88.48   36.15   65.08   64.73  71.00
            128k   77.98   27.64   53.16   50.91  55.83"""}),
    Table("fig5", "A long answer with 30 % of the slots: our task `listed` in place of LongProc's HTML to TSV", scores,
          {"this model": Setting()}, {**FULL, **SIX}, Setting(tasks="listed", budget=0.3)),
    Table(
        "table4", "LongBench at three temperatures, 128 slots", scores,
        {"Greedy": Setting(), "T = 0.2": Setting(temperature=0.2), "T = 0.8": Setting(temperature=0.8)},
        {**FULL, **FOUR}, Setting(tasks="answers", budget=128), {MODEL: """
                     FullKV  SnapKV  SpecKV  LAQ    LookaheadKV
            Greedy   49.88   43.50   45.45   46.61  47.72
            T = 0.2  49.58   43.29   44.99   46.73  47.75
            T = 0.8  47.82   41.39   43.43   45.27  45.81"""},
    ),
    Table(
        "table7", "Lookahead rows alone, and with the prompt's last 32, 64 slots", scores, {"LongBench": Setting()},
        {**FULL, **OURS, "LookaheadKV + Suffix Window": Setting(policy="lookahead:window=32{and_adapter}")},
        Setting(tasks="answers", budget=64), {"LLaMA3.2-1B": """
                       FullKV  LookaheadKV  LookaheadKV + Suffix Window
            LongBench  32.01   29.10        28.52"""},
    ),
    Table(
        "table8", "Importance of slots by sampled responses, and by a smaller model's, against the greedy one's: "
        "recall of the best 512 (at most an eighth of the slots) and Kendall's tau", responses,
        {"Recall": Setting(), "Tau": Setting()},
        {f"T = {t}": Setting(temperature=t) for t in (0.2, 0.4, 0.6, 0.8)} | {"smaller model": Setting()},
        paper={MODEL: """
                    T = 0.2  T = 0.4  T = 0.6  T = 0.8  smaller model
            Recall  95.06    93.73    91.40    91.37    88.66
            Tau     91.44    88.63    84.61    84.79    80.05"""},
    ),
)  # fmt: skip

paper(
    "lookaheadkv",
    "LookaheadKV",
    TABLES,
    table2="MT-Bench needs a model that judges",
    table5="adapters of `kvevict train --targets none|qv|all --tokens N`, each given by --adapter",
    fig6="adapters of `kvevict train` on shorter texts, each given by --adapter",
    table6="fig4a with longer --lengths",
    fig7="adapters trained on two kinds of responses",
    table16="it lists the training's options",
)
