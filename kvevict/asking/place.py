"""The place of a question in its prompt, in tokens of a batch row without its padding: how near it is to the prompt's
end, whether it fits a chunk, and whether the text around it fits the budget."""

import math
from collections.abc import Sequence

import numpy as np

from ..cautions import once
from ..engine.hook.arguments import Arguments
from ..engine.read.plan import Plan
from ..policy.policy import Policy
from ..policy.rows import Found, Rows
from ..policy.rows.probe import Probe
from .prompts import Tokenizer

LAST = "last tokens"  # `Found.how` where no question was found
END = 256  # tokens; a question that starts farther from the prompt's end is not near the end


def in_last_part(span: tuple, tokens: int, before: int = 0, whole: bool = False) -> bool:
    """Return whether a question's span starts so near to the end of a prompt of `tokens` tokens, which is read after
    `before` earlier tokens, that the request around the question may reach the prompt's end. whole: a question that
    starts elsewhere counts, too, if no more tokens follow it than it has."""
    start, stop = span
    most = min(END, (before + tokens) // 2)
    return tokens - start <= most or (whole and tokens - stop <= min(most, stop - start))


def warn_if_long(policy: Policy, needed: int, seen: int) -> None:
    """Warn, once per budget, if a request of `needed` tokens takes more than half of the slots that each head keeps of
    a row of `seen` tokens."""
    budget = policy.slots(seen)
    if 2 * needed <= budget or seen <= budget:
        return
    share = math.ceil(200 * needed / seen) / 100
    once(
        ("request", policy.budget),
        f"the prompt's question and the text around it take {needed} tokens, more than half of the {budget} slots that "
        f"each head keeps, so that some of their words are evicted: give budget={2 * needed}"
        + (f", or budget={share}" if share < 1 else ""),
    )


def fitting(spans: tuple, most: int) -> tuple:
    """Return all spans (start, stop) if they have fewer than `most` tokens together, else the last span if it has, else
    ()."""
    sizes = ((each, sum(stop - start for start, stop in each)) for each in (spans, spans[-1:]))
    return next((each for each, size in sizes if size < most), ())


def is_near(arguments: Arguments, start: int, tokens: int, seen: int) -> bool:
    """Return whether a question that starts at token `start` is near enough to the prompt's end to observe where it
    stands, instead of from a copy appended to the last chunk. The prompt has `tokens` tokens and is read after `seen`
    earlier ones. The answer is no if the call's last rows are measured, or if the question starts before the tokens
    that every layer reads (`tsp`)."""
    policy = arguments.policy
    most = min(END, policy.chunk_size or END, END if policy.tsp is None else policy.goes_on)
    return not reads_last_rows(arguments.plan) and tokens - start <= min(most, (seen + tokens) // 4)


def reads_last_rows(plan: Plan) -> bool:
    """Return whether a plan measures the last rows of a call, as diagnose=True and TADA's layer budgets do."""
    return plan.run.diagnose or plan.policy.layers.measures


def ids_of_row(arguments: Arguments, row: int, tokens: int) -> list[int]:
    """Return the ids of the first `tokens` tokens of row `row` of a call, without the row's padding."""
    first = int(arguments.padding[row])
    return arguments.ids[row, first : first + tokens].tolist()


def unfound(
    rows: Rows, tokens: Sequence[int], why: str, tokenizer: Tokenizer | None = None, prompts: Sequence[list[int]] = ()
) -> tuple[Found, ...]:
    """Return what stands for the question of each batch row where none was found: the last tokens of its prompt, which
    has tokens[b] of them. Returns () if the policy's rows look for no question. `why` is the warning's reason; the text
    is known if there are a tokenizer and the prompts' ids."""
    if not (isinstance(rows, Probe) and rows.at_the_end):
        return ()
    last = rows.lengths(np.array(tokens)).tolist()
    texts = [tokenizer.decode(ids[len(ids) - n :]) for ids, n in zip(prompts, last)] if tokenizer else []
    return tuple(Found(texts[b] if texts else None, n, LAST, why) for b, n in enumerate(last))
