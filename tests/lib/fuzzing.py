"""Random cases, the same in every run unless the seed is another one.

KVEVICT_SEED   of the first random case, and of the draw of cases; default 1
KVEVICT_MOST   cases of each test that are run, drawn; default: all, but of tests marked `drawn`; "all": of those too
KVEVICT_FUZZ   factor on the number of random cases of each test of tests/attack; default 1
"""

import json
import os
import random
import string
from collections import Counter

from kvevict.policy.building import build

FACTOR = float(os.environ.get("KVEVICT_FUZZ", 1))
SEED = int(os.environ.get("KVEVICT_SEED", 1))
MOST = os.environ.get("KVEVICT_MOST", "")
ALL = MOST == "all"
NIGHTLY = os.environ.get("KVEVICT_TESTS") == "all"
HUGE = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31), 2**32 + 3, 2**63 - 1, 2**63, 10**30)
TASK = "properties"  # whose history is reset before every read
ODD = (None, True, False, "", "none", "many", "\u20ac", 0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf"), [], {})


def drawn(items) -> set:
    """The items that are run: of a function's, its mark `drawn(n)` or KVEVICT_MOST says how many; nightly 8 n."""
    groups, run = {}, set()
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in groups.items():
        mark = cases[0].get_closest_marker("drawn")
        most = min(len(cases), mark.args[0] * (8 if NIGHTLY else 1)) if mark and not ALL else len(cases)
        most = most if MOST in ("", "all") else min(most, int(MOST))
        run.update(random.Random(f"{SEED} {name}").sample(cases, min(most, len(cases))))
    return run


def one_in(many, cases, name):
    """Yields one in so many of a test's cases, drawn; with KVEVICT_MOST=all every one."""
    rng = random.Random(f"{SEED} {name}")
    return (case for case in cases if ALL or rng.random() * many < 1)


def count(cases: int) -> int:
    """Number of a test's random cases to run: `cases` in the gate, KVEVICT_FUZZ times as many elsewhere."""
    return max(1, round(cases * FACTOR))


def again(seed=SEED, factor=f"{FACTOR:g}") -> str:
    """The line that runs the current test again."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    return f"KVEVICT_SEED={seed} KVEVICT_FUZZ={factor} python -m pytest -n0 '{test}'"


def fuzz(case, cases: int) -> Counter:
    """Call case(rng) `count(cases)` times, with generators seeded from KVEVICT_SEED on; case returns the name of its
    outcome. Returns the count of each outcome. An error in a case fails the test with the line that runs the case
    again."""
    found = Counter()
    for seed in range(SEED, SEED + count(cases)):
        try:
            found[case(random.Random(seed))] += 1
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}\nagain: {again(seed, 0)}") from error
    print(f"{found.total()} cases from KVEVICT_SEED={SEED} on: {dict(found)}")
    return found


def drawn_by(cases: int, **strategies):
    """Decorates a function that hypothesis calls `count(cases)` times with arguments of strategies, from KVEVICT_SEED
    on. A failing example is shrunk. Use strategies of a few values below 100 only: hypothesis may take others from the
    source of loaded modules, and these depend on the tests that ran before."""
    import hypothesis  # the ops' tests on a GPU do without

    settings = hypothesis.settings(
        max_examples=count(cases), database=None, deadline=None, print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip

    def decorate(test):
        drawn = hypothesis.seed(SEED)(settings(hypothesis.given(**strategies)(test)))

        def run():
            try:
                drawn()
            except BaseException as error:
                error.add_note(f"again: {again()}")
                raise

        return run

    return decorate


def expect(found: Counter, *outcomes) -> None:
    """The gate's cases, or more, show every outcome: a test that misses one looks at nothing."""
    assert FACTOR < 1 or set(outcomes) <= set(found), dict(found)


def other(rng, value):
    """Something else in the place of a JSON value."""
    kind = rng.randrange(6)
    if kind == 0 and isinstance(value, (int, float)) and not isinstance(value, bool):
        return value + rng.choice((-1, 1, 0.5, 1000))
    if kind == 1 and isinstance(value, list) and value:
        return rng.choice((value[1:], value + value[:1], value[::-1], value[0]))
    if kind == 2:
        return rng.choice(HUGE)
    if kind == 3:
        return deep(rng)
    if kind == 4:
        return "".join(rng.choice(string.printable) for _ in range(rng.randrange(12)))
    return _copy(rng.choice(ODD))


def _copy(value):
    """JSON data again, however deep: deepcopy takes two frames a level."""
    return json.loads(json.dumps(value))


def deep(rng):
    """A list in lists, or an object in objects."""
    value, wrap = None, rng.choice((lambda x: [x], lambda x: {"name": x}, lambda x: [x, 1]))
    for _ in range(rng.choice((1, 3, 40, 100))):
        value = wrap(value)
    return value


def changed(rng, value):
    """JSON data with something in it that is other, gone or twice."""
    value = _copy(value)
    holders, level = [], [value]
    while level:
        level = [each for each in level if isinstance(each, (dict, list)) and each]
        holders += level
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    if not holders or rng.random() < 0.05:
        return other(rng, value)
    holder = rng.choice(holders)
    at = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = rng.randrange(8)
    if kind == 0:
        del holder[at]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(("name", "budget", "extra", "\u20ac", "0"))] = holder.pop(at)
    elif kind == 2 and isinstance(holder, list):
        holder.insert(at, _copy(holder[at]))
    elif kind == 3:
        spare = rng.choice(holders)
        holder[at] = _copy(rng.choice(list(spare.values()) if isinstance(spare, dict) else spare))
    else:
        holder[at] = other(rng, holder[at])
    return value


def damaged(rng, data: bytes) -> bytes:
    """Bytes cut, flipped, doubled, filled or mixed up somewhere, most often near the start."""
    at = min(len(data), int(rng.expovariate(4) * len(data)) if rng.random() < 0.5 else rng.randrange(200))
    length = rng.choice((1, 1, 2, 8, 100))
    part = data[at : at + length]
    put = rng.choice((
        b"", part * 2, part[::-1], bytes(len(part)), b"\xff" * len(part), rng.randbytes(len(part)),
        bytes(byte ^ 1 << rng.randrange(8) for byte in part), b"[" * rng.choice((1, 2000, 100_000)),
        b"\r", b"\n", b'"', b"9" * rng.choice((1, 30, 5000)),
    ))  # fmt: skip
    if rng.random() < 0.2:
        return data[:at]
    return data[:at] + put + data[at + len(part) :]


def text(rng, data) -> bytes:
    """JSON data as bytes, with values or letters changed, or unchanged."""
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        data = changed(rng, data)
    made = json.dumps(data).encode()
    return damaged(rng, made) if rng.random() < 0.4 else made


def policy_of(name, options):
    """The policy of the options that its parts have; small windows, where none are named."""
    options, most = dict(options), 60
    for option, least in (
        ("window", 4), ("probe", 4), ("n_d", 2), ("recent", 3), ("tsp_len", 20), ("task", TASK), ("part", 3),
    ):  # fmt: skip
        options.setdefault(option, least)
    for _ in range(most):
        try:
            return build(name, **options)
        except ValueError as error:
            unknown = str(error).split("'")[1] if str(error).startswith("unknown option") else None
            if unknown not in options:
                raise
            del options[unknown]
    raise AssertionError(f"{most} options are unknown")
