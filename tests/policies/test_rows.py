"""The observing rows are an independent choice: every score, refinement and layer budget over every choice of rows,
against the float64 oracle; and every part and preset is in the tests' tables."""

import itertools

import oracle
import pytest
from choices import ANSWERS, DRAFT, DRAFTS, GATES, TABLES
from policy_cases import BUDGET, CHUNK, compare, model, ours, tokens, truth

import kvevict
from kvevict.policy.building import build
from kvevict.policy.parts import PARTS

ROWS = {
    "last": {},
    "all": {},
    "window": dict(window=4),
    "probe": dict(probe=4),
    "probe, alone": dict(probe=4, ema_alpha=0.0),
    "probe, span": dict(probe=(-9, -5)),
    "probe, chunk": dict(probe=5, append=False),
    "given": dict(ids=(7, 11, 13)),
    "repeat": {},
    "drafted": dict(n_d=3, window=3),
    "drafted, keys": dict(n_d=3, window=2, draft_keys=True),
    "drafted, no window": dict(n_d=4, window=0),
    "drafted, no window, keys": dict(n_d=3, window=0, draft_keys=True),
    "drafted, by another": dict(n_d=3, window=3, draft_model=DRAFT),
    "drafted, by another, keys": dict(n_d=3, window=0, draft_keys=True, draft_model=DRAFT),
}  # "rows, remark": options
SCORES = {
    "snapkv": dict(kernel=3),
    "snapkv, largest": dict(score="snapkv", reduce="max", keep_first=2),
    "take": {},
    "speckv": dict(keep_first=1),
    "fastkv": dict(kernel=3),
    "tova": {},
    "h2o": dict(recent=2),
    "vatp": dict(sink=1, recent=2),
    "paasvn": dict(keep_first=1),
    "cake": {},
    "edie": dict(heads="flat"),
    "edie, not near the end": dict(weight="i<=t-2w", pool="none"),
    "edie-exact": dict(weight="all", kernel=3, heads="flat"),
    "defensive": dict(kernel=3, heads="flat"),
    "knorm": {},
    "streaming": dict(sink=2),
    "snapkv, caote": dict(refine="caote", kernel=3, heads="flat"),
    "take, fastcaote": dict(refine="fastcaote", heads="ada"),
    "edie, caote": dict(refine="caote"),
    "snapkv, by cake": dict(layers="cake"),
    "cake, by cake": dict(layers="cake", heads="flat"),
    "edie, by cake": dict(layers="cake", heads="flat"),
    "snapkv, runs": dict(select="chunk", c=3),
    "edie, reuse": dict(n_reuse=2),
    "edie-exact, delay": dict(warmup_layers=3, warmup_budget=22),
}  # "score, remark": options
CARRIED = ("h2o", "vatp")
POSITIONAL = ("streaming", "knorm", "keydiff", "random", "lagkv", "expected", "gate", "tri")
REPEATED = ("kvzip", "kvzip+")


def given(score, rows, **more):
    """Options of a row of SCORES and of one of ROWS, for the preset snapkv."""
    chosen = dict(score=score.split(",")[0], rows=rows.split(",")[0], decode=False)
    chosen |= SCORES[score] | ROWS[rows] | more
    if alone(rows):
        chosen["schedule"] = "prompt"
    return chosen


def alone(rows):
    """Whether the model drafts for itself."""
    return rows.startswith("drafted") and "draft_model" not in ROWS[rows]


def legal(score, rows):
    """A draft comes once, when sums of every chunk cannot be made up for; one row has no variance."""
    carried = score.split(",")[0] in CARRIED
    return not ((carried and alone(rows)) or (score.endswith("by cake") and rows == "last"))


LEGAL = [pair for pair in itertools.product(SCORES, ROWS) if legal(*pair)]
every_pair = pytest.mark.parametrize("score, rows", LEGAL)
# One pair in four: every score, over changing rows.
some_pairs = pytest.mark.parametrize("score, rows", [pair for i, pair in enumerate(LEGAL) if i % 4 == 0])


@every_pair
@pytest.mark.drawn(24)
def test_chunks(score, rows):
    """The first chunk is shorter than the others."""
    compare(model(), "snapkv", [[41]], **given(score, rows, budget=BUDGET, chunk_size=CHUNK))


@every_pair
@pytest.mark.drawn(32)
def test_whole_prompt(score, rows):
    compare(model(), "snapkv", [[37]], **given(score, rows, budget=11))


@some_pairs
@pytest.mark.drawn(10)
def test_padded_rows(score, rows):
    """The shortest has nothing to lose; a batch needs chunks of two probes."""
    chosen = given(score, rows, budget=BUDGET, chunk_size=CHUNK)
    compare(model(), "snapkv", [[41], [26], [13]], **chosen)


@some_pairs
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.drawn(12)
def test_groups_of(score, rows, heads):
    compare(model(num_key_value_heads=heads), "snapkv", [[39]], **given(score, rows, budget=BUDGET, chunk_size=CHUNK))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "phi3"])
@pytest.mark.parametrize("rows", [rows for rows in ROWS if rows not in ("last", "window", "probe, span")])
@pytest.mark.parametrize("score", ["edie", "snapkv, caote", "cake, by cake"])
@pytest.mark.drawn(10)
def test_other_families(score, rows, family):
    """Sink logits, softcaps, layers with a sliding window, and RoPE of a part of the head."""
    compare(model(family), "snapkv", [[38]], **given(score, rows, budget=BUDGET, chunk_size=CHUNK))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("score", ["snapkv, largest", "edie", "snapkv, caote", "h2o", "tova", "vatp"])
