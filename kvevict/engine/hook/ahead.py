"""Checked answers (docs/methods.md section 13): a model drafts an answer's next tokens over the slots that it keeps,
and one call reads them over the slots of all tokens. A driver of an answer (`generate`, `kvevict.answer`) does not see
this: it calls the model token by token, and gets the logits of that one call."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from ...context import within
from ...models.compat import CACHE
from ...policy.rows import Found
from ...policy.rows.window import Window
from ..memory.cache import EvictionCache
from ..memory.meter import Meter
from ..read.plan import Plan
from ..read.step import OF_EVERY_TOKEN

TYPES = "token_type_ids", "mm_token_type_ids"  # arguments that stay the same from token to token


class Drafts(Protocol):
    """Chooses the tokens of a draft as the driver of the answer is expected to choose them."""

    def begin(self, tokens: torch.Tensor) -> int:
        """Begin a draft after `tokens` [B, 1], which the driver chose last. Returns the number of tokens that the
        driver chooses at most from now on."""

    def drawing(self) -> AbstractContextManager:
        """A context in which draws are made, and after which the driver repeats them with the same random numbers."""

    def choose(self, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the next tokens [B] by logits [B, vocabulary] after `drafted` [B, n]."""

    def ended(self, drafted: torch.Tensor) -> bool:
        """Whether the answers of all batch rows end within `drafted` [B, n]."""


class Block(NamedTuple):
    """Tokens that a draft proposed and one call has read over the slots of all tokens."""

    cache: EvictionCache  # the cache that holds them
    tokens: torch.Tensor  # [B, n]
    output: Any  # the call's output, with logits [B, n, vocabulary]


