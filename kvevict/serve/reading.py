"""Prompts are read in the thread that owns the model, each after its longest known beginning."""

import contextlib
from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from ..answering.answer import SHORTEST as SHORTEST_CHUNK
from ..answering.answer import within_positions
from ..answering.batch import Pools
from ..asking.question import Asked, LastTurn
from ..context import current, within
from ..engine.hook.forward import reading
from ..engine.hook.installed import plan_of
from ..engine.memory.layer import EvictionLayer
from ..engine.memory.storage import ROOM
from ..engine.read.step import Step
from ..models.compat import cache_of
from ..models.families import FULL_ATTENTION, NOTHING, base_model, context_of, device_of, find_decoder, layer_kinds
from ..models.weights import identity
from ..patch import evicting, slot_bytes
from ..policy.building import Chosen
from ..policy.tokenizer import told
from .call import Call
from .errors import Refused, of_field
from .prefixes import Prefixes, keys_of, mark_of, shares_of, unmarked
from .scheduler import Scheduler

BLOCK = 64  # tokens between the places where prompts are compared
SHORTEST = 256  # tokens of the shortest beginning that is shared
FURTHER = 256  # tokens after a known beginning, from which on a prompt is stored
PIECE = 2048  # tokens of a stored text that are read before their slots are stored; a place of comparison
WRITTEN = 1024  # tokens from which on a beginning that comes again is written to disk


