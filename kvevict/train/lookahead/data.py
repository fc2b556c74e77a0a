"""Reads and checks pairs of prompt and response to train on (METHODS section 6). The model generates missing
responses."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...asking.prompts import Tokenizer, rendered
from ...models.families import device_of, unwrapped
from ...policy.checks import parsed
from ...store.files import decoded


class Pair(NamedTuple):
    name: str  # the pair's place in the data, for error messages
    prompt: tuple  # token ids
    response: tuple | None  # token ids; None: the model generates the response


class Limits(NamedTuple):
    prompt: int  # largest number of tokens in a prompt
    response: int  # largest number of tokens in a response
    context: int  # largest number of tokens in a prompt and its response together: the model's context


def pairs(
    data: str | Path | Iterable[dict[str, Any]], tokenizer: Tokenizer | None, limits: Limits, written: bool = False
) -> list[Pair]:
    """Read `Pair`s from a JSONL file or an iterable of dicts. A dict has a `prompt` and, optionally, a `response` (text
    or token ids), or it has chat `messages`; if the last message is the assistant's, it is the response. written: True
    leaves all responses out, for the model to write. Raises ValueError, with the pair's place, for a pair that is too
    long or has another form."""
    found = [_pair(name, entry, tokenizer, limits, written) for name, entry in _entries(data)]
    if not found:
        raise ValueError("data has no pair of prompt and response: give at least one")
    return found


def _entries(data: str | Path | Iterable[dict]) -> Iterator[tuple[str, dict]]:
    if not isinstance(data, (str, Path)):
        yield from ((f"pair {i}", entry) for i, entry in enumerate(data, 1))
        return
    for number, line in enumerate(decoded(Path(data).read_bytes(), data).split("\n"), 1):
        if line.strip():
            try:
                yield f"{data} line {number}", parsed(line)
            except ValueError as error:
                raise ValueError(f"{data} line {number} is not JSON: {error}; repair or drop the line") from None


def _pair(name: str, entry: dict, tokenizer: Tokenizer | None, limits: Limits, written: bool) -> Pair:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} must be an object with a prompt or messages, got {type(entry).__name__}")
    if "messages" in entry:
        prompt, response = _chat(name, entry["messages"], tokenizer)
    else:
        prompt, response = entry.get("prompt"), entry.get("response")
    prompt = _ids(name, "prompt", prompt, tokenizer)
    response = None if response is None or written else _ids(name, "response", response, tokenizer)
    following = limits.response if response is None else len(response)
    if len(prompt) > limits.prompt:
        raise ValueError(f"{name}: its prompt has {len(prompt)} tokens, max_prompt is {limits.prompt}; cut or drop it")
    if following > limits.response:
        raise ValueError(
            f"{name}: its response has {following} tokens, max_response is {limits.response}; cut or drop it"
        )
    if len(prompt) + following > limits.context:
        raise ValueError(
            f"{name}: a prompt of {len(prompt)} tokens and {following} after it exceed the model's context of "
            f"{limits.context}; cut or drop it"
        )
    return Pair(name, prompt, response)


def _chat(name: str, messages: list, tokenizer: Tokenizer | None) -> tuple[Any, Any]:
    """Return (token ids of the prompt in the chat template, text of the response or None)."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{name} has messages, which need a tokenizer with a chat template; give prompt and response")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    ):
        raise ValueError(f"{name}: messages must be a list of objects with role and content, got {messages!r:.60}")
    messages, response = list(messages), None
    if messages and messages[-1]["role"] == "assistant":
        response = messages.pop()["content"]
    if not messages:
        raise ValueError(f"{name} has no prompt: give a message before the response, or drop the pair")
    try:
        text = rendered(tokenizer, messages, "its messages")
    except ValueError as error:
        raise ValueError(
            f"{name}: {error}; leave out the turn that it does not take, or give prompt and response"
        ) from None
    return tokenizer(text, add_special_tokens=False)["input_ids"], response


def _ids(name: str, what: str, value: list, tokenizer: Tokenizer | None) -> tuple:
    if isinstance(value, str):
        if tokenizer is None:
            raise ValueError(f"{name}: its {what} is text; give a tokenizer, or token ids")
        value = tokenizer(value, add_special_tokens=what == "prompt", verbose=False)["input_ids"]
    if value is not None and not hasattr(value, "__len__"):
        raise ValueError(f"{name}: its {what} must be text or a list of token ids, got {value!r:.60}")
    if value is None or not len(value):
        raise ValueError(f"{name} has {'no' if value is None else 'an empty'} {what}; give it, or drop the pair")
    if not all(isinstance(i, int) and i >= 0 for i in value):
        raise ValueError(f"{name}: its {what} must be text or a list of token ids, got {value!r:.60}")
    return tuple(value)


class StoredResponses:
    """The model's responses to prompts, stored in JSONL files of a folder. Each process writes one of the files and
    reads all of them when it starts.

    most          largest number of tokens in a response
    temperature   sampling temperature; None: responses are greedy. Each prompt's draws have a seed of their own
    """

    def __init__(
        self, model: torch.nn.Module, folder: str | Path, most: int, rank: int = 0, temperature: float | None = None
    ) -> None:
        self.model, self.most, self.temperature, self.known = unwrapped(model), most, temperature, {}
        self.path = Path(folder) / f"responses.{rank}.jsonl"
        for path in sorted(Path(folder).glob("responses.*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # an interrupted process wrote half a line
                if entry["most"] == most and entry.get("temperature") == temperature:
                    self.known[entry["prompt"]] = tuple(entry["response"])

    @torch.no_grad()
    def of(self, pair: Pair) -> tuple:
        """Return the ids of the pair's own response or, if it has none, of the model's: at most `most` tokens, the end
        token included."""
        if pair.response is not None:
            return pair.response
        key = hashlib.sha256(repr(pair.prompt).encode()).hexdigest()[:24]
        if key not in self.known:
            ids, how = torch.tensor([pair.prompt], device=device_of(self.model)), dict[str, object](do_sample=False)
            if self.temperature is not None:
                how = dict(do_sample=True, temperature=self.temperature, top_k=0, top_p=1.0)
            with torch.random.fork_rng():
                torch.manual_seed(int(key[:8], 16))
                mask = torch.ones_like(ids)
                out = self.model.generate(ids, attention_mask=mask, max_new_tokens=self.most, **how)
            self.known[key] = tuple(out[0, ids.shape[1] :].tolist())
            line = dict(prompt=key, most=self.most, response=self.known[key])
            line |= {} if self.temperature is None else dict(temperature=self.temperature)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return self.known[key]
