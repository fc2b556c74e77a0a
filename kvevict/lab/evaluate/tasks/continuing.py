"""Tasks about how a text goes on.

fidelity     how near a policy's next-token distributions stay to the full cache's, on a response that the full
             cache writes. No right answers are needed, so any text will do: the haystack's here, in
             `fidelity/NAME` the prompts of NAME
perplexity   how well a model predicts the continuation of a long text. The answer's tokens are scored, none
             generated
"""

from collections.abc import Iterator

from ..haystack import haystack, most, sentences
from . import FIDELITY, RESPONSE, TASKS, Case, Settings

SCORED = 256  # tokens


@TASKS.add(FIDELITY)
def fidelity(settings: Settings) -> Iterator[Case]:
    """Passages of at most `length` tokens, which the model continues."""
    for i in range(settings.cases):
        text = haystack(settings).passage(settings.rng(FIDELITY, i), settings.length, settings)
        id, tags = f"{FIDELITY}/{settings.length}/{i}", {"length": settings.length, "chat": False}
        yield Case(FIDELITY, id, text, "", (), FIDELITY, RESPONSE, tags)


@TASKS.add("perplexity")
def perplexity(settings: Settings) -> Iterator[Case]:
    """Complete sentences of at most `length` tokens; the answer is the text after them, to the end of a sentence."""
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
