"""Holds the state of a request, which the task that serves it and the thread that generates its answers share."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..policy.policy import Policy
from . import check
from .beginnings import Beginnings
from .errors import Json
from .prompt import PromptIds
from .sampling import Decoding
from .template import Parser

COUNTED = "prompt_tokens", "cached_tokens", "new_tokens", "read_tokens"


class Cancelled(Exception):
    """Raised by `Call.check` for a call whose client has disconnected."""


@dataclass(eq=False)
class Call:
    """A request to the server: its parameters, and its state until the response has ended."""

    endpoint: str
    owner: str  # the owner of the stored texts and prefixes that the request may use
    policy: Policy  # the eviction policy with which the prompt is read
    question: str | None = None  # text in the prompt whose queries score slots; None: the last user turn's question
    text: str | None = None  # content of the stored text that is put before the first user message
    answers: int = 1  # number of answers
    seed: int | None = None  # random seed of answer 0; answer i has seed + i; None: a fresh seed for each answer
    stop: tuple[str, ...] = ()  # strings that end an answer
    tools: list[Json] | None = None  # tools that an answer may call
    single: bool = False  # whether an answer ends after its first tool call
    usage: bool = False  # whether the last event of a stream reports the numbers of tokens
    sampling: Decoding = field(default_factory=Decoding)
    deadline: float = float("inf")  # time.monotonic() after which the request fails with status 504
    messages: list[Json] = field(default_factory=list)  # chat messages; empty: the prompt needs no chat template
    template: Json = field(default_factory=dict)  # keyword arguments for the chat template
    prompts: list[str | list[int]] = field(default_factory=list)  # all prompts of the request, each a text or ids
    prompt: Any = ""  # this call's prompt: a text, or token ids, which `Generation.prepare` decodes to a text
    parts: list["Call"] = field(default_factory=list)  # one call per prompt if there are several; otherwise empty
    whole: PromptIds = field(default_factory=lambda: PromptIds([]))  # the whole prompt's token ids for the model
    beginnings: tuple[Beginnings, ...] = ()  # `Reader.beginnings` of the prompt
    parser: Callable[[], Parser | None] = lambda: None  # makes an answer's parser; None: the answer is plain text
    identity: str = field(default_factory=lambda: f"{uuid.uuid4()}")
    began: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    named: int = 0  # number of tool calls that have been given an id
    first_token: float | None = None  # time.monotonic() when the first token was generated; None: not yet
    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt whose slots came from a stored prefix
    stored_tokens: int = 0  # tokens of the longest prefix that was on disk when the prompt was tokenised
    new_tokens: int = 0  # generated tokens of all answers
    read_tokens: int = 0  # position in the prompt up to which it has been read, cached tokens included
    running: bool = False  # whether the model has begun to work on the call
    task: asyncio.Task | None = None  # the asyncio task that serves the call
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _reasons: list = field(default_factory=list)

    @classmethod
    def of(
        cls, endpoint: str, owner: str, policy: Policy, body: Json, question: str | None, text: str | None,
        deadline: float,
    ) -> "Call":  # fmt: skip
        """Make a call from the checked body of a request."""
        tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
        template = body.get("chat_template_kwargs", {}) | (dict(tools=tools) if tools else {})
        template |= {name: body[name] for name in ("reasoning_effort",) if name in body}
        prompts, stop = body.get("prompt", [""]), body.get("stop", [])
        return cls(
            endpoint, owner, policy, question, text, answers=body.get("n", 1), seed=body.get("seed"),
            stop=tuple(stop) if isinstance(stop, list) else (stop,), tools=tools,
            single=not body.get("parallel_tool_calls", True), sampling=Decoding.of(body, check.sampling(body)),
            usage=body.get("stream_options", {}).get("include_usage", False), deadline=deadline, template=template,
            prompts=prompts, prompt=prompts[0],
        )  # fmt: skip

    def cancel(self, reason: Exception | None = None) -> None:
        """End the call at its next `check`. reason: the error that the client gets; None: the client has left."""
        if reason is not None:
            self._reasons.append(reason)
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise if the call shall end: the error that `cancel` was given, or `Cancelled` if it was given none;
        TimeoutError after the deadline."""
        if self.cancelled:
            raise self._reasons[0] if self._reasons else Cancelled
        if time.monotonic() > self.deadline:
            raise TimeoutError

    def reads(self, start: int) -> None:
        """Call `check`, then note that the prompt has been read up to token `start` (exclusive)."""
        self.check()
        self.read_tokens = start

    def of_prompts(self) -> "list[Call]":
        """Return one call per prompt if the request has several prompts, else this call alone. The calls share their
        cancellation, so one `cancel` ends all of them."""
        self.parts = [replace(self, prompt=each) for each in self.prompts] if len(self.prompts) > 1 else []
        return self.parts or [self]

    def gather(self) -> None:
        """Update this call from `parts`: sums of counts, whether it runs, and the time of the first token. It does
        nothing for a single prompt."""
        for name in COUNTED if self.parts else ():
            setattr(self, name, sum(getattr(each, name) for each in self.parts))
        self.running = self.running or any(each.running for each in self.parts)
        first = (each.first_token for each in self.parts if each.first_token is not None)
        self.first_token = min(first, default=self.first_token)

    def tool_id(self) -> str:
        """Return an id for the next tool call: nine hexadecimal digits, because Mistral's chat templates accept only
        ids of nine characters."""
        self.named += 1
        return f"{(int(self.identity[-9:], 16) + self.named) % 16**9:09x}"

    def token(self) -> None:
        """Call `check`, then count a generated token."""
        self.check()
        self.new_tokens += 1
        if self.first_token is None:
            self.first_token = time.monotonic()
