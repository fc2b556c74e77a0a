"""Tasks about the continuation of a text.

fidelity     compares a policy's next-token distributions with the full cache's, on a response that the full cache
             writes. This needs no right answers, so any text will do: the haystack's, or in `fidelity/NAME` the prompts
             of the task NAME
perplexity   scores the continuation of a long text by its likelihood, and generates nothing. In mode `known` a policy
             that evicts while decoding evicts while the continuation is read, too, as if it were generated
"""

from collections.abc import Iterator

from ..haystack import haystack, most, sentences
from . import FIDELITY, RESPONSE, TASKS, Case, TaskSettings

SCORED = 256  # approximate number of tokens of a continuation


@TASKS.add(FIDELITY)
def fidelity(settings: TaskSettings) -> Iterator[Case]:
    """Yield passages of at most `length` tokens, which the model is to continue."""
    for i in range(settings.cases):
        text = haystack(settings).passage(settings.rng(FIDELITY, i), settings.length, settings)
        id, tags = f"{FIDELITY}/{settings.length}/{i}", {"length": settings.length, "chat": False}
        yield Case(FIDELITY, id, text, "", (), FIDELITY, RESPONSE, tags)


@TASKS.add("perplexity")
def perplexity(settings: TaskSettings) -> Iterator[Case]:
    """Yield whole sentences of at most `length` tokens; the answer is the text after them, up to a sentence's end."""
    for i in range(settings.cases):
        text = haystack(settings).passage(settings.rng("perplexity", i), settings.length + SCORED, settings)
        parts = sentences(text)
        guess = len(parts) * settings.length // (settings.length + SCORED)

        def fits(n: int, parts: list = parts) -> bool:
            return n < len(parts) and settings.tokens(" ".join(parts[:n])) <= settings.length

        if not (n := most(fits, guess)):
            raise ValueError(f"length: {settings.length} tokens are too few for a sentence; give more")
        id, answer = f"perplexity/{settings.length}/{i}", " " + " ".join(parts[n:])
        tags = {"length": settings.length}
        yield Case("perplexity", id, " ".join(parts[:n]), "", (answer,), "perplexity", settings.tokens(answer), tags)
