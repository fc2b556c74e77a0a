"""Reads prompts in the thread that owns the model, each from the end of its longest stored beginning on."""

import contextlib
from collections.abc import Generator

import numpy as np
import torch
from torch.nn import Module

from ..answering.answer import SHORTEST as SHORTEST_CHUNK
from ..answering.answer import within_positions
from ..answering.batch import Pools
from ..asking.prompts import Tokenizer
from ..asking.question import Asked, LastTurn
from ..context import current, within
from ..engine.hook.forward import reading
from ..engine.hook.installed import plan_of
from ..engine.memory.cache import EvictionCache
from ..engine.memory.layer import EvictionLayer
from ..engine.memory.storage import ROOM
from ..engine.read.step import Step
from ..models.compat import cache_of
from ..models.families import FULL_ATTENTION, NOTHING, base_model, context_of, device_of, find_decoder, layer_kinds
from ..models.weights import identity
from ..patch import evicting, slot_bytes
from ..policy.building import Chosen
from ..policy.policy import Policy
from ..policy.tokenizer import told
from .call import Call
from .errors import Refused, of_field
from .prefixes import Prefixes, keys_of, mark_of, shares_of, unmarked
from .scheduler import Scheduler

SHORTEST = 256  # tokens of the shortest beginning that prompts share
BLOCK = 64  # a shared beginning may end every `BLOCK` tokens
FURTHER = 256  # least tokens after a stored beginning for a longer one to be stored
PIECE = 2048  # tokens of a stored text that are read and stored at once; a multiple of BLOCK
WRITTEN = 1024  # least tokens of a beginning that is written to disk when it comes again


