"""`perplexity`: how well a model predicts the continuation of a long text. The answer's tokens are scored, none
generated."""

from collections.abc import Iterator

from ..haystack import haystack, most, sentences
from . import TASKS, Case, Settings

SCORED = 256  # tokens


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
