"""Prompts are read, and their answers begun, in the thread that owns the model."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Collection, Generator, Iterator
from typing import Any

import numpy as np
import torch

from ..answer import KEEPS, room_of, within_positions
from ..batch import Pools
from ..compat import cache_of
from ..context import current, within
from ..engine.hook.forward import reading
from ..engine.hook.installed import plan_of
from ..engine.measure.gates import mark_of as mark_of_gates
from ..engine.read.spans import Span
from ..engine.slots.storage import ROOM
from ..families import base_model, context_of, device_of, find_decoder
from ..patch import evicting, slot_bytes
from ..policy.tokenizer import told
from ..question import Asked, LastTurn, find
from ..weights import identity
from .call import Call
from .errors import Refused, of_field
from .fields import RESPONSES
from .grammar import Calls, Following, Grammars
from .options import AUTO
from .prefixes import Prefixes, key_of, mark_in, shares_of
from .prompt import Prompt, chat_cuts, of_chat, of_messages, of_text
from .row import Row
from .sampling import Chooser
from .scheduler import Scheduler
from .sharing import CHAT, Sharing, followed, pieces
from .written import Form, Numbered, Written

LAST = 4  # turns of a chat: another server may have stored their ends
WRITTEN = 1024  # tokens of a beginning: slots of so many are written to disk when they are read


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
        self.form, self.sharing = Form(tokenizer, model), Sharing()
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
        """Most bytes of an answer's slots, without its prefix."""
        ends, tokens = call.whole.ends, len(call.whole.ids)
        return self.slot * (self._widest(call.policy, tokens - (ends[-1] if ends else 0)) + new)

    def _matcher(self, call: Call) -> Any:
        return None if call.schema is None else self.grammars.matcher(call.schema)

    def _config(self, call: Call) -> Any:
        config = call.sampling.config(self.model.generation_config)
        if self.context is not None:
            config.max_new_tokens = min(config.max_new_tokens, self.context - len(call.whole.ids))
        return config

    async def read(self, call: Call) -> None:
        """Read a prompt's prefixes, and store the last one where a process that is killed leaves it."""

        def run() -> Iterator[Any]:
            yield from self._prefix(call)
            if call.cached_tokens == call.shared_tokens:  # nothing was read, nor written
                self.prefixes.flush(call.keys[-1:])

        await self._in_thread(run, call=call)

    async def forget(self, marks: Collection[str]) -> None:
        """Remove the caches of stored texts, after the turn that runs now."""
        await self._in_thread(self.prefixes.forget, marks)

    async def kept(self, call: Call, start: int) -> np.ndarray:
        """The share of heads that keep each token of a prompt's last prefix, from token `start` on."""

        def run() -> Any:
            return shares_of((yield from self._prefix(call)), start, call.whole.ends[-1])

        return await self._in_thread(run, call=call)

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
        elif call.hidden:
            prompt = of_messages(tokenizer, call.messages, call.template, self.context, call.text)
        else:
            prompt = of_chat(tokenizer, call.messages, call.template, self.context)
        if not prompt.ids:
            raise Refused(400, "the prompt is empty: give at least one word")
        call.whole, call.prompt_tokens = prompt, len(prompt.ids)
        if call.share == AUTO:
            cuts = chat_cuts(tokenizer, call.messages, call.template, prompt) if call.messages else None
            cut = self.sharing.cut(call.owner, prompt, call.reader, cuts, self._stored(call, cuts or ()))
            call.whole = followed(call.policy, call.reader, cut)
        call.keys, call.stored_tokens = self._keys(call, call.reader)
        if call.question is not None and find(tokenizer, prompt.ids, call.question) is None:
            sentence = "the prompt does not have kvevict.question: give its words as the prompt has them"
            raise Refused(400, sentence, param="kvevict.question")
        with of_field("tools" if call.forced else "text.format" if call.endpoint == RESPONSES else "response_format"):
            self._matcher(call)  # refuses a schema
        if call.forced:
            call.parser = Calls
        elif call.messages and call.schema is None:
            call.parser = functools.partial(self.form.parser, prompt.ids, call.tools)

    def _stored(self, call: Call, cuts: tuple) -> set:
        """The first and the last places where a chat's beginning may end, if slots up to there are on disk: written by
        another server, or by this one before it was started again."""
        if self.prefixes.folder is None:
            return set()
        places = {place for place in (*cuts[:1], *cuts[-LAST:]) if place >= CHAT}
        policies = {place: call.reader.policies([place])[0] for place in places}
        return {at for at, policy in policies.items() if self.prefixes.has_file(self._key(call, policy, at))}

    # -- in the thread that owns the model --------------------------------------------------------------------------

    # A function that reads is a generator of the chunks read, but for the last: others get a turn between two.

    def _begin(self, call: Call, answers: list, give: Any) -> Generator[Span, None, None]:
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

    def _read(self, call: Call) -> Generator[Span, None, tuple]:
        """Read a call's whole prompt; returns as `_through`."""
        prompt, tokens = call.whole, len(call.whole.ids)
        cache = yield from self._prefix(call)
        start = 0 if cache is None else prompt.ends[-1]
        policy = call.reader.of(tokens) if call.hidden else call.policy
        if cache is None:
            cache = self.pools.cache()
        elif not call.hidden or tokens - start <= policy.slots(tokens):  # known questions: `sharing.followed`
            return (yield from self._through(call, KEEPS, cache, prompt.ids[start:], start))
        asks = None if call.hidden else self._asking(call, prompt)
        return (yield from self._through(call, self._chosen(policy, tokens), cache, prompt.ids[start:], start, asks))

    def _prefix(self, call: Call) -> Generator[Span, None, Any]:
        """Read the prompt up to its last end, after its longest stored prefix; returns the cache. None without an
        end."""
        prompt = call.whole
        if not prompt.ends:
            return None
        cache, start, known = None, 0, len(call.keys)
        while known and cache is None:
            known -= 1
            cache = self.prefixes.get(call.keys[known])
        if cache is not None:
            known, start = known + 1, prompt.ends[known]
        steps = list(zip(call.keys, call.reader.policies(prompt.ends), prompt.ends, strict=True))[known:]
        if not call.hidden:  # between the shortest and the longest nothing is stored
            steps = [step for step in steps if step[2] in (prompt.ends[0], prompt.ends[-1])]
        call.cached_tokens, call.shared_tokens = start, prompt.ends[-1]
        call.kept = call.reader.kept(call.shared_tokens)
        for key, policy, end in steps:
            cache = yield from self._beginning(call, cache, start, end, policy)
            self.prefixes.put(key, cache)
            if mark_in(key) or end - start >= WRITTEN:  # now, for other servers, and for this one after it was killed
                self.prefixes.flush([key])
            cache, start = cache.fork(), end
        return cache

    def _place(self, cache: Any) -> None:
        """Move a prefix's slots into the pools of the answers, if both store the same kind of numbers."""
        if cache.sequence.policy is not None and cache.sequence.policy.kv == self.kv:
            self.pools.hold(cache)

    def _beginning(self, call: Call, cache: Any, start: int, end: int, policy: Any) -> Generator[Span, None, Any]:
        """Read the prompt from `start`, where `cache` ends, up to `end`; returns the cache. The part is read in pieces,
        each stored: if the request ends early, the next one goes on from the last piece."""
        stops, part = pieces(self._within(policy, end), start, end), None
        for stop in stops[-2::-1]:
            known = self.prefixes.get(self._key(call, policy, stop))
            if known is not None:
                if call.cached_tokens == start:
                    call.cached_tokens = stop
                cache, start, part = known, stop, self._key(call, policy, stop)
                break
        for stop in [stop for stop in stops if stop > start]:
            chosen = self._chosen(policy, end)
            cache, _, _ = yield from self._through(call, chosen, cache, call.whole.ids[start:stop], start)
            start = stop
            if part is not None:
                self.prefixes.remove(part)
            if stop < end:
                part = self._key(call, policy, stop)
                self.prefixes.put(part, cache)
                cache = cache.fork()
        return cache

    def _through(
        self, call: Call, policy: Any, cache: Any, ids: list, start: int, question: Any = None
    ) -> Generator[Span, None, tuple]:
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

    def _keys(self, call: Call, reader: Any) -> tuple:
        """The keys of a prompt's beginnings by their reader, and the tokens of the longest that is on disk."""
        ends = call.whole.ends
        policies = reader.policies(ends) if ends else []
        keys = [self._key(call, policy, end) for policy, end in zip(policies, ends, strict=True)]
        return keys, max((end for key, end in zip(keys, ends, strict=True) if self.prefixes.has_file(key)), default=0)

    def _key(self, call: Call, policy: Any, end: int) -> str:
        prompt = call.whole
        start = len(prompt.ids) if prompt.text is None else prompt.text[0]
        text = call.text if end > start else None
        return key_of(call.owner, self._read_by(policy), policy, prompt.ids[:end], text)

    def _read_by(self, policy: Any) -> Any:
        """The mark of all weights that read a prefix: the model's, and those of gates."""
        if not hasattr(policy.score, "gates"):
            return self.weights
        return f"{self.weights} {mark_of_gates(policy.score.gates, self.decoder)}"

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
