"""LongEval (LMSYS): `longeval/lines` asks for the number in one of many lines, `longeval/topics` for the first topic of
a long conversation.

`settings.data` is a folder with `lines/<n>_lines.jsonl` and `topics/<n>_topics.jsonl` (one record a line: prompt, and
expected_number or topics). The file with the largest n is taken whose prompts all fit. Without a folder,
`longeval/lines` makes its lines. A topic is right if the answer contains its name; LongEval asks a judge model instead.
"""

import math
from collections.abc import Iterator
from itertools import islice

from ..data import drawn, files, read_jsonl
from ..haystack import most, words
from . import TASKS, Case, Settings, opening

QUESTION = {"lines": "\nNow the record is over", "topics": " Now the record ends"}  # where a prompt starts to ask
METRIC = {"lines": "longeval", "topics": "contains_any"}
NEW_TOKENS = {"lines": 100, "topics": 50}


@TASKS.add("longeval/lines")
def lines(settings: Settings) -> Iterator[Case]:
    """The number of one of many lines."""
    if settings.data is None:
        return (made_up(settings, i) for i in range(settings.cases))
    return recorded("lines", settings)


@TASKS.add("longeval/topics")
def topics(settings: Settings) -> Iterator[Case]:
    """The first topic of a conversation on many."""
    return recorded("topics", settings)


def recorded(kind: str, settings: Settings) -> Iterator[Case]:
    """Cases of a LongEval folder."""
    name, pattern = f"longeval/{kind}", f"*_{kind}.jsonl"
    patterns = f"{kind}/{pattern}", f"{kind}/testcases/{pattern}", pattern
    found = files(settings, name, "longeval/evaluation of the repository DachengLi1/LongChat", *patterns)
    size = {path: int(path.name.split("_")[0]) for path in found}
    for path in sorted(found, key=size.__getitem__, reverse=True):
        records = read_jsonl(path)
        if all(settings.tokens(record["prompt"]) <= settings.length for record in records):
            break
    else:
        raise ValueError(f"length: no prompts of {path.parent} fit in {settings.length} tokens; give more")
    for place, record in drawn(settings, name, records):
        context, mark, rest = record["prompt"].rpartition(QUESTION[kind])
        if not mark:
            raise ValueError(f"data: {path}: a prompt lacks {QUESTION[kind].strip()!r}; give LongEval's own files")
        answer = str(record["expected_number"]) if kind == "lines" else record["topics"][0]
        id, tags = f"{name}/{settings.length}/{place}", {"length": settings.length, kind: size[path]}
        yield Case(name, id, context, mark + rest, (answer,), METRIC[kind], NEW_TOKENS[kind], tags)


def made_up(settings: Settings, i: int) -> Case:
    """Lines in the format of LongEval's, as many as fit. The question starts to repeat one of them."""
    rng = settings.rng("longeval/lines", i)
    side = math.isqrt(settings.length) + 1  # side * side names: more than lines can fit
    known = list(islice(words(rng), 2 * side))
    names = [f"{first}-{second}" for first in known[:side] for second in known[side:]]
    rng.shuffle(names)
    rows = [(f"line {name}: REGISTER_CONTENT is <", str(rng.randint(1, 50_000))) for name in names]
    depth = rng.random()

    def parts(n):
        record = "".join(f"{line}{number}>\n" for line, number in rows[:n])
        line, number = rows[int(depth * n)]
        intro = "Each line of this record holds a number. You will be asked for one line's number.\n\n"
        return intro + record, f"\nThe record is over. Repeat one of its lines.\n{line}", number

    def fits(n):
        context, question, _ = parts(n)
        return settings.tokens(context + question) <= settings.length

    if not (n := most(fits, settings.length // 16)):
        raise ValueError(f"length: {settings.length} tokens are too few for a line and its question; give more")
    context, question, number = parts(n)
    id, tags = f"longeval/lines/{settings.length}/{i}", {"length": settings.length, "lines": n}
    how = settings.room([number]), tags, opening(question, "line "), True
    return Case("longeval/lines", id, context, question, (number,), "longeval", *how)
