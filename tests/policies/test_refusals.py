"""Choices that are refused, and the reason that the error gives."""

import pytest

import kvevict
from kvevict.policy.building import choose

POSITIONAL = ("streaming", "knorm", "keydiff", "random", "lagkv", "expected", "gate", "tri")
REFUSED = [  # (text, reason); a budget of 64 where it names none
    # values
    ("snapkv:n_reuse=0", "n_reuse must be at least 1"), ("snapkv:progress=1", "progress must be True or False"),
    ("snapkv:recall=2", "recall must be True, False, 'memory' or a"), ("snapkv:compiled=1", "compiled must be True or"),
    ("snapkv:heads=7", "heads must be a name or a kvevict HeadBudget"), ("adakv:f=1.5", "f must be"),
    ("adakv:floor=min", "unknown floor 'min'"), ("pyramidkv:beta=10", "it is 20, as in the source"),
    ("chunkkv:c=0", "c must be at least 1"), ("chunkkv:exact=1", "exact must be"),
    ("snapkv:layers=tada,cd=mlp", "unknown cd 'mlp'"), ("snapkv:layers=tada,task=", "task must be"),
    ("edie+tada:own=1", "own must be True or False"), ("snapkv:refine=coate", "did you mean 'caote'"),
    ("snapkv:refine=7", "refine must be a name or a kvevict Refinement"), ("edie:weight=end", "unknown weight 'end'"),
    ("edie:alpha=-0.1", "alpha must be a finite number >= 0"), ("edie:alpha=NaN", "alpha must be a finite number >= 0"),
    ("edie:alpha=Infinity", "alpha must be a finite number >= 0"), ("edie:reduce=mean", "unknown option 'reduce'"),
    ("edie-exact:alpha=0.1", "unknown option 'alpha'"), ("vatp:sink=-1", "sink must be at least 0"),
    ("vatp:recent=2.5", "recent must be"), ("kvzip:part=0", "part must be at least 1"),
    ("kvzip:least=-1", "least must be at least 0"), ("kvzip:instruction=[5]", "nothing stands between"),
    ("compactor:blend=1", "it is 0.35"),
    ("compactor:recent=-1", "recent must be at least 0"), ("defensive:kernel=4", "kernel must be odd"),
    ("expected:eps=0", "it is 0.01"), ("expected:sink=-1", "sink must be at least 0"),
    ("expected:stats=3", "stats must be the file"), ("gate:recent=-1", "recent must be at least 0"),
    ("gate:gates=3", "gates must be the folder"), ("fastkv:tsp_len=8", "tsp_len must be at least 9"),
    ("fastkv:tsp=-1", "tsp must be at least 0"), ("fastkv:tsp=all", "tsp must be a whole number"),
    ("fastkv:tsp_len=20.0", r"tsp_len=20.0 is not a share in \(0, 1\)"), ("fastkv:kernel=4", "kernel must be odd"),
    ("fastkv:tsp_len=half", "tsp_len must be a whole number"),
    # budgets
    ("knorm:select=chunk,c=70,chunk_size=16", "budget >= 70"), ("snapkv:keep_first=40", "budget >= 73"),
    ("snapkv:keep_first=few", "keep_first must be a whole number"),
    ("edie:budget=32", "budget >= 33"), ("vatp:budget=40", "budget >= 41"), ("lagkv:budget=259", "budget >= 260"),
    ("vatp:recent=5,budget=25", "budget >= 26"), ("paasvn:window=8,keep_first=4,budget=12", "budget >= 13"),
    ("gate:budget=68", "budget >= 69"), ("fastkv:budget=8", "budget >= 9"),
    # rows
    ("take:rows=prob", "unknown rows 'prob'; did you mean 'probe'"), ("take:rows=3", "rows must be a name or a"),
    ("edie:rows=probe,chunk_size=32", "greater than the probe's 32 tokens"), ("snapkv:reduce=median", "unknown reduce"),
    ("snapkv:rows=given,ids=[3,-1]", "ids must be a tuple of token ids"), ("laq:tsp=1", "comes after all layers"),
    *((f"snapkv:score={name},rows=none", "has no queries") for name in kvevict.SCORES if name not in POSITIONAL),
    *((f"snapkv:score={name},rows=drafted", "sums over every chunk") for name in ("h2o", "vatp")),
    ("edie:rows=drafted,chunk_size=80,schedule=chunk", "needs the whole prompt"),
    ("kvzip:rows=window", "rows='repeat'"), ("kvzip:tsp=1", "tsp=None"),
    ("kvzip:decode=true", "decode=False"), ("compactor:rows=window", "rows='all'"),
    ("compactor:decode=true", "decode=False"), ("expected:rows=drafted", "rows='none'"),
    ("chunkkv:score=products,rows=last", "rows='window'"), ("chunkkv:over_kept=1", "over_kept must be True or False"),
    ("take:ema=after", "unknown ema"), ("take:per_query=true,layers=tada,warmup_layers=none", "only rank"),
    ("snapkv+caote:squared=2", "squared must be"), ("snapkv:keep_window=0", "keep_window must be True or False"),
    ("lookahead:window=-1", "window must be at least 0"),
    ("gate:rows=drafted,budget=80", "a draft comes once"), ("gate:rows=repeat,budget=80", "rows='none'"),
    # layers
    ("snapkv:layers=tada,n_reuse=2", "measures every layer"),
    ("take:layers=tada,warmup_layers=3", "measures every layer"), ("knorm:layers=tada", "only rank"),
    ("knorm:layers=tada", "score='knorm', refine='none', layers='tada'"),
    ("take:n_reuse=2", "another layer's slots"), ("fastkv:n_reuse=2", "n_reuse=1 or tsp=None"),
    ("cake:n_reuse=2", "n_reuse=1"), ("cake:warmup_layers=2,chunk_size=40", "warmup_layers=None"),
    *((f"{name}:layers=cake", "do not show")
      for name in ("vatp", "h2o", "tova", "streaming", "knorm", "random", "expected")),
    ("gate:layers=cake,budget=80", "do not show"), ("cake:window=1", "2 rows or more"),
    ("snapkv:rows=last,layers=cake", "2 rows or more"), ("oracle:layers=cake,ids=[3]", "2 rows or more"),
    ("take:warmup_layers=none,layers=cake,probe=1", "2 rows or more"),
    ("kvzip:schedule=prompt,carry=\"none\",layers=cake", "repeated in parts"),
    ("kvzip:layers=tada", "another layer budget"),
    ("kvzip:n_reuse=2", "n_reuse=1"), ("kvzip:warmup_layers=2", "warmup_layers=None"),
    ("kvzip:score=snapkv,rows=repeat", "scores that compare"),
    ("lagkv:layers=pool,heads=flat,budget=300", "scores that compare"), ("lagkv:tsp=1,budget=300", "tsp=None"),
    ("gate:decode=true,budget=80", "layers='uniform'"),
    # heads, refinements, selections and carried scores
    ("tova:heads=flat", "per_head=True"), ("chunkkv:heads=ada", "per_head=True"), ("kvzip:heads=equal", "heads='flat'"),
    *((f"{name}:refine={refine},budget=300", "only rank slots") for refine in ("caote", "fastcaote", "critical")
      for name in ("streaming", "knorm", "keydiff", "random", "lagkv", "compactor", "defensive")),
    *((f"tova:refine={refine}", "per_head=True") for refine in ("caote", "critical")),
    ("tova+caote:per_head=false", "per_head=True"), ("kvzip:refine=caote", "refine='none'"),
    ("snapkv:refine=critical,select=chunk", "select='token'"), ("kvzip:select=chunk,per_head=true", "select='token'"),
    *((f"{name}:carry=\"none\",budget=300", "carry='keep'") for name in ("lagkv", "compactor", "gate")),
    *((f"{name}:carry=max,budget=300", "carry='none'|carry='keep'") for name in ("lagkv", "gate")),
    ("defensive:carry=sum", "only rank the slots"),
    # a threshold
    *((f"kvzip:threshold={value}", "threshold must be a finite number")
      for value in ("high", "NaN", "Infinity", "true")),
    ("kvzip:threshold=0.1,keep_last=-1", "keep_last must be at least 0"),
    ("kvzip:threshold=0.1,budget=100", "always keeps 132 slots .* keep_last"),
    *((f"{name}:threshold=0.1,heads=flat", "these scores have another scale in each")
      for name in ("snapkv", "knorm", "defensive")),
    ("expected:threshold=0.1,heads=equal", "heads='flat' or 'ada'"),
    ("expected:threshold=0.1,select=chunk,per_head=true", "select='token'"),
    *((f"expected:threshold=0.1,refine={refine}", "refine='none'") for refine in ("caote", "critical")),
    *((f"expected:threshold=0.1,{more}", "n_reuse=1 and warmup_layers=None")
      for more in ("n_reuse=2", "warmup_layers=2")),
    ("expected:threshold=0.1,layers=tada", "layers='uniform' or 'pool'"),
    ("kvzip:threshold=0.1,layers=cake,carry=\"none\",chunk_size=12", "layers='uniform' or 'pool'"),
    ("expected:threshold=0.1,decode=true", "decode=False"),
]  # fmt: skip


@pytest.mark.parametrize("text, reason", REFUSED)
def test_refused(text, reason):
    with pytest.raises((ValueError, TypeError), match=reason):
        choose(text, **{} if "budget" in text or "threshold" in text else dict(budget=64))


@pytest.mark.parametrize("ranges, reason", [
    (((0, "token"),), "select_by_layer must hold"), (((2, 1, "token"),), "stop must be at least 3"),
    (((0, None, "tokn"),), "did you mean 'token'"), (((2, 5, "token"), (0, 3, "chunk")), "layer 2 in two ranges"),
    (((0, None, "token"), (3, 4, "chunk")), "layer 3 in two ranges"),
])  # fmt: skip
def test_ranges_of_layers_that_are_refused(ranges, reason):
    with pytest.raises(ValueError, match=reason):
        choose("snapkv", budget=64, select_by_layer=ranges)
