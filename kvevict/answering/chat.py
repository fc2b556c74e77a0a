"""Holds a chat whose questions may be about anything said before: each turn reads only its own tokens."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import DynamicCache, TextIteratorStreamer

from ..asking import prompts
from ..asking.prompts import MARK, Tokenizer, rendered
from ..engine.memory.cache import EvictionCache
from ..models.compat import CACHE
from ..models.families import device_of, find_decoder, unwrapped
from ..patch import evicting
from ..policy.building import Chosen, choose
from ..policy.checks import parsed
from ..policy.policy import Policy
from ..policy.text import DEFAULT
from ..policy.tokenizer import of_model
from ..store import sealed
from ..store.loading import load_cache
from ..store.saving import write
from .answer import check_can_answer
from .writing import ends_of

Message = dict[str, Any]  # has "role", "content" and any other field that the chat template takes
NEW_TOKENS = 512  # most tokens of an answer, if `generate` gets no other limit


class Chat:
    """A chat with a model; the model itself is not changed:

    chat = kvevict.Chat(model, tokenizer, system="Answer briefly.")
    print(chat.ask(f"{report}\\n\\nWho signed it?"))
    for piece in chat.stream("And when?"):
        print(piece, end="")
    chat.save("chat.safetensors")  # and later, in another process:
    chat = kvevict.Chat.load("chat.safetensors", model, tokenizer)

    model, tokenizer  as `kvevict.patch` takes them; the tokenizer has a chat template
    policy, options   as `kvevict.patch` takes them, with recall=True by default: all tokens stay in an archive, to
                      which every turn attends, and a turn reads only its own tokens. With recall=False
                      memory is bounded, and every turn reads the whole chat again
    system            the system prompt, if any
    tools             the tools that the template shows to the model, as `apply_chat_template` takes them

    `messages` is the chat so far, a list of messages as the template takes them. `cache` is the cache after the last
    answer, for `kvevict.report`; None before the first answer. Raises TypeError or ValueError as `kvevict.patch` does,
    and for a tokenizer without a chat template.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer, policy: str | Policy | Chosen = DEFAULT, *, system: str | None = None,
        tools: Sequence[Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        prompts.check(tokenizer)
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template: set tokenizer.chat_template, or ask with kvevict.answer"
            )
        if not isinstance(policy, Chosen):
            policy = choose(policy, **dict(recall=True) | options)
        self.model, self.tokenizer, self.tools, self._chosen = model, tokenizer, tools, policy
        self.messages: list[Message] = [] if system is None else [dict(role="system", content=system)]
        self.cache: EvictionCache | None = None
        self._ids: list[int] = []  # all tokens of the chat, except the end-of-turn tokens of the answers
        with self._evicting():
            pass  # a policy that does not fit the model is refused here

    def ask(self, message: str | Message | Sequence[Message], **generation: Any) -> str:
        """Send a message, and return the model's answer.

        message     the user's text; or one or several messages with other roles, such as a tool's result
        generation  options of `model.generate`; max_new_tokens is 512 if no limit is given

        Raises ValueError for a message that the chat template refuses, and for a chat that is longer than the model's
        context. The chat is then as it was before.
        """
        said = self._said(message)
        with self._evicting():
            carries = self.cache is not None and self._chosen.policy.recall
            cache: Any = self.cache.fork() if carries else DynamicCache(config=find_decoder(self.model).config)
            ids = (self._ids if carries else []) + self._new(said, carries)
            check_can_answer(self.model, len(ids), "the chat and the message")
            written = self._generate(ids, cache, generation)
        text = self.tokenizer.decode(written, skip_special_tokens=True).strip()
        if written and written[-1] in ends_of(self.model, self.tokenizer):
            written.pop()  # the end-of-turn token, which the template writes before the next turn
        self.messages += [*said, dict(role="assistant", content=text)]
        self.cache, self._ids = cache, ids + written
        return text

    def stream(self, message: str | Message | Sequence[Message], **generation: Any) -> Iterator[str]:
        """Send a message as `ask` does, and yield the answer's text while it is written. If the caller stops iterating,
        the answer ends there, and what was written of it stays in the chat."""
        streamer: Any = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore
        closed = threading.Event()

        def is_closed(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            return torch.full((len(ids),), closed.is_set(), device=ids.device)

        def run() -> None:
            try:
                self.ask(message, streamer=streamer, stopping_criteria=[is_closed, *stops], **generation)
            except BaseException:
                streamer.on_finalized_text("", stream_end=True)
                raise

        stops = generation.pop("stopping_criteria", [])
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(run)
            try:
                yield from streamer
            finally:
                closed.set()
                answered.result()

    def fork(self) -> "Chat":
        """Return a second chat that continues from here independently of the first. Both share what was said so far."""
        fork = Chat(self.model, self.tokenizer, self._chosen, tools=self.tools)
        fork.messages, fork._ids = [*self.messages], self._ids
        fork.cache = None if self.cache is None else self.cache.fork()
        return fork

    def save(self, path: str | os.PathLike) -> None:
        """Write the chat to one file: its messages, its tokens and its cache. Raises ValueError before the first
        answer, and as `kvevict.save_cache` does."""
        if self.cache is None:
            raise ValueError("nothing was answered yet, so there is no cache to save: ask first")
        try:
            said = json.dumps(dict(messages=self.messages, ids=self._ids, tools=self.tools))
        except TypeError as error:
            raise ValueError(f"a message or tool cannot be written as JSON ({error}); give dicts of texts") from None
        write(self.cache, path, dict(chat=said))

    @classmethod
    def load(cls, path: str | os.PathLike, model: Any, tokenizer: Tokenizer | None = None) -> "Chat":
        """Read a chat, and its policy, from a file that `save` wrote. Without a tokenizer, the one in the model's
        folder is used. Raises ValueError as `kvevict.load_cache` does, and for a file of a cache without a chat."""
        tokenizer = of_model(model) if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ValueError("the model's folder has no tokenizer: give tokenizer=")
        cache = load_cache(path, model)
        said = sealed.texts(os.fsdecode(path)).get("chat")
        if said is None:
            raise ValueError(f"{os.fsdecode(path)} has a cache, but no chat: read it with kvevict.load_cache")
        if cache.sequence.policy is None:
            raise ValueError(
                f"the policy of {os.fsdecode(path)} is not registered here: import the module that does so"
            )
        fields = parsed(said)
        chat = cls(model, tokenizer, Chosen(cache.sequence.policy, cache.sequence.run), tools=fields["tools"])
        chat.messages, chat._ids, chat.cache = fields["messages"], fields["ids"], cache
        return chat

    def _evicting(self) -> contextlib.AbstractContextManager[Any]:
        return evicting(self.model, self._chosen, tokenizer=self.tokenizer)

    def _said(self, message: str | Message | Sequence[Message]) -> list[Message]:
        if isinstance(message, str):
            return [dict(role="user", content=message)]
        listed = isinstance(message, Sequence)
        said: list[Any] = list(message) if listed else [message]
        if not said or not all(isinstance(each, dict) and "role" in each for each in said):
            raise TypeError(f"message must be a text, a message with a role, or a list of messages, got {message!r}")
        return said

    def _new(self, said: list[Message], since: bool) -> list[int]:
        """Return the tokens of the chat and of the new messages `said`, up to the start of the answer; if `since`, only
        the tokens after the last answer. Then a placeholder stands for each answer in the template: the cache holds the
        answers' tokens as the model wrote them, and tokenising an answer's text may give other tokens."""
        chat = [dict(each, content=MARK) if since and each["role"] == "assistant" else each for each in self.messages]
        options: dict[str, Any] = {} if self.tools is None else dict(tools=self.tools)
        text = rendered(self.tokenizer, [*chat, *said], "this chat", **options)
        if since:
            *_, text = parts = text.split(MARK)
            if len(parts) != 1 + sum(each["role"] == "assistant" for each in chat):
                raise ValueError(
                    "the tokenizer's chat template does not give each answer's text once, so a turn cannot be read "
                    "alone: set another chat_template, or recall=False"
                )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _generate(self, ids: list[int], cache: EvictionCache, generation: dict[str, Any]) -> list[int]:
        """Return the tokens that the model writes after `ids`. The cache already holds the first of the `ids`."""
        limits = {"max_new_tokens", "max_length", "max_time"} & generation.keys()
        rows = torch.tensor([ids], device=device_of(find_decoder(self.model)))
        given: dict[str, Any] = {CACHE: cache, "tokenizer": self.tokenizer}
        given |= ({} if limits else dict(max_new_tokens=NEW_TOKENS)) | generation
        output = unwrapped(self.model).generate(rows, attention_mask=torch.ones_like(rows), **given)
        return output[0, len(ids) :].tolist()