@pytest.mark.drawn(8)
def test_decoding(score, rows):
    """While decoding the newest rows stand in for those of a prompt; prompts above the budget and below it."""
    if legal(score, rows):
        chosen = given(score, rows, budget=BUDGET, chunk_size=CHUNK, decode=True, interval=2)
        compare(model(), "snapkv", [[29, *[1] * 8], [12, *[1] * 8]], **chosen)


@pytest.mark.parametrize("rows", [rows for rows in ROWS if "by another" not in rows])
@pytest.mark.parametrize("score", ["edie", "snapkv, caote", "h2o", "cake"])
@pytest.mark.drawn(6)
def test_turns(score, rows):
    if legal(score, rows):
        compare(model(), "snapkv", [[30, 1, 1, 25, 1]], **given(score, rows, budget=0.4, chunk_size=CHUNK))


@pytest.mark.parametrize("rows", [rows for rows in ROWS if rows != "repeat"])  # these are not the chunk's last tokens
@pytest.mark.parametrize("score, cd, family", [
    ("snapkv", "attention", "llama"), ("edie, caote", "attention", "llama"), ("snapkv, caote", "attention", "llama"),
    ("snapkv", "layer", "llama"), ("snapkv", "attention", "gemma3"), ("snapkv", "attention", "granite"),
    ("snapkv", "layer", "gemma3"),
])  # fmt: skip
@pytest.mark.drawn(6)
def test_tada_measures_the_rows_that_observe(score, rows, cd, family, task):
    """One context's errors, the mean over its chunks, with the rotation of those rows' residual stream."""
    made, shares = model(family), [3.0, 1.0, 2.0, 2.5][: 2 if family == "gemma3" else 4]
    table = SCORES | {"edie, caote": dict(refine="caote")}
    chosen = dict(score=score.split(",")[0], budget=BUDGET, chunk_size=CHUNK) | table[score] | ROWS[rows]
    chosen["rows"] = rows.split(",")[0]
    seed, (((_, positions),),) = truth(made, "snapkv", [[53]], **chosen, errors=shares)
    row = oracle.Row(made, "snapkv", **chosen, errors=shares, measure=True, cd=cd)
    row.read(tokens([[53]], seed)[0][0].tolist())
    assert row.positions == positions and {len(x) for x in row.errors} == {1 if alone(rows) else 4}
    want, past = [sum(x) / len(x) for x in row.errors], kvevict.history(task)
    past.contexts, past.errors = 1, shares
    (((_, kept),),) = ours(made, "snapkv", [[53]], seed, layers="tada", cd=cd, task=task, **chosen)
    assert kept == positions
    assert [2 * x - y for x, y in zip(past.errors, shares)] == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("rows", [rows for rows in kvevict.ROWS if rows != "lookahead"])  # test_lookahead.py has them
@pytest.mark.parametrize("score", [score for score in kvevict.SCORES if score not in ("lookahead", "gate")])
def test_every_score_over_every_rows_is_compared_or_refused(score, rows):
    compared = {tuple(name.split(",")[0] for name in pair) for pair in LEGAL}
    compared |= {(name, "repeat") for name in REPEATED} | {
        ("compactor", "all"), ("products", "window"),
    }  # fmt: skip  # test_hidden.py, test_values_and_keys.py, test_every_choice.py
    try:
        build("snapkv", score=score, rows=rows, budget=300)
    except ValueError:
        drafted = score in (*CARRIED, "expected", "lagkv", "tri") and rows == "drafted"
        elsewhere = (score, rows) not in compared and score in (*REPEATED, "compactor", "products")
        assert rows == "none" or drafted or elsewhere
    else:
        # Names that differ in their options alone are one score; keys and positions know no rows.
        same = dict(oracle="snapkv", laq="snapkv", keydiff="knorm", random="knorm", lagkv="knorm", expected="knorm")
        same |= dict(tri="knorm", rkv="snapkv")  # test_keep_prompt.py has it with its default rows
        assert (rows == "none" and score in POSITIONAL) or (same.get(score, score), rows) in compared


ALL = [*TABLES.values(), DRAFTS, ANSWERS]


def covering():
    """{"preset, remark": options} of ALL, a few that have every part together, except gates (test_gates.py has
    them)."""
    found, seen = {}, set()
    for name, chosen in (row for table in ALL for row in table.items()):
        policy = build(name.split(",")[0], **chosen | dict(budget=300))
        parts = {(kind, type(getattr(policy, kind))) for kind in PARTS}
        if not parts <= seen:
            found[name] = dict(chunk_size=CHUNK) | chosen
            seen |= parts
    return found


COVERING = covering()


@pytest.mark.quick
@pytest.mark.parametrize("name", COVERING)
def test_every_part_once(name):
    """A prompt of several chunks, and two decoded tokens."""
    compare(model(), name.split(",")[0], [[37, 1, 1]], **dict(budget=BUDGET) | COVERING[name])


def test_every_preset_is_compared_with_the_oracle():
    compared = {name.split(",")[0] for table in (*ALL, GATES) for name in table}
    elsewhere = {"random", "edie+tada"}  # by hand, test_choices.py
    elsewhere |= {"lookahead", "random/redraw"}  # test_lookahead.py, test_keep_prompt.py
    halves = {"fastkv", "take+edie/half"}  # test_fastkv.py
    assert {*kvevict.policies()} - compared == elsewhere | halves
    assert {*oracle.PRESETS} == {*kvevict.policies()} - elsewhere | halves
