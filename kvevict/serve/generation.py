"""Serves a call: tokenises its prompt, has the model read it and write the answers, and yields their parts."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Collection, Generator
from concurrent.futures import Future
from typing import Any

import torch
from torch.nn import Module
from transformers import GenerationConfig, LogitsProcessorList

from ..asking.prompts import Tokenizer
from ..asking.tokens import find
from ..engine.read.step import Step
from .call import Call
from .errors import Refused, of_field
from .fields import PROMPT
from .prefixes import Prefixes
from .prompt import of_messages, of_text
from .reading import Reader
from .row import Row
from .sampling import TokenChooser
from .scheduler import Scheduler
from .template import Form
from .written import Numbered, Written


class Generation:
    """Reads the prompts of calls with a patched model, and starts their answers in the scheduler."""

    def __init__(self, model: Any, tokenizer: Tokenizer, prefixes: Prefixes, scheduler: Scheduler) -> None:
        self.model, self.prefixes, self.scheduler = model, prefixes, scheduler
        self.reader = Reader(model, tokenizer, prefixes, scheduler)
        self.context = self.reader.context
        self.form = Form(tokenizer, model)

    # -- in the event loop ------------------------------------------------------------------------------------------

    async def write(self, call: Call, answers: list[Written]) -> AsyncGenerator[Numbered, None]:
        """Have the model's thread read a call's prompt and write its answers. Yields (answer's number, its new parts)
        for each token, and (answer's number, None) at an answer's end. Raises the error that ends the call."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Numbered | BaseException] = asyncio.Queue()

        def give(item: Numbered | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        begun = self.scheduler.submit(
            self._begin, call, answers, give, call=call, rows=len(answers),
            size=lambda: len(answers) * self.reader.size(call, answers[0].most),
        )  # fmt: skip

        def failed(done: Future) -> None:
            if error := done.exception():
                give(error)

        begun.add_done_callback(failed)
        left = len(answers)
        while left:
            waiting = asyncio.ensure_future(queue.get())
            try:  # not with wait_for: before Python 3.12 it loses a cancellation that comes together with an item
                await asyncio.wait((waiting,), timeout=call.deadline - time.monotonic())
            finally:
                over = waiting.cancel()
            if over:
                raise TimeoutError
            item = waiting.result()
            if isinstance(item, BaseException):
                raise item
            left -= item[1] is None
            yield item

    def answers(self, call: Call) -> list[Written]:
        """Return the call's answers, without tokens yet, each with the conditions that end it."""
        config = self._config(call)
        ends, stops = set(_listed(config.eos_token_id)), (*call.stop, *_listed(config.stop_strings))
        before = [each for each in call.whole.ids if each not in self.form.special][-1:]
        more = dict(
            most=config.max_new_tokens, single=call.single, loops="max_new_tokens" in call.sampling.changes,
            before=() if call.messages else before,  # a chat's answer does not continue the prompt's text
        )  # fmt: skip
        return [Written(self.form, call.parser(), stops, ends, **more) for _ in range(call.answers)]

    def _config(self, call: Call) -> GenerationConfig:
        """Return the `GenerationConfig` of a call's answers, with `max_new_tokens` limited to the positions that the
        prompt leaves in the model's context."""
        config = call.sampling.config(self.model.generation_config)
        if self.context is not None:
            config.max_new_tokens = min(config.max_new_tokens, self.context - len(call.whole.ids))
        return config

    async def read(self, call: Call) -> None:
        """Have the model read a call's stored text and store its slots, which later calls then use."""
        await self._in_thread(self.reader.store, call, call=call)

    async def forget(self, marks: Collection[str]) -> None:
        """Remove the caches of some stored texts, as soon as the model's thread is free. marks: `mark_of` each text."""
        for mark in marks:
            self.reader.shares.pop(mark, None)
        await self._in_thread(self.prefixes.forget, marks)

    async def _in_thread(self, function: Callable[..., Any], *args: Any, **facts: Any) -> Any:
        """Run a function in the model's thread, and return its result. If the task that awaits this is cancelled,
        `shield` keeps the future from being cancelled: the model's thread cannot set the result of a cancelled future,
        and the error would end the thread."""
        future = asyncio.wrap_future(self.scheduler.submit(function, *args, **facts))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio logs unretrieved errors
        return await asyncio.shield(future)

    # -- in a thread that tokenises ---------------------------------------------------------------------------------

    def prepare(self, call: Call, tokenizer: Tokenizer) -> None:
        """Tokenise a call's prompt, and set the fields of the call that follow from its ids. Raises Refused for a
        prompt that is empty, does not fit the model's context, or does not contain `kvevict.question`."""
        with of_field(PROMPT.get(call.endpoint)):
            if not call.messages:
                prompt = of_text(tokenizer, call.prompt, self.context, call.text)
                if isinstance(call.prompt, list):
                    call.prompt = tokenizer.decode(call.prompt)
            else:
                prompt = of_messages(tokenizer, call.messages, call.template, self.context, call.text)
        if not prompt.ids:
            raise Refused(400, "the prompt is empty: give at least one word")
        call.whole, call.prompt_tokens = prompt, len(prompt.ids)
        call.beginnings = self.reader.beginnings(call)
        call.stored_tokens = max(map(self.prefixes.filed, call.beginnings[:1]), default=0)
        if call.question is not None and find(tokenizer, prompt.ids, call.question) is None:
            sentence = "the prompt does not have kvevict.question: give its words as the prompt has them"
            raise Refused(400, sentence, param="kvevict.question")
        if call.messages:
            call.parser = functools.partial(self.form.parser, prompt.ids, call.tools)

    # -- in the thread that owns the model --------------------------------------------------------------------------

    def _begin(self, call: Call, answers: list[Written], give: Callable) -> Generator[Step, None, None]:
        """Read a call's prompt, and start its answers. Yields the step of each chunk but the last."""
        call.check()
        rows = [self._row(call, at, answer, give) for at, answer in enumerate(answers)]
        cache, logits, plan = yield from self.reader.read(call)
        for row in rows:
            mine = cache if row is rows[-1] else cache.fork()
            row.take(logits)
            if not row.ended:
                self.scheduler.run(row, plan, mine)

    def _row(self, call: Call, at: int, answer: Written, give: Callable) -> Row:
        """Make the batch row that writes answer number `at`. Transformers' `generate` builds the logits processors from
        the configuration, and passes them to `take`, which replaces its decoding loop and generates nothing."""
        prompt, config = call.whole.ids, self._config(call)
        made: list[LogitsProcessorList] = []

        def take(
            model: Module, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, **others: object
        ) -> torch.Tensor:
            made.append(logits_processor)
            return input_ids

        config.stop_strings = None  # `Written` looks for them; `generate` would also search the prompt
        ids = torch.tensor([prompt], device=self.reader.device)
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, custom_generate=take,
            logits_processor=call.sampling.processors(len(prompt)),
        )  # fmt: skip
        noise = torch.Generator() if config.do_sample else None
        if noise is not None:
            noise.seed() if call.seed is None else noise.manual_seed(call.seed + at)
        return Row(call, at, answer, TokenChooser(prompt, answer.most, made[0], noise), give)


def _listed(value: object) -> list:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
