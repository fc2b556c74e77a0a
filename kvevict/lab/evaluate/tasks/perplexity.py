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
        if not (n := fitting(parts[:-1], settings.length, settings, guess)):
            raise ValueError(f"length: {settings.length} tokens are too few for a sentence; give more")
        yield continuation("perplexity", i, parts[:n], parts[n:], settings)


@TASKS.add("perplexity/documents")
def documents(settings: Settings) -> Iterator[Case]:
    """The first `length` tokens of a document of the haystack's file; the answer is the text after them."""
    texts = haystack(settings).documents
    if texts is None:
        raise ValueError("haystack: perplexity/documents has no text of its own; give a .jsonl with the field 'text'")
    found = 0
    for text in settings.rng("perplexity/documents").sample(texts, len(texts)):
        if found == settings.cases:
            break
        words = text.split(" ")
        n = fitting(words, settings.length, settings)
        if n and (scored := fitting(words[n:], SCORED, settings)):
            yield continuation("perplexity/documents", found, words[:n], words[n : n + scored], settings)
            found += 1
    if found < settings.cases:
        raise ValueError(
            f"cases: {settings.haystack} has {found} documents of more than {settings.length} tokens, not "
            f"{settings.cases}; ask for fewer, or for a smaller length"
        )


def fitting(parts: list[str], tokens: int, settings: Settings, guess: int = 1) -> int:
    """How many of the parts make at most `tokens` tokens."""
    return most(lambda n: n <= len(parts) and settings.tokens(" ".join(parts[:n])) <= tokens, guess)


def continuation(task: str, i: int, parts: list[str], following: list[str], settings: Settings) -> Case:
    id, answer = f"{task}/{settings.length}/{i}", " " + " ".join(following)
    tags = {"length": settings.length}
    return Case(task, id, " ".join(parts), "", (answer,), "perplexity", settings.tokens(answer), tags)