class Ahead:
    """Answers the calls of one answer's driver, each with one token of each batch row, by logits over the slots of all
    tokens.

    A call that finds no such logits begins a block: the model drafts tokens over the slots that its layers keep, and
    the cache takes them back. Then one call reads the driver's token and the draft as a further turn, with each layer
    over the slots of all tokens, and the rows of this call choose the slots that the layers keep. Its logits answer the
    following calls as long as these bring the drafted tokens. A call with another token takes the rest of the block
    back, and begins the next block. Batch rows go on together: another token in one row ends the block for all.

    Meanwhile the cache holds the whole block, up to `rows` tokens more than the driver knows of, until `close`.
    """

    def __init__(self, rows: int, plan: Plan, drafts: Drafts, meter: Meter | None = None) -> None:
        self.rows, self.plan, self.drafts, self.meter = rows, plan, drafts, meter
        self.block: Block | None = None
        self.used = 0  # number of the block's tokens that the driver has brought

    def takes(self, tokens: object, kwargs: dict) -> bool:
        """Whether a call of the model is one of the answer, with a token [B, 1] of each row, and attends to fewer slots
        than those of all tokens."""
        cache = kwargs.get(CACHE)
        single = isinstance(tokens, torch.Tensor) and tokens.ndim == 2 and tokens.shape[1] == 1
        return single and isinstance(cache, EvictionCache) and (self._holds(cache) or cache.tiers.lost)

    def _holds(self, cache: EvictionCache) -> bool:
        return self.block is not None and self.block.cache is cache

    def answer(self, call: Callable, tokens: torch.Tensor, kwargs: dict) -> object:
        """Return the model's output after tokens [B, 1]. call: the model's forward; kwargs: its other arguments."""
        block = self.block
        if block is None or block.cache is not kwargs[CACHE] or not self._follows(block, tokens):
            self.close()
            with within(ahead=None):
                self.block = block = self._read(call, kwargs[CACHE], tokens, kwargs)
            self.used = 0
        self.used += 1
        return dataclasses.replace(block.output, logits=block.output.logits[:, self.used - 1, None])

    def _follows(self, block: Block, tokens: torch.Tensor) -> bool:
        """Whether tokens [B, 1] are those of the block that come next."""
        if self.used == block.tokens.shape[1]:
            return False
        differs = int((tokens != block.tokens[:, self.used, None]).sum())
        if self.meter is not None:
            self.meter.checked += len(tokens)
            self.meter.replaced += differs
        return not differs

    def close(self) -> None:
        """Take the tokens back that the driver did not bring. The cache then holds those that it did."""
        block, self.block = self.block, None
        if block is not None and not block.cache.sequence.half_read:
            block.cache.crop(self.used - block.tokens.shape[1])
            _record_windows(block.cache, False)

    def _read(self, call: Callable, cache: EvictionCache, tokens: torch.Tensor, kwargs: dict) -> Block:
        """Draft tokens after `tokens` [B, 1], and read both over the slots of all tokens."""
        flags = [flag for flag in OF_EVERY_TOKEN if kwargs.get(flag)]
        if flags:
            raise ValueError(f"recall_check reads several tokens in one call: leave {flags[0]} out, or recall_check")
        places, following = kwargs.get("position_ids"), cache.sequence.next_position
        if places is not None and places.ndim == 2 and following is not None:
            kwargs = kwargs | dict(position_ids=following[:, None])  # the driver counted on from a longer cache
        _record_windows(cache, True)
        drafted = self._drafted(call, cache, tokens, kwargs)
        sequence, meter, before = cache.sequence, cache.meter, cache.sequence.columns
        with within(asks=False, learns=False, question=_OfCall()):
            output = call(drafted, **_arguments(kwargs, drafted.shape[1], 0))
        sequence.floor = min(sequence.floor, before)  # the cut keeps all slots of the call, so crop() may remove them
        cache.meter = meter  # reports are of the prompt
        if meter is not None:
            self.plan.keep(meter)
        self.meter = self.meter or meter
        if self.meter is not None:
            self.meter.checks += 1
        return Block(cache, drafted, output)

    def _drafted(self, call: Callable, cache: EvictionCache, tokens: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """Draft tokens after `tokens` [B, 1]. Returns both, [B, n]; the cache holds neither. n is at least 2, since a
        call with a single token is not a turn."""
        most, drafted, sequence = max(2, min(self.rows, self.drafts.begin(tokens))), tokens, cache.sequence
        before = sequence.columns
        try:
            with self.drafts.drawing():
                for place in range(most - 1):
                    logits = call(drafted[:, -1:], **_arguments(kwargs, 1, place)).logits[:, -1]
                    drafted = torch.cat([drafted, self.drafts.choose(drafted, logits)[:, None]], 1)
                    if self.drafts.ended(drafted):
                        break
        finally:
            if not sequence.half_read:
                cache.crop(before - sequence.columns)
        return drafted


class _OfCall:
    """Lets all rows of a call choose the slots, and keeps their own (a `kvevict.asking.question.Finder`)."""

    def rows(self, arguments: object, prompt: int) -> tuple[Window, tuple[Found, ...]]:
        return Window(prompt), ()


def _arguments(kwargs: dict, tokens: int, place: int) -> dict:
    """Change the arguments of a call with one token to those of a call with `tokens` tokens, which begins `place`
    tokens later and whose logits are all wanted."""
    own = {name: value for name, value in kwargs.items() if name != "cache_position"}  # models count it themselves
    if "logits_to_keep" in own:
        own["logits_to_keep"] = 0
    if (mask := own.get("attention_mask")) is not None:
        own["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), place + tokens - 1)], 1)
    if (first := own.get("position_ids")) is not None:
        own["position_ids"] = first + place + torch.arange(tokens, device=first.device)
    for name in TYPES:
        if (kind := own.get(name)) is not None:
            own[name] = kind.expand(-1, tokens)
    return own


def _record_windows(cache: EvictionCache, on: bool) -> None:
    """Let sliding-window layers keep the rows before the window, so that tokens can be taken back; or no longer."""
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = on


@contextmanager
def checking(plan: Plan | None, drafts: Drafts, meter: Meter | None = None) -> Iterator[None]:
    """A context in which the model's calls with one token of an answer are checked, if the policy of `plan` has
    `recall_check`. meter: the `Meter` that counts the checked tokens; None: that of the cache."""
    if plan is None or plan.policy.recall_check is None:
        yield
        return
    ahead = Ahead(plan.policy.recall_check, plan, drafts, meter)
    with within(ahead=ahead):
        try:
            yield
        finally:
            ahead.close()


class Generation:
    """`Drafts` of Transformers' `generate`: draws by its settings and its logits processors."""

    def __init__(self) -> None:
        self.processors: Any = None
        self.config: Any = None
        self.ids = torch.empty(0)  # [B, n] the ids that the processors saw last

    def noted(self, processors: list, config: Any) -> list:
        """Note the prepared logits processors and settings of `generate`. Returns the processors to use. Raises
        ValueError for a way of generating that is not checked."""
        if config.num_beams > 1:
            raise ValueError(
                f"num_beams={config.num_beams}: recall_check checks greedy and sampled answers alone: leave one of the "
                "two out"
            )
        self.processors, self.config = processors, config
        return type(processors)([*processors, self._seen])

    def _seen(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.ids = ids
        return scores

    def begin(self, tokens: torch.Tensor) -> int:
        if not self.ids.numel():  # a prompt of one token, which no processor has seen
            self.ids = tokens[:, :0]
        return self.config.max_length - self.ids.shape[1] - 1

    def drawing(self) -> AbstractContextManager:
        if not self.config.do_sample:
            return nullcontext()
        return torch.random.fork_rng([self.ids.device] if self.ids.is_cuda else [])

    def choose(self, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([self.ids, drafted.to(self.ids.device)], 1)
        scores = self.processors(ids, logits.to(ids.device, torch.float32, copy=True))
        if self.config.do_sample:
            tokens = torch.multinomial(scores.softmax(-1), 1)[:, 0]
        else:
            tokens = scores.argmax(-1)
        pad = self.config._pad_token_tensor
        if pad is not None:
            tokens = torch.where(self._ends(drafted[:, -1]), pad, tokens)
        return tokens.to(drafted.device)

    def ended(self, drafted: torch.Tensor) -> bool:
        return bool(self._ends(drafted[:, -1]).all())

    def _ends(self, tokens: torch.Tensor) -> torch.Tensor:
        """bool [B]: rows whose newest token ends the answer, or pads an answer that has ended."""
        ends = [self.config._eos_token_tensor, self.config._pad_token_tensor]
        ends = [each.view(-1) for each in ends if each is not None]
        return torch.isin(tokens, torch.cat(ends)) if ends else torch.zeros_like(tokens, dtype=torch.bool)
