"""The state of a request, shared by the task that serves it and the thread that generates its answers."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..policy.policy import Policy
from . import check
from .errors import Json
from .prompt import PromptIds
from .sampling import Decoding
from .template import Parser

COUNTED = "prompt_tokens", "cached_tokens", "new_tokens", "read_tokens"


class Cancelled(Exception):
    """Raised in a call whose client has left."""


@dataclass(eq=False)
class Call:
    """A request, from its first byte to its last."""

    endpoint: str
    owner: str  # the owner of the stored texts and prefixes that the request may use
    policy: Policy  # the policy that reads the prompt
    question: str | None = None  # a text in the prompt, whose tokens observe; None: the last user's message observes
    text: str | None = None  # the stored text that opens the first user's message
    answers: int = 1  # number of answers
    seed: int | None = None  # seed of the first answer
    stop: tuple[str, ...] = ()
    tools: list[Json] | None = None  # tools that an answer may call
    single: bool = False  # whether an answer ends with its first tool call
    usage: bool = False  # whether a stream counts tokens
    sampling: Decoding = field(default_factory=Decoding)
    deadline: float = float("inf")  # time.monotonic() at which the request's time is over
    messages: list[Json] = field(default_factory=list)  # for the chat template; empty for a plain prompt
    template: Json = field(default_factory=dict)  # further arguments of the chat template
    prompts: list[str | list[int]] = field(default_factory=list)  # all prompts of /v1/completions: texts or ids
    prompt: Any = ""  # the prompt that this call answers: a text, or ids until `Generation.prepare` decodes them
    parts: list["Call"] = field(default_factory=list)  # a call for each of several prompts
    whole: PromptIds = field(default_factory=lambda: PromptIds([]))  # the ids that the model reads
    keys: dict[int, str] = field(default_factory=dict)  # end of a beginning of the prompt -> key of its prefix
    parser: Callable[[], Parser | None] = lambda: None  # makes the parser of an answer
    identity: str = field(default_factory=lambda: f"{uuid.uuid4()}")
    began: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    named: int = 0  # number of tool calls that have an id
    first_token: float | None = None  # time.monotonic() of the first token
    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that came from a stored prefix
    stored_tokens: int = 0  # tokens of the prompt that were on disk when the request came
    new_tokens: int = 0  # tokens of all answers
    read_tokens: int = 0  # tokens of the prompt that have been read
    running: bool = False  # whether the model has begun to work on the call
    task: asyncio.Task | None = None  # the task that serves the call
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
        """Raise the reason of `cancel`, `Cancelled` without one, or TimeoutError after the deadline."""
        if self.cancelled:
            raise self._reasons[0] if self._reasons else Cancelled
        if time.monotonic() > self.deadline:
            raise TimeoutError

    def reads(self, start: int) -> None:
        """Note that the prompt is read up to token `start`, after a `check`."""
        self.check()
        self.read_tokens = start

    def of_prompts(self) -> "list[Call]":
        """Return a call for each of several prompts, which one `cancel` ends; for one prompt, this call."""
        self.parts = [replace(self, prompt=each) for each in self.prompts] if len(self.prompts) > 1 else []
        return self.parts or [self]

    def gather(self) -> None:
        """Sum the counts of `parts` in this call, if it has several prompts."""
        for name in COUNTED if self.parts else ():
            setattr(self, name, sum(getattr(each, name) for each in self.parts))
        self.running = self.running or any(each.running for each in self.parts)
        first = (each.first_token for each in self.parts if each.first_token is not None)
        self.first_token = min(first, default=self.first_token)

    def tool_id(self) -> str:
        """Make the id of another tool call: nine hexadecimal digits, as Mistral's templates take no other length."""
        self.named += 1
        return f"{(int(self.identity[-9:], 16) + self.named) % 16**9:09x}"

    def token(self) -> None:
        """Count a written token, after a `check`."""
        self.check()
        self.new_tokens += 1
        if self.first_token is None:
            self.first_token = time.monotonic()