class Reader:
    """Reads the prompts of calls. A function that reads is a generator of all chunks but the last: other calls get a
    turn between two chunks.

    model     a patched model, whose policy sizes the pools, and whose run is that of all calls
    prefixes  the caches of shared beginnings
    shares    mark of a stored text -> `shares_of` the text for the last question about it
    """

    def __init__(self, model: Any, tokenizer: Any, prefixes: Prefixes, scheduler: Scheduler) -> None:
        self.model, self.tokenizer, self.prefixes, self.scheduler = model, tokenizer, prefixes, scheduler
        self.decoder, self.device = find_decoder(model), device_of(model)
        self.config = self.decoder.config
        self.weights = f"{identity(self.decoder)} in {base_model(model).dtype}"
        self.context = context_of(self.config)
        plan = plan_of(self.decoder)
        self.run, self.slot = plan.run, slot_bytes(model, plan.run.kv)
        most, memory = self._widest(plan.policy, self.context or 1 << 20) + ROOM, scheduler.memory // self.slot
        slots = 2 * (scheduler.most + 1) * most  # twice: answers that outgrow their room are copied within the pool
        self.pools = Pools(self.decoder, plan.kv_heads * (min(slots, memory) + memory))
        prefixes.place = self._place
        # whether the first tokens of a cache are a cache themselves, unlike those of a state or a window
        self.parts = set(layer_kinds(self.config)) <= {FULL_ATTENTION, NOTHING}
        self.shares: dict[str, np.ndarray] = {}

    def keys(self, call: Call) -> dict[int, str]:
        """Make the keys of the beginnings that a call's prompt may share with others, by their ends."""
        if not call.policy.recall or call.question is not None:
            return {}
        prompt = call.whole
        ends, start = set(range(SHORTEST, len(prompt.ids), BLOCK)) if self.parts else set(), len(prompt.ids)
        if prompt.text is not None:
            start, end = prompt.text
            ends.add(end)
        return keys_of(call.owner, self.weights, call.policy, self.run, prompt.ids, sorted(ends), call.text, start)

    def kept(self, call: Call) -> np.ndarray:
        """Return the share of heads that kept each token of a call's stored text for the last question about that text;
        1 before the first question."""
        start, stop = call.whole.text or (0, 0)
        return self.shares.get(self._mark(call), np.ones(stop - start))

    def _widest(self, policy: Any, tokens: int) -> int:
        """Return the most slots of a head while a prompt is read."""
        slots = max(policy.slots(tokens), policy.recalling.slots(tokens))
        return min(tokens, slots + (policy.chunk_size or tokens))

    def size(self, call: Call, new: int) -> int:
        """Return the most bytes of an answer's slots. new: tokens of the answer."""
        return self.slot * (self._widest(call.policy, len(call.whole.ids)) + new)

    def store(self, call: Call) -> Generator[Step, None, None]:
        """Read a call's stored text, and write its slots to disk, where a killed process leaves them."""
        if call.keys:
            cache, end = yield from self._text(call, *self._known(call))
            self.prefixes.write(call.keys[end], cache)

    def read(self, call: Call) -> Generator[Step, None, tuple]:
        """Read a call's whole prompt, after its longest beginning that is known; returns as `_through`."""
        prompt = call.whole
        cache, start = self._known(call)
        if prompt.text is not None and call.keys:
            cache, start = yield from self._text(call, cache, start)
        policy, asks = self._chosen(call.policy, len(prompt.ids)), self._asking(call)
        cache, logits, plan = yield from self._through(call, policy, cache, prompt.ids[start:], start, asks)
        end = max(call.keys, default=0)
        if self.parts and end - start >= FURTHER and self._fits(end):
            self.prefixes.put(call.keys, end, cache.recalled().first(end))
        if prompt.text is not None:
            self.shares[self._mark(call)] = shares_of(cache, *prompt.text)
        cache.end_archive()
        return cache, logits, plan

    def _known(self, call: Call) -> tuple:
        """Return a fork of the cache of a call's longest known beginning, and its number of tokens; (None, 0) without
        one. A prompt that has the letters of the call's stored text may have left that cache."""
        _, stop = call.whole.text or (0, 0)
        pasted = unmarked(call.keys) if stop else {}
        for end in reversed(call.keys):
            cache = self.prefixes.get(call.keys, end)
            if cache is not None and end >= WRITTEN:  # for other servers, and for this one after it was killed
                self.prefixes.write(call.keys[end], cache)
            if cache is None and end <= stop:
                cache = self.prefixes.get(pasted, end)
            if cache is not None:
                call.cached_tokens = end
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
                self.prefixes.tell(call.keys[end], stop * self.slot)
        return cache, start

    def _mark(self, call: Call) -> str:
        return mark_of(call.owner, call.text or "")

    def _fits(self, tokens: int) -> bool:
        """Tell whether memory holds the slots of `tokens` tokens."""
        return tokens * self.slot <= self.prefixes.memory

    def _place(self, cache: Any) -> None:
        """Move a prefix's slots into the pools of the answers, if both store the same kind of numbers."""
        layers = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
        for layer in layers:
            layer.storage = layer.storage.gathered().as_prefix()
        if cache.sequence.run.kv == self.run.kv:
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
            with of_field("kvevict.policy"):  # a policy may need more than its name, or another model
                inside.enter_context(evicting(self.model, Chosen(policy, self.run), tokenizer=False))
            inside.enter_context(within(question=question, asks=question is not None, pause=pause, learns=False))
            into = self.pools.cache() if cache is None else cache
            out = yield from reading(base_model(self.model), tokens, into)
            call.read_tokens = start + len(ids)
            return cache_of(out), out.logits[0, -1], plan_of(self.decoder)

    def _asking(self, call: Call) -> Any:
        """Return what finds the tokens that observe."""
        if call.question is not None:
            return Asked((call.question,), self.tokenizer)
        said = [each["content"] for each in call.messages if each["role"] == "user"]
        return LastTurn(self.tokenizer, said[-1] if said else call.prompt)

    def _chosen(self, policy: Any, tokens: int) -> Any:
        """Change a policy to fit a prompt of `tokens` tokens. Raises Refused where too few positions are left to repeat
        the prompt."""
        if policy.rows.repeats and self.context and (policy.threshold is not None or policy.slots(tokens) < tokens):
            if self.context - tokens < SHORTEST_CHUNK:
                raise Refused(
                    400,
                    f"after {tokens} tokens too few of the model's {self.context} positions are left to repeat them, "
                    f"which needs {SHORTEST_CHUNK}: shorten the prompt, or give a kvevict.policy that reads once",
                    "context_length_exceeded",
                )
            policy = within_positions(policy, self.config, tokens)
        return told(policy, self.tokenizer)
