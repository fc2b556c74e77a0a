"""The state of a request, in the task that serves it and in the thread that generates."""

import threading
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from .prompt import Prompt
from .sampling import Decoding

COUNTED = "prompt_tokens", "cached_tokens", "new_tokens", "read_tokens"


class Cancelled(Exception):
    """Raised in a call whose client has left."""


@dataclass(eq=False)
class Call:
    """A request, from its first byte to its last.

    owner     the key whose texts and prefixes the request may see
    policy    the policy that reads the prompt
    question  the text of the prompt that observes; None: the last user's message
    text      the stored text that opens the first user's message
    deadline  when the request's time is over, by time.monotonic()
    """

    endpoint: str
    owner: str
    policy: Any
    question: str | None = None
    text: str | None = None
    answers: int = 1  # number of answers
    seed: int | None = None  # seed of the first answer
    stop: tuple = ()
    tools: list | None = None  # tools that an answer may call
    single: bool = False  # whether an answer ends with its first call
    usage: bool = False  # whether a stream counts tokens
    sampling: Decoding = field(default_factory=Decoding)
    deadline: float = float("inf")
    messages: list = field(default_factory=list)  # messages as the chat template takes them; empty for a plain prompt
    template: dict = field(default_factory=dict)  # further arguments of the chat template
    prompts: list = field(default_factory=list)  # all prompts of /v1/completions: letters or ids
    prompt: Any = ""  # the prompt that this call answers
    parts: list = field(default_factory=list)  # a call for each of several prompts
    whole: Prompt = field(default_factory=lambda: Prompt([]))  # the ids that the model reads
    keys: dict = field(default_factory=dict)  # keys of the prompt's beginnings, by their ends
    parser: Any = lambda: None  # makes the parser of an answer
    identity: str = field(default_factory=lambda: f"{uuid.uuid4()}")
    began: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    named: int = 0  # tool calls that have an id
    first_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that came from a stored prefix
    stored_tokens: int = 0  # tokens of the prompt that were on disk when the request came
    new_tokens: int = 0  # tokens of all answers
    read_tokens: int = 0  # tokens of the prompt that are read so far
    running: bool = False  # whether the call has had its turn
    task: Any = None  # the asyncio task that serves it
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _reasons: list = field(default_factory=list)

    def cancel(self, reason: Exception | None = None) -> None:
        """End the call at its next check. reason: the error that the client gets; None: the client has left."""
        if reason is not None:
            self._reasons.append(reason)
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise the reason that ends the call before its answer does."""
        if self.cancelled:
            raise self._reasons[0] if self._reasons else Cancelled
        if time.monotonic() > self.deadline:
            raise TimeoutError

    def reads(self, start: int) -> None:
        """Note that the prompt is read up to token `start`. Raises the reason that ends the call."""
        self.check()
        self.read_tokens = start

    def of_prompts(self) -> "list[Call]":
        """Return a call for each of several prompts, or else this call. The calls are cancelled together."""
        self.parts = [replace(self, prompt=each) for each in self.prompts] if len(self.prompts) > 1 else []
        return self.parts or [self]

    def gather(self) -> None:
        """Set this call's counts to the sums over the calls of its prompts, if there are several."""
        for name in COUNTED if self.parts else ():
            setattr(self, name, sum(getattr(each, name) for each in self.parts))
        self.running = self.running or any(each.running for each in self.parts)
        first = (each.first_token for each in self.parts if each.first_token is not None)
        self.first_token = min(first, default=self.first_token)

    def tool_id(self) -> str:
        """Make the id of a further tool call. Mistral's templates take nine letters and digits."""
        self.named += 1
        return f"{(int(self.identity[-9:], 16) + self.named) % 16**9:09x}"

    def token(self) -> None:
        """Count a token that was written. Raises the reason that ends the call."""
        self.check()
        self.new_tokens += 1
        if self.first_token is None:
            self.first_token = time.monotonic()
