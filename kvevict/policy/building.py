"""Makes a `Policy`, and the `Run` that goes with it, from a preset or another policy and from options by keyword."""

import dataclasses
from typing import Any, NamedTuple

from . import peers, rules
from .parts import PARTS, as_part, check_option, option_names
from .policy import Policy
from .presets import PRESETS
from .run import OPTIONS, Run, apart
from .text import CALIBRATED, parse_policy
from .tokenizer import told

BOUNDS = ("budget", "chunk_size")  # options of `patch`; None leaves the value that a policy's text gives


class Chosen(NamedTuple):
    """A policy, and the `Run` that says how a machine runs it."""

    policy: Policy
    run: Run = Run()

    def with_tokenizer(self, tokenizer: Any) -> "Chosen":
        """Return a copy in which the policy's options that depend on a tokenizer have values (`tokenizer.told`)."""
        return self._replace(policy=told(self.policy, tokenizer))


def choose(policy: Any, **options: Any) -> Chosen:
    """Make a policy and its run. policy: a `Chosen`, or what `build` takes; options: those of `build` and of `Run`."""
    run = Run()
    if isinstance(policy, Chosen):
        policy, run = policy
    policy, options = _named(policy, options)
    options, changes = apart(options)
    chosen = Chosen(build(policy, **options), dataclasses.replace(run, **changes))
    rules.check(*chosen)
    return chosen


def _named(policy: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Parse a policy that is a text NAME:OPTION=VALUE,.. or the path of a calibrated policy's file: return its name and
    its options, overridden by `options`. Any other policy is returned as it is, with `options`."""
    if not (isinstance(policy, str) and (":" in policy or policy.endswith(CALIBRATED))):
        return policy, options
    name, own = parse_policy(policy)
    return name, own | {name: value for name, value in options.items() if value is not None or name not in BOUNDS}


def build(policy: Any, **options: Any) -> Policy:
    """Make a `Policy` from a preset's name, a text NAME:OPTION=VALUE,.. or another policy, with options by keyword.

    Options are the fields of `Policy` and of its parts (rows, score, refine, layers, heads, select). An unknown option
    raises ValueError, which lists the nearest names. A `chunk_size` without a `schedule` means schedule="chunk", unless
    the rows need the whole prompt.
    """
    policy, options = _named(policy, options)
    budget, chunk_size = (options.pop(name, None) for name in BOUNDS)
    peers.check(options)
    if isinstance(policy, str):
        for kind, (registry, _) in PARTS.items() if policy not in PRESETS else ():
            if policy in registry:
                raise ValueError(
                    f"unknown policy {policy!r}: it is a name for {kind}=; write 'snapkv:{kind}={policy}', or 'snapkv' "
                    f"and {kind}={policy!r}"
                )
        choices = dict(PRESETS.find(policy))
    elif isinstance(policy, Policy):
        if budget is None and chunk_size is None and not options:
            return policy  # not a copy, so that a cache recognises the policy that read its prompt
        choices = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
        if "score" in options:  # values that are the old score's defaults become the new score's
            old = policy.score
            own_choices = dict(decode=old.decodes, interval=old.own_interval, rows=old.rows, carry=old.carry)
            choices |= {name: None for name, own in own_choices.items() if choices[name] == own}
    else:
        hint = f"; write budget={policy}" if isinstance(policy, (int, float)) else ""
        raise TypeError(f"policy must be a preset's name or a kvevict.Policy, got {type(policy).__name__}{hint}")
    if options.get("decode") is False:  # these two options are about evicting while decoding
        choices["interval"], choices["keep_prompt"] = None, False
    if budget is not None:
        choices["budget"] = budget
    if chunk_size is not None:
        choices["chunk_size"] = chunk_size
        choices["schedule"] = None
    defaults = {f.name: f.default for f in dataclasses.fields(Policy)}
    parts = {kind: options.pop(kind, choices.get(kind, defaults[kind])) for kind in PARTS}
    parts["score"] = as_part("score", parts["score"])
    parts = {kind: as_part(kind, parts["score"].rows if part is None else part) for kind, part in parts.items()}
    own = {kind: option_names(part) for kind, part in parts.items()}
    general = {*defaults, *OPTIONS} - {*PARTS, *BOUNDS}
    known = general.union(*own.values(), PARTS, BOUNDS)
    for option in options:
        check_option(option, known, parts=parts)
    for kind, part in parts.items():
        mine = {name: options[name] for name in own[kind] & options.keys()}
        choices[kind] = dataclasses.replace(part, **mine) if mine else part
    return Policy(**(choices | {name: value for name, value in options.items() if name in general}))
