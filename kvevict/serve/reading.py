"""Reads prompts in the thread that owns the model. Each prompt is read from the end of its longest stored prefix on."""

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
from ..policy.reach import reach, sizes_of
from ..policy.tokenizer import told
from .beginnings import Beginnings, facts_of, mark_of
from .call import Call
from .errors import Refused, of_field
from .prefixes import Prefixes, shares_of
from .sampling import LONG
from .scheduler import Scheduler

SHORTEST = 256  # least tokens of a prefix that prompts share
BLOCK = 64  # tokens from one possible end of a prefix in a file to the next; in memory, of a prompt's last tokens
FURTHER = 256  # least tokens of a prompt that were read after a stored prefix for the prompt to be stored
PIECE = 2048  # tokens of a stored text that are read and stored at once; a multiple of BLOCK
WRITTEN = 1024  # least tokens of a prefix that is written to disk when another prompt begins with it


class Reader:
    """Reads the prompts of calls with a patched model. The policy that the model was patched with sets the size of the
    pools of slots, and its `Run` is used for all calls. A method that reads is a generator: it yields the step of each
    chunk but the last, so that the scheduler can serve other calls between chunks."""

    def __init__(self, model: Module, tokenizer: Tokenizer, prefixes: Prefixes, scheduler: Scheduler) -> None:
        self.model, self.tokenizer, self.prefixes, self.scheduler = model, tokenizer, prefixes, scheduler
        self.decoder, self.device = find_decoder(model), device_of(model)
        self.config = self.decoder.config
        self.weights = f"{identity(self.decoder)} in {base_model(model).dtype}"
        self.context = context_of(self.config)
        plan = plan_of(self.decoder)
        self.run, self.slot = plan.run, slot_bytes(model, plan.run.kv)
        self.sizes = sizes_of(self.decoder, plan.run.kv)
        most, memory = self._widest(plan.policy, self.context or 1 << 20) + ROOM, scheduler.memory // self.slot
        slots = 2 * (scheduler.most + 1) * most  # twice: an answer that outgrows its region is copied to another
        self.pools = Pools(self.decoder, plan.kv_heads * (min(slots, memory) + memory))
        prefixes.place = self._place
        # Whether a cache can be cut to a prefix, which recurrent states and sliding windows cannot.
        self.parts = set(layer_kinds(self.config)) <= {FULL_ATTENTION, NOTHING}
        self.shares: dict[str, np.ndarray] = {}  # mark of a stored text -> its `shares_of` for the last question

    def beginnings(self, call: Call) -> tuple[Beginnings, ...]:
        """Return what identifies the beginnings that a call's prompt may have in common with other prompts: of the
        prompt itself, and, if it names a stored text, of a prompt that contains the text instead, up to the text's end.
        () if the prompt shares nothing."""
        if not call.policy.recall or call.question is not None:
            return ()
        ids, text, facts = call.whole.ids, call.whole.text, facts_of(call.owner, self.weights, call.policy, self.run)
        ends = [*range(SHORTEST, len(ids), BLOCK)] if self.parts else []
        last = len(ids) - BLOCK  # the last tokens are read again: their queries may choose slots
        free = range(SHORTEST, last + 1 if self.parts else 0)
        if text is None:
            return (Beginnings(facts, ids, ends, free),)
        start, stop = text
        ends = sorted({*ends, stop})
        inner = [end for end in ends if end <= stop]
        pasted = Beginnings(facts, ids[: stop + 1], inner, range(SHORTEST, stop if self.parts else 0))
        return Beginnings(facts, ids, ends, free, self._mark(call), start), pasted

    def kept(self, call: Call) -> np.ndarray:
        """Return, for each token of a call's stored text, the share of kv heads that kept its slot for the last
        question about the text; 1 for every token before the first question."""
        start, stop = call.whole.text or (0, 0)
        return self.shares.get(self._mark(call), np.ones(stop - start))

    def _widest(self, policy: Policy, tokens: int) -> int:
        """Return the most slots that a kv head holds while a prompt of `tokens` tokens is read."""
        slots = max(policy.slots(tokens), policy.recalling.slots(tokens))
        return min(tokens, slots + (policy.chunk_size or tokens))

    def _reaches(self, policy: Policy, tokens: int) -> bool:
        """Return whether an answer to a prompt of `tokens` tokens attends to the slots of all tokens."""
        near = self.run.is_near(self.device.type)
        return bool(policy.recall) and reach(policy, near, tokens, self.sizes).every

    def size(self, call: Call, new: int) -> int:
        """Return the most bytes of slots that an answer of `new` tokens needs, its prompt's slots included. Those that
        it shares with a stored prefix count there."""
        tokens, check = len(call.whole.ids), call.policy.recall_check
        if self._reaches(call.policy, tokens):
            return self.slot * (tokens - max(call.stored_tokens, self.prefixes.known(*call.beginnings)) + new)
        archive = 0 if check is None else tokens + new + check
        return self.slot * (self._widest(call.policy, tokens) + new + archive)

    def together(self) -> int:
        """Return how many answers to prompts that fill the model's context can be written at once."""
        tokens, policy, memory = self.context or 1 << 20, plan_of(self.decoder).policy, self.scheduler.memory
        held = self._widest(policy, tokens)
        if self._reaches(policy, tokens):
            held, memory = tokens, 2 * memory  # the prompts' slots are those of stored prefixes, which have as much
        return max(1, min(self.scheduler.most, memory // (self.slot * (held + min(LONG, tokens)))))

    def store(self, call: Call) -> Generator[Step, None, None]:
        """Read a call's stored text, and write its slots to disk, where they outlive this process."""
        if call.beginnings and call.whole.text is not None:
            cache, _ = yield from self._text(call, *self._known(call))
            self.prefixes.write(call.beginnings[0], call.whole.text[1], cache)

    def read(self, call: Call) -> Generator[Step, None, tuple]:
        """Read a call's prompt from the end of its longest stored prefix on, and store the prompt if much of it is new.
        Returns (cache, logits of the prompt's last token, plan of the policy)."""
        prompt, tokens = call.whole, len(call.whole.ids)
        cache, start = self._known(call)
        if prompt.text is not None and call.beginnings:
            cache, start = yield from self._text(call, cache, start)
        policy, asks = self._chosen(call.policy, tokens), self._asking(call)
        cache, logits, plan = yield from self._through(call, policy, cache, prompt.ids[start:], start, asks)
        own = call.beginnings[:1] if self.parts and tokens - start >= FURTHER and self._fits(tokens) else ()
        for each in own:
            if each.filed(tokens):  # not a prompt of `SHORTEST` tokens
                self.prefixes.put(each, tokens, cache.recalled().first(tokens))
        if prompt.text is not None:
            self.shares[self._mark(call)] = shares_of(cache, *prompt.text)
        if policy.recall_check is None:  # else the answer is checked over the slots of all tokens
            cache.tiers.end()
        return cache, logits, plan

    def _known(self, call: Call) -> tuple[EvictionCache | None, int]:
        """Return (fork of the cache of the prompt's longest stored prefix, number of the prefix's tokens); (None, 0) if
        none is stored. Prefixes up to the stored text's end are also found if they were stored for a prompt that
        contained the text itself."""
        cache, start = None, 0
        for each in call.beginnings:
            longer, end = self.prefixes.get(each, start)
            if longer is None:
                continue
            cache, start = longer, end
            if each is call.beginnings[0] and end >= WRITTEN:  # other servers, and this one after a restart, find it
                self.prefixes.write(each, end, cache)
        call.cached_tokens = start
        return cache, start

    def _text(self, call: Call, cache: EvictionCache | None, start: int) -> Generator[Step, None, tuple]:
        """Read a call's prompt from token `start` to the end of its stored text, without a question. Returns (cache,
        number of its tokens). The cache is stored after every `PIECE` tokens, so that the next request can continue if
        this request ends early."""
        (_, end), own = call.whole.text or (0, 0), call.beginnings[0]
        pieces = range(start // PIECE * PIECE + PIECE, end, PIECE) if self.parts else ()
        for stop in [*pieces, *([end] if start < end else [])]:
            policy = self._chosen(call.policy, stop)
            cache, _, _ = yield from self._through(call, policy, cache, call.whole.ids[start:stop], start)
            whole = cache.recalled()
            if self._fits(stop):
                self.prefixes.put(own, stop, whole)
            cache, start = whole.fork(), stop
            if stop == end:
                self.prefixes.write(own, end, whole)
                self.prefixes.tell(own, end, end * self.slot)
        return cache, start

    def _mark(self, call: Call) -> str:
        return mark_of(call.owner, call.text or "")

    def _fits(self, tokens: int) -> bool:
        """Return whether the slots of `tokens` tokens fit in the memory for prefixes."""
        return tokens * self.slot <= self.prefixes.memory

    def _place(self, cache: EvictionCache) -> None:
        """Move the slots of a stored prefix into the pools that hold the slots of answers, if prefixes and answers
        store slots as the same kind (`Run.kv`)."""
        layers = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
        for layer in layers:
            layer.hold(layer.storage.gathered().as_prefix(), layer.head_offsets)
        if cache.sequence.run.kv == self.run.kv:
            self.pools.hold(cache)

    def _through(
        self, call: Call, policy: Policy, cache: EvictionCache | None, ids: list[int], start: int,
        question: Asked | LastTurn | None = None,
    ) -> Generator[Step, None, tuple]:  # fmt: skip
        """Read `ids`, the prompt's tokens from index `start` on. Returns (cache, logits of the last token, plan of the
        policy). Between two layers, running answers may get a token. cache: the cache of the tokens before `start`;
        None: `start` is 0."""

        def pause() -> None:
            chunk = current().chunk
            call.reads(start if chunk is None else start + chunk.start)
            self.scheduler.pause()

        tokens = torch.tensor([ids], device=self.device)
        with contextlib.ExitStack() as inside:
            with of_field("kvevict.policy"):  # its errors: options are missing, or the model does not suit
                inside.enter_context(evicting(self.model, Chosen(policy, self.run), tokenizer=False))
            inside.enter_context(within(question=question, asks=question is not None, pause=pause, learns=False))
            into = self.pools.cache() if cache is None else cache
            out = yield from reading(base_model(self.model), tokens, into)
            call.read_tokens = start + len(ids)
            return cache_of(out), out.logits[0, -1], plan_of(self.decoder)

    def _asking(self, call: Call) -> Asked | LastTurn:
        """Return the finder of the call's question, the tokens in the prompt whose queries score the slots."""
        if call.question is not None:
            return Asked((call.question,), self.tokenizer)
        turns = [each["content"] for each in call.messages if each["role"] == "user"]
        return LastTurn(self.tokenizer, turns[-1] if turns else call.prompt)

    def _chosen(self, policy: Policy, tokens: int) -> Policy:
        """Return the policy adapted to the tokenizer and to a prompt of `tokens` tokens. Raises Refused if the policy
        repeats the prompt and the model has too few positions left for the repetition."""
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
