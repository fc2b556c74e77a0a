"""Old names of options, which still work in calls, in commands and in JSON: one warning names the new one."""

import warnings

from .checks import one_of
from .registry import Registry

RENAMED = {  # option -> (new option, new value or None: the same)
    "error": "refine",
    "probe_positions": "place",
    "response": "ids",
}


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name will go", FutureWarning, stacklevel=5)


def options(given: dict, probes: bool) -> dict:
    """Options by keyword with old names replaced. probes: whether `alpha` is the probe's (the score has none)."""
    given = dict(given)
    for old, new in RENAMED.items():
        if old in given:
            _warn(f"{old}=", f"{new}=")
            given[new] = given.pop(old)
    if given.get("rows") in ("pooled", "each"):
        _warn("rows= of caote", "weights=")
        given["weights"] = given.pop("rows")
    if probes and "alpha" in given:
        _warn("alpha= of take", "ema_alpha=")
        given["ema_alpha"] = given.pop("alpha")
    if "base" in given:  # vatp had both
        base = given.pop("base")
        one_of("base", base, ("h2o", "snapkv"))
        _warn(f"vatp's base={base!r}", "score='paasvn'" if base == "snapkv" else "score='vatp'")
        given.setdefault("score", "paasvn" if base == "snapkv" else "vatp")
    return given


def fields(data: dict, scores: Registry) -> dict:
    """The fields of a policy in JSON as they are written now: options that were a score's went to rows or policy."""
    data = dict(data)
    if "error" in data:
        _warn("'error' of a policy", "'refine'")
        data["refine"] = data.pop("error")
    refine = data.get("refine")
    if isinstance(refine, dict) and "rows" in refine:
        _warn("'rows' of caote", "'weights'")
        data["refine"] = {("weights" if name == "rows" else name): value for name, value in refine.items()}
    score = data.get("score")
    if not isinstance(score, dict) or "rows" in data or score.get("name") not in list(scores):
        return data
    score = dict(score)
    if score["name"] == "vatp" and score.pop("base", "h2o") == "snapkv":
        score["name"] = "paasvn"
        score.pop("recent", None)
    elif score["name"] == "vatp":
        score.pop("window", None)
    if score["name"] in ("laq", "speckv") and score.get("reduce") == "max":
        score.setdefault("group", "max")
    for name in ("rerotate", "tsp", "tsp_len"):
        if name in score:
            data[name] = score.pop(name)
    kind = scores[score["name"]]
    renamed = RENAMED | ({} if hasattr(kind, "alpha") else {"alpha": "ema_alpha"})
    own, rows = kind.__dataclass_fields__, {}
    for name in [name for name in score if name != "name" and name not in own]:
        if renamed.get(name, name) in kind.rows.__dataclass_fields__:
            rows[renamed.get(name, name)] = score.pop(name)
    if rows:
        _warn(f"{', '.join(rows)} of score {score['name']!r}", "an option of 'rows'")
        data["rows"] = {"name": _name(kind.rows), **rows}
    return data | {"score": score}


def _name(rows) -> str:
    from .rows import ROWS

    return ROWS.name_of(type(rows))
