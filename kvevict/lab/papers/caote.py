"""Tables and figures of CAOTE (Goel et al. 2025). Its budgets of 2k to 8k slots, for prompts of up to 32k tokens, are
shares of the prompt here."""

from . import Setting, Table, methods, paper
from .measures import spearman
from .scores import scores
from .speed import refining

MODEL = "Llama-3.1-8B"
SNAPKV, TOVA = "snapkv:decode=True,interval=1", "tova:per_head=True"
NAMES = {
    "H2O": "h2o", "H2O+CAOTE": "h2o+caote", "H2O+FastCAOTE": "h2o+fastcaote", "TOVA": TOVA, "TOVA+CAOTE": "tova+caote",
    "TOVA+FastCAOTE": "tova+fastcaote", "SnapKV": SNAPKV, "SnapKV+CAOTE": "snapkv+caote",
    "SnapKV+FastCAOTE": "snapkv+fastcaote",
}  # fmt: skip
NINE = {label: Setting(policy=policy, chunk=128) for label, policy in NAMES.items()}
SINK = {"Sink": Setting(policy="streaming", chunk=128)}
BUDGETS = {f"{n}k (1/{32 // n} of the prompt)" if 32 % n == 0 else f"{n}k (3/16 of the prompt)": Setting(budget=n / 32)
           for n in (2, 4, 6, 8)}  # fmt: skip
TWO, FOUR, SIX, EIGHT = BUDGETS

TABLES = (
    Table(
        "table2", "LongBench with 2k and 4k slots, and of table 10 with 6k and 8k", scores,
        {**SINK, **NINE}, BUDGETS, Setting(tasks="answers"),
        {MODEL: f"""
                              {TWO}  {FOUR}  {SIX}
            Sink              -      -      43.39
            H2O               16.89  26.37  33.19
            H2O+CAOTE         33.31  40.42  44.06
            H2O+FastCAOTE     34.07  42.09  44.10
            TOVA              37.52  41.49  45.24
            TOVA+CAOTE        38.08  42.24  45.74
            TOVA+FastCAOTE    38.19  42.09  45.56
            SnapKV            39.60  45.18  47.12
            SnapKV+CAOTE      40.05  45.34  47.63
            SnapKV+FastCAOTE  40.73  45.75  47.71"""},
    ),
    Table(
        "table4", "Perplexity above the full cache's, evicting while reading and while decoding; table 12 has Qwen2.5",
        scores, NINE, BUDGETS, Setting(tasks="perplexity"), {MODEL: f"""
                              {TWO}  {FOUR}  {SIX}
            H2O               2.007   1.284    0.843
            H2O+CAOTE         1.884   1.079    0.716
            H2O+FastCAOTE     1.891   1.061    0.703
            TOVA              -0.046  -0.047   -0.035
            TOVA+CAOTE        -0.088  -0.060   -0.0366
            TOVA+FastCAOTE    -0.085  -0.058   -0.085
            SnapKV            -0.019  -0.0483  -0.036
            SnapKV+CAOTE      -0.097  -0.080   -0.043
            SnapKV+FastCAOTE  -0.098  -0.079   -0.045"""}, unit="perplexity", against="difference",
    ),
    Table(
        "table5", "Needle in a haystack by budget; table 13 has Qwen2.5", scores, NINE, BUDGETS, Setting(tasks="niah"),
        {MODEL: f"""
                              {TWO}  {FOUR}  {SIX}
            H2O               17.4  33.0  54.4
            H2O+CAOTE         27.0  53.8  69.8
            H2O+FastCAOTE     26.4  56.8  67.6
            TOVA              19.6  28.6  37.0
            TOVA+CAOTE        20.4  29.8  40.2
            TOVA+FastCAOTE    20.2  29.2  39.6
            SnapKV            21.4  36.0  49.0
            SnapKV+CAOTE      22.6  39.2  55.0
            SnapKV+FastCAOTE  24.2  42.0  58.0"""},
    ),
    Table("fig2", "Needle in a haystack with 6k slots (3/16 of the prompt): depth by tokens", scores,
          {"6k": Setting(budget=6 / 32)}, NINE, Setting(tasks="niah"), kind="map"),
    Table(
        "table6", "FLOPs of CAOTE's scores as a share of the model's, by its eq. 53 to 56. The printed ratios are not "
        "those of its equations", refining,
        {f"{phase} {n}k" if n >= 1 else f"{phase} 512": Setting(length=int(1024 * n))
         for phase, n in (("prefill", 4), ("prefill", 8), ("prefill", 32), ("generation", 0.5), ("generation", 1))},
        methods(CAOTE="snapkv+caote", FastCAOTE="snapkv+fastcaote"), unit="share of the FLOPs",
        paper={"": """
                            CAOTE    FastCAOTE
            prefill 4k      1.6e-4   8.9e-5
            prefill 8k      9.25e-5  5.28e-5
            prefill 32k     6.45e-5  3.69e-5
            generation 512  0.08     0.046
            generation 1k   0.15     0.087"""},
    ),
    Table(
        "table7", "Spearman's correlation of CAOTE's and FastCAOTE's numbers, by layer", spearman,
        {"this model": Setting()}, {}, unit="",
        paper={"": """
                             1     2     3     4     5     6     7     8     9     10    11    12    13    14
            Llama3.2-3B      0.99  0.98  0.91  0.97  0.92  0.88  0.85  0.82  0.81  0.90  0.84  0.92  0.83  0.86"""},
    ),
)  # fmt: skip

paper(
    "caote",
    "CAOTE (Goel et al. 2025)",
    TABLES,
    table3="another model: give it by --model",
    table8="it describes LongBench",
    table9="it describes LongBench",
    table12="another model: give it by --model",
    table11="another model: give it by --model",
    table13="another model: give it by --model",
)
