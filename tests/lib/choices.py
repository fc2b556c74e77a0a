"""Choices of a policy, for tests that take every row of a table: "preset, remark": options."""

import tiny
from policy_cases import BUDGET, CHUNK, POLICIES, VOCAB

import kvevict
from kvevict.policy.building import build

CHUNKED = dict(budget=BUDGET, chunk_size=CHUNK)
DRAFT = tiny.model("llama", vocab_size=VOCAB, seed=3, num_hidden_layers=2, hidden_size=32, head_dim=16)
SMALL = dict(n_d=4, window=3, kernel=5)
KVPRESS = dict(kernel=5, pool="avg", reduce="mean")
CAKE_SCORE = dict(score="cake", window=5, kernel=5, pool="avg")
BUDGETS = {
    "adakv": dict(window=4), "adakv, all by competition": dict(window=4, f=0.0),
    "adakv, no competition": dict(window=4, f=1.0), "adakv, floor": dict(window=4, floor="max", f=0.3),
    "adakv, mean": dict(window=5, pool="avg"), "adakv, floor of all": dict(window=6, **KVPRESS, floor="all"),
    "adakv, high floor of all": dict(window=2, **KVPRESS, floor="all", f=0.7),
    "snapkv, flat": dict(window=4, heads="flat"), "h2o, flat": dict(heads="flat", decode=True, interval=2),
    "h2o, ada": dict(heads="ada", recent=3, decode=True, interval=2), "keydiff, flat": dict(heads="flat"),
    "tova, flat": dict(per_head=True, heads="flat", interval=3), "take, flat": dict(probe=5, heads="flat"),
    "take, ada": dict(probe=5, heads="ada"), "pyramidkv": dict(window=4),
    "take, pyramid": dict(probe=3, layers="pyramid"), "h2o, pyramid": dict(layers="pyramid", decode=True, interval=3),
    "tova, pyramid": dict(layers="pyramid"), "knorm, pyramid, ada": dict(layers="pyramid", heads="ada"),
    "snapkv, pyramid, flat": dict(window=4, layers="pyramid", heads="flat"), "chunkkv": dict(window=4, c=5),
    "chunkkv, long runs": dict(window=2, c=11), "chunkkv, per head": dict(window=4, c=3, per_head=True),
    "chunkkv, per head, flat": dict(window=4, c=4, per_head=True, heads="flat"),
    "chunkkv, per head, ada": dict(window=4, c=4, per_head=True, heads="ada"),
    "chunkkv, whole runs": dict(window=4, c=5, exact=False),
    "chunkkv, whole runs per head": dict(window=4, c=5, exact=False, per_head=True, heads="flat"),
    "chunkkv, pooled": dict(window=4, c=4, pool="avg", kernel=3),
    "chunkkv, pyramid": dict(window=4, c=4, layers="pyramid"),
    "h2o, chunk": dict(select="chunk", c=4, decode=True, interval=2), "take, chunk": dict(probe=4, select="chunk", c=6),
    "chunkkv, reuse": dict(window=4, c=4, n_reuse=2),
    "edie, runs per head": dict(window=4, pool="none", select="chunk", c=4, per_head=True),
    "chunkkv, whole runs, pooled": dict(window=6, c=5, exact=False, **KVPRESS), "take+chunkkv": dict(probe=4, c=5),
    "snapkv, runs of one": dict(window=8, c=1, select="chunk", per_head=True),
    "snapkv, reuse of three": dict(window=4, n_reuse=3), "h2o, reuse": dict(n_reuse=2, decode=True, interval=2),
    "adakv, reuse, pyramid": dict(window=4, n_reuse=2, layers="pyramid"),
    "snapkv, by layer": dict(window=4, select_by_layer=((0, 2, kvevict.SELECTIONS["chunk"]()),)),
}  # fmt: skip
CAKE = {
    "cake": dict(window=5), "cake, flat": dict(window=4, heads="flat"), "cake, ada": dict(window=3, heads="ada"),
    "cake, mostly average": dict(window=3, heads="ada", f=0.8),
    "cake, floor": dict(window=4, heads="ada", floor="max", f=0.4), "cake, runs": dict(window=4, select="chunk", c=3),
    "cake, runs per head": dict(window=3, select="chunk", c=3, per_head=True, heads="flat"),
    "cake, whole runs": dict(window=4, select="chunk", c=4, exact=False),
    "cake, whole runs per head": dict(window=3, select="chunk", c=4, exact=False, per_head=True),
    "cake, whole runs of ragged heads": dict(window=3, select="chunk", c=4, exact=False, per_head=True, heads="ada"),
    "cake, caote": dict(window=3, refine="caote"), "snapkv": dict(window=5, layers="cake"),
    "paasvn": dict(window=4, keep_first=2, layers="cake", heads="equal", pool="none"),
    "paasvn, pooled": dict(window=4, layers="cake"), "edie": dict(window=4, layers="cake"),
    "edie-exact": dict(window=4, layers="cake", heads="equal"),
}  # fmt: skip
ERRORS = {
    "edie": dict(window=4), "edie, c_j is 1": dict(window=4, weight="none", alpha=0.05),
    "edie, all slots": dict(window=3, weight="all", alpha=0.2),
    "edie, not near the window": dict(window=4, weight="i<=t-2w", kernel=3),
    "edie, not the first": dict(window=4, weight="i>w", pool="avg"), "edie, long window": dict(window=12, pool="none"),
    "edie, long window, not the first": dict(window=12, weight="i>w", kernel=3), "edie-exact": dict(window=4),
    "edie-exact, all slots": dict(window=4, weight="all", kernel=3),
    "edie-exact, c_j is 1": dict(window=6, weight="none", heads="equal"), "edie, caote": dict(window=4, refine="caote"),
    "edie, chunk": dict(window=4, select="chunk", c=4, per_head=True, pool="none"),
    "edie, pyramid, reuse": dict(window=4, layers="pyramid", n_reuse=2), "vatp, flat": dict(sink=2, heads="flat"),
    "paasvn, equal": dict(keep_first=2, window=4, heads="equal", pool="none"),
    "vatp, pyramid": dict(sink=2, layers="pyramid"), "vatp, fastcaote": dict(sink=2, refine="fastcaote"),
    "paasvn": dict(window=4), "paasvn, ada": dict(window=4, heads="ada", pool="none"),
    "snapkv, cake": CAKE_SCORE | dict(heads="ada"), "snapkv, cake of one row": CAKE_SCORE | dict(window=1),
    "snapkv, cake, caote": CAKE_SCORE | dict(refine="caote"),
    "snapkv, caote": dict(window=4, refine="caote", heads="flat"),
    "snapkv, caote, avg": dict(window=4, refine="caote", pool="avg", kernel=5, reduce="mean"),
    "snapkv, fastcaote": dict(window=12, refine="fastcaote"),
    "snapkv, caote, chunk": dict(window=4, refine="caote", select="chunk", c=4),
    "snapkv, caote, reuse": dict(window=4, refine="caote", n_reuse=2), "h2o+caote, flat": dict(heads="flat"),
    "h2o+caote": {}, "tova+caote, ada": dict(heads="ada"), "tova+fastcaote": {},
    "take, fastcaote": dict(probe=5, warmup_layers=None, refine="fastcaote", heads="flat"), "take+caote": dict(probe=4),
    "oracle, caote": dict(ids=(7, 11, 13), refine="caote"),
    "oracle, fastcaote": dict(ids=(7, 11), refine="fastcaote", pool="avg", heads="flat"),
}  # fmt: skip
REPEATED = {
    "kvzip": {},
    "kvzip, anew": dict(carry="none"),
    "kvzip, largest": dict(carry="max"),
    "kvzip, least": dict(least=9),
    "kvzip, no least": dict(least=0, sink=0),
    "kvzip, per layer": dict(layers="uniform"),
    "kvzip, per head": dict(layers="uniform", heads="equal"),
    "kvzip, pyramid": dict(layers="pyramid"),
    "kvzip, reuse": dict(layers="uniform", n_reuse=2),
    "kvzip, wait": dict(layers="uniform", warmup_layers=3, warmup_budget=22),
    "read-twice": {},
    "kvzip+": {},
    "kvzip+, per head": dict(layers="uniform", heads="equal", carry="max"),
}
EXPECTED = {
    "expected": {}, "expected, no sink": dict(sink=0, heads="equal"), "expected, flat": dict(heads="flat", sink=6),
    "expected, pool": dict(heads="flat", layers="pool"), "expected, wait": dict(warmup_layers=3, warmup_budget=22),
}  # fmt: skip
VALUES_AND_KEYS = {
    "lagkv": dict(sink=2), "lagkv, ada": dict(sink=1, heads="ada"), "lagkv, no sink": dict(sink=0, heads="flat"),
    "lagkv, runs": dict(sink=2, select="chunk", c=2), "lagkv, wait": dict(sink=2, warmup_layers=3, warmup_budget=22),
    "compactor": dict(sink=3, recent=2), "read-once": dict(sink=2, recent=2),
    "compactor, no ends": dict(sink=0, recent=0, heads="flat"),
    "defensive": dict(window=4), "defensive, covered": dict(window=3, kernel=3, keep_first=2, heads="flat"),
    "defensive, nothing first": dict(window=4, heads="equal"),
    "defensive, pool": dict(window=4, heads="flat", layers="pool", least=2),
    "defensive, all rows": dict(rows="all", heads="flat", kernel=1),
    "snapkv, critical": dict(window=4, refine="critical"),
    "adakv, critical": dict(window=4, refine="critical", pool="avg", kernel=3),
    "h2o, critical": dict(refine="critical", recent=3), "kvzip, critical": dict(refine="critical"),
    "cake, critical": dict(refine="critical", window=4),
}  # fmt: skip
GATES = {
    "gate": {}, "gate, few kept": dict(sink=0, recent=0, least=0), "gate, per layer": dict(layers="uniform"),
    "gate, per head": dict(layers="uniform", heads="equal"), "gate, pyramid": dict(layers="pyramid", heads="ada"),
    "gate, reuse": dict(layers="uniform", n_reuse=2),
    "gate, wait": dict(layers="uniform", warmup_layers=3, warmup_budget=22),
    "gate, caote": dict(layers="uniform", refine="caote"),
}  # fmt: skip
DRAFTS = {
    "laq": SMALL, "laq, no prompt rows": dict(n_d=5, window=0, pool="avg"),
    "laq, drafted keys": SMALL | dict(draft_keys=True),
    "laq, drafted keys, no prompt rows": dict(n_d=6, window=0, draft_keys=True),
    "laq, paper": dict(n_d=6, window=4, draft_keys=True), "speckv": SMALL | dict(draft_model=DRAFT),
    "speckv, one row": dict(n_d=1, window=1, draft_model=DRAFT),
    "speckv, drafted keys": dict(n_d=6, window=0, draft_keys=True, draft_model=DRAFT),
    "laq, by another": dict(n_d=6, window=4, draft_keys=True, draft_model=DRAFT),
}  # fmt: skip
ANSWERS = {
    "streaming": {}, "h2o": {}, "tova": {}, "snapkv": dict(window=4), "adakv": dict(window=4), "edie": dict(window=4),
    "defensive": dict(window=4), "vatp": dict(sink=2, recent=2), "chunkkv": dict(window=4, c=3),
    "adakv, critical": dict(window=4, refine="critical"), "h2o+caote": {}, "take": dict(probe=5), "expected": {},
    "pyramidkv": dict(window=4), "tri": dict(sink=2), "rkv": dict(window=4),
}  # fmt: skip
PRINTED = {  # what papers print and presets do otherwise
    "take, not rotated": dict(probe=5, ema="before", warmup_layers=None),
    "take, not rotated, waits": dict(probe=4, ema="before", ema_alpha=0.4),
    "take, query heads": dict(probe=5, per_query=True, warmup_layers=None),
    "take, query heads, flat": dict(probe=4, per_query=True, heads="flat", kernel=3),
    "chunkkv, products": dict(score="products", window=4, c=4),
    "chunkkv, runs over the window": dict(window=4, c=4, over_kept=True),
    "chunkkv, printed": dict(score="products", window=4, c=3, over_kept=True, per_head=True),
    "chunkkv, runs over the window, ragged": dict(window=6, c=4, over_kept=True, per_head=True, heads="flat"),
    "chunkkv, hybrid": dict(window=4, c=4, select_by_layer=((2, None, kvevict.SELECTIONS["pooled"]()),)),
    "snapkv+caote, squared": dict(window=4, squared=True), "h2o+fastcaote, squared": dict(squared=True, recent=0),
    "snapkv+caote, nothing kept": dict(window=4, keep_window=False),
    "edie, nothing kept": dict(window=4, keep_window=False),
}  # fmt: skip
TABLES = dict(presets=POLICIES, budgets=BUDGETS, cake=CAKE, errors=ERRORS, repeated=REPEATED, expected=EXPECTED)
TABLES |= dict(values=VALUES_AND_KEYS, printed=PRINTED)


def options(table, name, **more):
    """(preset, options) of a row; `more` wins."""
    return name.split(",")[0], table[name] | more


def decodes(table, name):
    """Whether a row's policy evicts while decoding, with rows that any decoded row can stand in for."""
    try:
        policy, chosen = options(table, name, budget=300, decode=True)
        build(policy, **chosen)
    except ValueError:
        return False
    return not name.startswith(("take, ", "take+chunkkv", "oracle"))