class Reader:
    """Reads the prompts of calls with a patched model, whose policy sizes the pools and whose run all calls share. A
    method that reads is a generator of all chunks but the last, so that other calls get turns between chunks."""

    def __init__(self, model: Module, tokenizer: Tokenizer, prefixes: Prefixes, scheduler: Scheduler) -> None:
        self.model, self.tokenizer, self.prefixes, self.scheduler = model, tokenizer, prefixes, scheduler
        self.decoder, self.device = find_decoder(model), device_of(model)
        self.config = self.decoder.config
        self.weights = f"{identity(self.decoder)} in {base_model(model).dtype}"
        self.context = context_of(self.config)
        plan = plan_of(self.decoder)
        self.run, self.slot = plan.run, slot_bytes(model, plan.run.kv)
        most, memory = self._widest(plan.policy, self.context or 1 << 20) + ROOM, scheduler.memory // self.slot
        slots = 2 * (scheduler.most + 1) * most  # twice, for answers that outgrow their region and are copied
        self.pools = Pools(self.decoder, plan.kv_heads * (min(slots, memory) + memory))
        prefixes.place = self._place
        # Whether a cache can be cut to its first tokens, which a state or a window cannot.
        self.parts = set(layer_kinds(self.config)) <= {FULL_ATTENTION, NOTHING}
        self.shares: dict[str, np.ndarray] = {}  # mark of a stored text -> its `shares_of` for the last question

    def keys(self, call: Call) -> dict[int, str]:
        """Make the keys of the beginnings that a call's prompt may share with other prompts, by their ends."""
        if not call.policy.recall or call.question is not None:
            return {}
        prompt = call.whole
        ends, start = set(range(SHORTEST, len(prompt.ids), BLOCK)) if self.parts else set(), len(prompt.ids)
        if prompt.text is not None:
            start, end = prompt.text
            ends.add(end)
        return keys_of(call.owner, self.weights, call.policy, self.run, prompt.ids, sorted(ends), call.text, start)

    def kept(self, call: Call) -> np.ndarray:
        """Return the share of heads that kept each token of a call's stored text for the last question about the text;
        ones before the first question."""
        start, stop = call.whole.text or (0, 0)
        return self.shares.get(self._mark(call), np.ones(stop - start))

    def _widest(self, policy: Policy, tokens: int) -> int:
        """Return the most slots of a head while a prompt of `tokens` tokens is read."""
        slots = max(policy.slots(tokens), policy.recalling.slots(tokens))
        return min(tokens, slots + (policy.chunk_size or tokens))

    def size(self, call: Call, new: int) -> int:
        """Return the most bytes that the slots of an answer of `new` tokens may take, its prompt's included."""
        return self.slot * (self._widest(call.policy, len(call.whole.ids)) + new)

    def store(self, call: Call) -> Generator[Step, None, None]:
        """Read a call's stored text, and write its slots to disk, where they outlive this process."""
        if call.keys:
            cache, end = yield from self._text(call, *self._known(call))
            self.prefixes.write(call.keys[end], cache)

    def read(self, call: Call) -> Generator[Step, None, tuple]:
        """Read what follows the longest stored beginning of a call's prompt. Returns what `_through` does."""
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

    def _known(self, call: Call) -> tuple[EvictionCache | None, int]:
        """Return a fork of the cache of the prompt's longest stored beginning, and its number of tokens; (None, 0)
        without one. A stored text may also have come, and been cached, as the text of a prompt."""
        _, stop = call.whole.text or (0, 0)
        pasted = unmarked(call.keys) if stop else {}
        for end in reversed(call.keys):
            cache = self.prefixes.get(call.keys, end)
            if cache is not None and end >= WRITTEN:  # for other servers, and for this one after a restart
                self.prefixes.write(call.keys[end], cache)
            if cache is None and end <= stop:
                cache = self.prefixes.get(pasted, end)
            if cache is not None:
                call.cached_tokens = end
                return cache, end
        return None, 0

    def _text(self, call: Call, cache: EvictionCache | None, start: int) -> Generator[Step, None, tuple]:
        """Read a call's stored text from token `start` on, without a question. Returns the cache and its end. Each
        piece is stored, so that a request that ends early leaves it to the next request."""
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
        """Return whether memory may hold the slots of `tokens` tokens."""
        return tokens * self.slot <= self.prefixes.memory

    def _place(self, cache: EvictionCache) -> None:
        """Move a prefix's slots into the pools of the answers, if both store the same kind of slots."""
        layers = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
        for layer in layers:
            layer.storage = layer.storage.gathered().as_prefix()
        if cache.sequence.run.kv == self.run.kv:
            self.pools.hold(cache)

    def _through(
        self, call: Call, policy: Policy, cache: EvictionCache | None, ids: list[int], start: int,
        question: Asked | LastTurn | None = None,
    ) -> Generator[Step, None, tuple]:  # fmt: skip
        """Read ids, the prompt's tokens from number `start` on. Returns (cache, logits of the last token, plan of the
        policy). Running answers get tokens between the layers."""

        def pause() -> None:
            chunk = current().chunk
            call.reads(start if chunk is None else start + chunk.start)
            self.scheduler.pause()

        tokens = torch.tensor([ids], device=self.device)
        with contextlib.ExitStack() as inside:
            with of_field("kvevict.policy"):  # the policy may need options, or another model
                inside.enter_context(evicting(self.model, Chosen(policy, self.run), tokenizer=False))
            inside.enter_context(within(question=question, asks=question is not None, pause=pause, learns=False))
            into = self.pools.cache() if cache is None else cache
            out = yield from reading(base_model(self.model), tokens, into)
            call.read_tokens = start + len(ids)
            return cache_of(out), out.logits[0, -1], plan_of(self.decoder)

    def _asking(self, call: Call) -> Asked | LastTurn:
        """Return the finder of the prompt's tokens that observe."""
        if call.question is not None:
            return Asked((call.question,), self.tokenizer)
        turns = [each["content"] for each in call.messages if each["role"] == "user"]
        return LastTurn(self.tokenizer, turns[-1] if turns else call.prompt)

    def _chosen(self, policy: Policy, tokens: int) -> Policy:
        """Fit a policy to the tokenizer and to a prompt of `tokens` tokens. Raises Refused if the policy repeats the
        prompt, and too few positions are left for that."""
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
