"""Prompts are read, and their answers begun, in the thread that owns the model."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Collection, Generator, Iterator
from typing import Any

import numpy as np
import torch

from ..answer import room_of, within_positions
from ..batch import Pools
from ..compat import cache_of
from ..context import current, within
from ..engine.hook.forward import reading
from ..engine.hook.installed import plan_of
from ..engine.read.step import Step
from ..engine.slots.cache import EvictionLayer
from ..engine.slots.storage import ROOM
from ..families import FULL_ATTENTION, NOTHING, base_model, context_of, device_of, find_decoder, layer_kinds
from ..patch import evicting, slot_bytes
from ..policy.tokenizer import told
from ..question import Asked, LastTurn, find
from ..weights import identity
from .call import Call
from .errors import Refused, of_field
from .fields import RESPONSES
from .grammar import Calls, Following, Grammars
from .prefixes import Prefixes, keys_of, mark_of, shares_of
from .prompt import Prompt, of_chat, of_messages, of_text
from .row import Row
from .sampling import Chooser
from .scheduler import Scheduler
from .written import Form, Numbered, Written

BLOCK = 64  # tokens between the places where prompts are compared
SHORTEST = 256  # tokens of the shortest beginning that is shared
FURTHER = 256  # tokens after a known beginning, from which on a prompt is stored
PIECE = 2048  # tokens of a stored text that are read before their slots are stored; a place of comparison
WRITTEN = 1024  # tokens of a beginning: when one so long comes again, it is written to disk


class Generation:
    """Reads the calls' prompts, and makes their answers for the scheduler.

    model     a patched model. Its policy sizes the pools
    prefixes  the caches of shared beginnings
    """

    def __init__(self, model: Any, tokenizer: Any, prefixes: Prefixes, scheduler: Scheduler) -> None:
        self.model, self.tokenizer, self.prefixes, self.scheduler = model, tokenizer, prefixes, scheduler
        self.decoder, self.device = find_decoder(model), device_of(model)
        self.config, self.weights = self.decoder.config, identity(self.decoder)
        self.context = context_of(self.config)
        plan = plan_of(self.decoder)
        self.slot = slot_bytes(model, plan.policy.kv)
        most, memory = self._widest(plan.policy, self.context or 1 << 20) + ROOM, scheduler.memory // self.slot
        slots = 2 * (scheduler.most + 1) * most  # twice: answers that outgrow their room are copied within the pool
        self.kv, self.pools = plan.policy.kv, Pools(self.decoder, plan.kv_heads * (min(slots, memory) + memory))
        prefixes.place = self._place
        # whether a cache's first tokens are a cache: not those of a state or a window
        self.parts = set(layer_kinds(self.config)) <= {FULL_ATTENTION, NOTHING}
        self.form = Form(tokenizer, model)
        self._keeps: dict = {}  # mark of a stored text -> `shares_of` it, of the last question
        self.grammars = Grammars(tokenizer, _listed(model.generation_config.eos_token_id))

    # -- in the event loop ------------------------------------------------------------------------------------------

    async def write(self, call: Call, answers: list[Written]) -> AsyncGenerator[Numbered, None]:
        """Yield (number of an answer, list of parts) for each token, and (number, None) at an answer's end. Raises the
        error that ends the call."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def give(item: tuple) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        begun = self.scheduler.submit(
            self._begin, call, answers, give, call=call, rows=len(answers),
            size=len(answers) * self._size(call, answers[0].most),
        )  # fmt: skip

        def failed(done: Any) -> None:
            if done.exception() is not None:
                give(done.exception())

        begun.add_done_callback(failed)
        left = len(answers)
        while left:
            waiting = asyncio.ensure_future(queue.get())
            try:  # not wait_for: before Python 3.12 it loses a cancellation that comes together with an item
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
        """Make the answers of a call, without tokens yet. They also end where the model's context does."""
        config = self._config(call)
        ends, stops = set(_listed(config.eos_token_id)), (*call.stop, *_listed(config.stop_strings))
        more = dict(most=config.max_new_tokens, single=call.single, loops="max_new_tokens" in call.sampling.changes)
        if not call.messages:  # a text that goes on, not a turn
            more["before"] = [each for each in call.whole.ids if each not in self.form.special][-1:]
        return [Written(self.form, call.parser(), stops, ends, **more) for _ in range(call.answers)]

    def _widest(self, policy: Any, tokens: int) -> int:
        """Most slots of a head while a prompt is read."""
        return min(tokens, policy.slots(tokens) + (policy.chunk_size or tokens))

    def _size(self, call: Call, new: int) -> int:
        """Most bytes of an answer's slots."""
        return self.slot * (self._widest(call.policy, len(call.whole.ids)) + new)

    def _matcher(self, call: Call) -> Any:
        return None if call.schema is None else self.grammars.matcher(call.schema)

    def _config(self, call: Call) -> Any:
        config = call.sampling.config(self.model.generation_config)
        if self.context is not None:
            config.max_new_tokens = min(config.max_new_tokens, self.context - len(call.whole.ids))
        return config

    async def read(self, call: Call) -> None:
        """Read a call's stored text. Its slots are where a process that is killed leaves them."""

        def run() -> Iterator[Any]:
            if call.keys:
                cache, end = yield from self._text(call, *self._known(call))
                self.prefixes.write(call.keys[end], cache)

        await self._in_thread(run, call=call)

    async def forget(self, marks: Collection[str]) -> None:
        """Remove the caches of stored texts, after the turn that runs now."""
        for mark in marks:
            self._keeps.pop(mark, None)
        await self._in_thread(self.prefixes.forget, marks)

    def kept(self, call: Call) -> np.ndarray:
        """The share of heads that kept each token of a call's stored text for the last question about it; 1 before the
        first one."""
        start, stop = call.whole.text or (0, 0)
        found = self._keeps.get(self._mark(call))
        return np.ones(stop - start) if found is None else found

    async def _in_thread(self, function: Any, *args: Any, **facts: Any) -> Any:
        """Run a function in the model's thread. The waiting task may be cancelled, the thread's future may not: setting
        a cancelled one's result would end the thread."""
        future = asyncio.wrap_future(self.scheduler.submit(function, *args, **facts))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # known, if nobody waits any more
        return await asyncio.shield(future)

    # -- in a thread that tokenises ---------------------------------------------------------------------------------

    def prepare(self, call: Call, tokenizer: Any) -> None:
        """Make the prompt of a call. Raises Refused where it does not fit the model's context."""
        if not call.messages:
            prompt = of_text(tokenizer, call.prompt, self.context, call.text)
            if isinstance(call.prompt, list):
                call.prompt = tokenizer.decode(call.prompt)
        elif call.text is not None:
            prompt = of_messages(tokenizer, call.messages, call.template, self.context, call.text)
        else:
            prompt = of_chat(tokenizer, call.messages, call.template, self.context)
        if not prompt.ids:
            raise Refused(400, "the prompt is empty: give at least one word")
        call.whole, call.prompt_tokens = prompt, len(prompt.ids)
        call.keys = self._keys(call)
        call.stored_tokens = next((end for end in reversed(call.keys) if self.prefixes.has_file(call.keys[end])), 0)
        if call.question is not None and find(tokenizer, prompt.ids, call.question) is None:
            sentence = "the prompt does not have kvevict.question: give its words as the prompt has them"
            raise Refused(400, sentence, param="kvevict.question")
        with of_field("tools" if call.forced else "text.format" if call.endpoint == RESPONSES else "response_format"):
            self._matcher(call)  # refuses a schema
        if call.forced:
            call.parser = Calls
        elif call.messages and call.schema is None:
            call.parser = functools.partial(self.form.parser, prompt.ids, call.tools)

    # -- in the thread that owns the model --------------------------------------------------------------------------

    # A function that reads is a generator of the chunks read, but for the last: others get a turn between two.

    def _begin(self, call: Call, answers: list, give: Any) -> Generator[Step, None, None]:
        """Read a call's prompt, and let its answers run."""
        call.check()
        rows = [self._row(call, at, answer, give) for at, answer in enumerate(answers)]
        cache, logits, plan = yield from self._read(call)
        for row in rows:
            mine = cache if row is rows[-1] else cache.fork()
            row.take(logits)
            if not row.ended:
                self.scheduler.run(row, plan, mine)

    def _row(self, call: Call, at: int, answer: Written, give: Any) -> Row:
        prompt, config, made = call.whole.ids, self._config(call), []
        processors = call.sampling.processors(len(prompt))
        if call.schema is not None:
            processors.append(Following(self._matcher(call), len(prompt)))

        def take(model: torch.nn.Module, input_ids: torch.Tensor, logits_processor: Any, **others: Any) -> torch.Tensor:
            made.append(logits_processor)
            return input_ids

        config.stop_strings = None  # Transformers looks for them in the prompt, too
        ids = torch.tensor([prompt], device=self.device)
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=processors,
            custom_generate=take,
        )  # fmt: skip
        noise = torch.Generator() if config.do_sample else None
        if noise is not None:
            noise.seed() if call.seed is None else noise.manual_seed(call.seed + at)
        return Row(call, at, answer, Chooser(prompt, answer.most, made[0], noise), give)

    def _read(self, call: Call) -> Generator[Step, None, tuple]:
        """Read a call's whole prompt, after its longest beginning that is known; returns as `_through`."""
        prompt = call.whole
        cache, start = self._known(call)
        if prompt.text is not None and call.keys:
            cache, start = yield from self._text(call, cache, start)
        policy, asks = self._chosen(call.policy, len(prompt.ids)), self._asking(call, prompt)
        cache, logits, plan = yield from self._through(call, policy, cache, prompt.ids[start:], start, asks)
        end = max(call.keys, default=0)
        if self.parts and end - start >= FURTHER and self._fits(end):
            self.prefixes.put(call.keys, end, cache.recalled().first(end))
        if prompt.text is not None:
            self._keeps[self._mark(call)] = shares_of(cache, *prompt.text)
        for layer in cache.layers:
            layer.archive = None  # no turn follows the answer in this cache
        return cache, logits, plan

    def _known(self, call: Call) -> tuple:
        """A fork of the cache of a call's longest known beginning, and the number of its tokens; (None, 0) without."""
        for end in reversed(call.keys):
            cache = self.prefixes.get(call.keys, end)
            if cache is not None:
                call.cached_tokens = end
                if end >= WRITTEN:  # for other servers, and for this one after it was killed
                    self.prefixes.write(call.keys[end], cache)
                return cache, end
        return None, 0

    def _text(self, call: Call, cache: Any, start: int) -> Generator[Step, None, tuple]:
        """Read a call's stored text without its question; returns the cache and its end. Each piece is stored: if the
        request ends early, the next one goes on from the last piece."""
        _, end = call.whole.text or (0, 0)
        pieces = range(start // PIECE * PIECE + PIECE, end, PIECE) if self.parts else ()
        for stop in [*pieces, *([end] if start < end else [])]:
            policy = self._chosen(call.policy, stop)
            cache, _, _ = yield from self._through(call, policy, cache, call.whole.ids[start:stop], start)
            whole = cache.recalled()
            if self._fits(stop):
                self.prefixes.put(call.keys, stop, whole)
            cache, start = whole.fork(), stop
            if stop == end:
                self.prefixes.write(call.keys[end], whole)
        return cache, start

    def _mark(self, call: Call) -> str:
        return mark_of(call.owner, call.text or "")

    def _fits(self, tokens: int) -> bool:
        """Tell whether memory holds the slots of so many tokens."""
        return tokens * self.slot <= self.prefixes.memory

    def _place(self, cache: Any) -> None:
        """Move a prefix's slots into the pools of the answers, if both store the same kind of numbers."""
        layers = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
        for layer in layers:
            layer.storage = layer.storage.gathered().as_prefix()
        if cache.sequence.policy is not None and cache.sequence.policy.kv == self.kv:
            self.pools.hold(cache)

    def _through(
        self, call: Call, policy: Any, cache: Any, ids: list, start: int, question: Any = None
    ) -> Generator[Step, None, tuple]:
        """Read ids, the prompt's tokens from number `start` on. Returns (cache, logits of the last token, the policy's
        `Plan`). Answers that run go on between the layers, too."""

        def pause() -> None:
            chunk = current().chunk
            call.reads(start if chunk is None else start + chunk.start)
            self.scheduler.pause()

        tokens = torch.tensor([ids], device=self.device)
        with contextlib.ExitStack() as inside:
            with of_field("kvevict.policy"):  # that needs more than its name, or cannot read with this model
                inside.enter_context(evicting(self.model, policy, tokenizer=False))
            inside.enter_context(within(question=question, pause=pause, learns=False))
            into = self.pools.cache() if cache is None else cache
            out = yield from reading(base_model(self.model), tokens, into)
            return cache_of(out), out.logits[0, -1], plan_of(self.decoder)

    def _keys(self, call: Call) -> dict:
        """The keys of the beginnings that a call's prompt may share with others, by their ends."""
        prompt, ends = call.whole, set(range(SHORTEST, len(call.whole.ids), BLOCK)) if self.parts else set()
        if not call.policy.recall or call.question is not None:
            return {}
        start = len(prompt.ids)
        if prompt.text is not None:
            start, end = prompt.text
            ends.add(end)
        return keys_of(call.owner, self.weights, call.policy, prompt.ids, sorted(ends), call.text, start)

    def _asking(self, call: Call, prompt: Prompt) -> Any:
        """The tokens that observe."""
        if call.question is not None:
            return Asked((find(self.tokenizer, prompt.ids, call.question),), self.tokenizer)
        said = [each["content"] for each in call.messages if each["role"] == "user"]
        return LastTurn(self.tokenizer, said[-1] if said else call.prompt)

    def _chosen(self, policy: Any, tokens: int) -> Any:
        return told(self._within(policy, tokens), self.tokenizer)

    def _within(self, policy: Any, tokens: int) -> Any:
        """The policy, changed to fit a prompt of so many tokens. Raises Refused where no positions are left to repeat
        them."""
        if (
            not policy.rows.repeats
            or self.context is None
            or (policy.threshold is None and policy.slots(tokens) >= tokens)
        ):
            return policy
        if self.context - tokens < room_of(policy):
            raise Refused(
                400,
                f"after {tokens} tokens too few of the model's {self.context} positions are left to repeat them, which "
                f"needs {room_of(policy)}: shorten the prompt, or give a kvevict.policy that reads once",
                "context_length_exceeded",
            )
        return within_positions(policy, self.config, tokens)


def _listed(value: object) -> list:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
