"""The loop around the text decoder: a prompt goes through it chunk by chunk, each as [chunk | probe]."""

from itertools import pairwise

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from .. import compat
from ..analysis import diagnose
from ..policy.layers import PLENTY, layer_slots
from . import draft, host, propagate
from .cache import ROOM, EvictionLayer, adopt
from .cascade import Cascade
from .step import Probe, Read, Step, current, logits_wanted, running, top_model

OF_EVERY_TOKEN = ("output_hidden_states", "output_router_logits")  # outputs that a chunk has only its part of


class Call:
    """One call of the decoder with a cache, checked and split."""

    def __init__(self, decoder, patch, kwargs):
        self.decoder, self.patch, self.kwargs = decoder, patch, dict(kwargs)
        self.ids = self.kwargs.pop("input_ids", None)
        self.embeds = self.kwargs.pop("inputs_embeds", None)
        self.mask = self.kwargs.pop("attention_mask", None)
        self.position_ids = self.kwargs.pop("position_ids", None)
        self.return_dict = self.kwargs.pop("return_dict", getattr(decoder.config, "return_dict", True))
        self.cache = self.kwargs.pop("past_key_values", None)
        self.kwargs.pop("use_cache", None)
        if (self.ids is None) == (self.embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        tokens = self.ids if self.ids is not None else self.embeds
        self.batch, self.tokens, self.device = tokens.shape[0], tokens.shape[1], tokens.device
        if self.tokens == 0:
            held = self.cache.get_seq_length() if self.cache is not None else 0
            raise ValueError(
                "the input is empty: give at least one token"
                + (f" after the {held} that the cache holds, and an attention_mask that covers both" if held else "")
            )
        self._check_cache()
        self._check_mask()
        self.top = top_model.get()
        self.wanted = logits_wanted.get()  # rows of the last hidden state that the caller will use; 0: all
        if self._asks("output_attentions"):
            raise ValueError("output_attentions=True is not possible: kvevict never builds attention matrices")
        self._adopt_cache()
        first = self.cache.layers[next(iter(patch.order))]
        self.rolls_back = first.record_past or compat.may_roll_back(self.cache)
        if self.rolls_back and self.wanted > 1 and (patch.policy.decode or patch.policy.score.carries):
            raise ValueError(
                "assisted and prompt-lookup decoding roll tokens back, which eviction while decoding and h2o's sums "
                "cannot: pass decode=False and another policy than h2o or vatp, or generate without an assistant"
            )

    def _check_cache(self):
        if self.cache is None:
            self.cache = DynamicCache(config=self.decoder.config)
        if not isinstance(self.cache, DynamicCache) or getattr(self.cache, "offloading", False):
            raise ValueError(
                f"past_key_values is {'an offloaded' if getattr(self.cache, 'offloading', False) else 'a'} "
                f"{type(self.cache).__name__} that kvevict cannot evict from; it works with a "
                "plain DynamicCache: drop cache_implementation and offloading"
            )
        self.columns = self.cache.get_seq_length()
        for layer in self.cache.layers:
            if isinstance(layer, EvictionLayer) and layer.is_initialized:
                if layer.columns != self.columns:
                    raise ValueError("past_key_values was left half read by an error; read the prompt into a new one")
                if layer.len.shape[0] != self.batch:
                    raise ValueError(
                        f"past_key_values holds a batch of {layer.len.shape[0]} rows, the input has {self.batch}"
                    )

    def _adopt_cache(self):
        kinds, layers = self.patch.kinds, self.cache.layers
        if len(layers) == len(kinds) and all(isinstance(layers[index], EvictionLayer) for index in self.patch.order):
            return
        first = None if self.mask is None else _left_padding(self.mask[:, : self.columns])[0]
        adopt(self.cache, kinds, self.decoder.config, first)

    def _asks(self, flag) -> bool:
        return bool(self.kwargs.get(flag, getattr(self.decoder.config, flag, False)))

    def _check_mask(self):
        mask = self.mask
        if mask is None:
            self.first = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
            self.padding = np.zeros(self.batch, np.int64)
            return
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            raise ValueError(
                "attention_mask must be a 2D tensor [batch, tokens] of zeros and ones; prepared 4D masks and mask "
                "dictionaries cannot be combined with eviction"
            )
        wanted = (self.batch, self.columns + self.tokens)
        if tuple(mask.shape) != wanted:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, expected {wanted}: it must cover the {self.columns} "
                f"tokens seen and the {self.tokens} new ones"
            )
        self.first, self.padding = _left_padding(mask[:, self.columns :])

    # -- the three kinds of calls -----------------------------------------------------------------------------------

    def decode(self, run):
        if self.padding.any():
            raise ValueError("attention_mask hides the newly decoded token; its last column must be 1")
        self._renew_budgets()
        step = self._step(0, self.tokens)
        with running(step):
            return self._run(run, 0, self.tokens)

    def _renew_budgets(self):
        """Budgets of a cache that was read under another policy, or without one."""
        policy, layers = self.patch.policy, self._layers()
        if all(layer.policy is policy for layer in layers):
            return
        self._check_groups()
        slots = layer_slots(policy, len(layers), self._heads(), layers[0].seen.tolist())
        least = policy.smallest_budget() * self._heads()
        for layer, budget in zip(layers, slots, strict=True):
            loaded = layer.policy is None and layer.budget is not None
            if not (loaded or layer.policy == policy) or layer.budget.min() < least:
                layer.budget = np.minimum(budget.numpy(), PLENTY)
            if not loaded and layer.policy != policy:
                layer.recent = None  # another policy's rows, or rows with a gap behind them
                if not policy.score.carries:
                    layer.carry = None
            layer.policy = policy

    def _layers(self):
        return [self.cache.layers[index] for index in self.patch.order]

    def _heads(self):
        return self.decoder.config.num_key_value_heads

    def _check_groups(self):
        """Layers, or a layer's heads, that share a choice must hold the same slots, as they do if they always did."""
        policy, layers = self.patch.policy, self._layers()
        if layers[0].len is None or all(layer.policy is policy for layer in layers):
            return
        for group in policy.groups(len(layers)):
            held = [layers[order].places(shared=policy.shared) for order in group if len(group) > 1 or policy.shared]
            if any(place is None or place != held[0] for place in held):
                raise ValueError(
                    "past_key_values was read under another policy, and layers or heads that are to share their choice "
                    "hold different slots; read the prompt again under this policy"
                )

    def append(self, run):
        """Tokens that may be taken back by crop(): stored as they are."""
        with running(self._step(0, self.tokens)):
            return self._run(run, 0, self.tokens)

    def read(self, run):
        patch, policy = self.patch, self.patch.policy
        patch.seconds.clear()
        patch.peak, patch.live = 0, {index: self.cache.layers[index].live_bytes() for index in patch.order}
        wanted = self.wanted
        drafted = wanted - 1 if self.rolls_back and wanted > 1 else 0  # candidates behind the prompt's end
        prompt = self.tokens - drafted
        self._check_rows(prompt, wanted - drafted)
        with patch.clock("read"):
            read = self._new_read(prompt)
        size = policy.chunk_size or prompt
        ends = list(range(prompt, 0, -size))[::-1]  # the remainder goes first, so that the last chunk is full
        inside = policy.score.span is None and not policy.score.behind  # the prompt ends with the probe
        self._check_kwargs(len(ends) + bool(drafted) + bool(read.probe_rows and not inside))
        if policy.schedule == "prompt" and len(ends) > 1:
            self._expect(ends)
        probe = self._probe(read, prompt) if read.probe_rows else None
        hidden = []
        with patch.clock("read"):
            start = 0
            for end in _progress(ends, policy.progress):
                last = end == prompt
                evicts = last or policy.schedule == "chunk"
                if evicts:
                    self._split(read, start, end)
                ends_with_probe = last and inside
                extra = None if probe is None or ends_with_probe else probe
                step = self._step(start, end, read, last, extra)
                step.ends_with_probe = ends_with_probe
                step.measured = {} if evicts and policy.layers.measures and read.cuts.any() else None
                if evicts and policy.layers.cascades and read.cuts.any():
                    step.cascade = Cascade(read)
                step.held = [] if last and policy.score.held and read.cuts.any() else None
                with running(step):
                    output = self._run(run, start, end, extra)
                if step.held:
                    draft.finish(self, run, step, end, output.last_hidden_state[:, -1:])
                if step.measured:
                    self._note_errors(read, step)
                hidden.append(output.last_hidden_state[:, : end - start])
                hidden = _tail(hidden, wanted)
                start = end
            if drafted:
                with running(self._step(start, self.tokens)):
                    output = self._run(run, start, self.tokens)
                hidden = _tail([*hidden, output.last_hidden_state], wanted)
        if read.errors is not None:
            policy.layers.learn([row for row in self._mean_errors(read) if row is not None])
        output.last_hidden_state = hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)
        with patch.clock("read"):  # the report waits for a GPU to have done the rest
            self._write_report(read)
        return output

    # -- parts --------------------------------------------------------------------------------------------------------

    def _run(self, run, start, end, extra=None):
        """The decoder over columns start..end-1 and, behind them, the probe's tokens `extra`."""
        ids, embeds = (None if t is None else t[:, start:end] for t in (self.ids, self.embeds))
        step = current()
        positions = step.positions.long()
        if extra is not None:
            ids, embeds = (None if t is None else torch.cat([t, extra.tokens], 1) for t in (ids, embeds))
        inputs = dict(input_ids=ids) if embeds is None else dict(inputs_embeds=embeds)
        return run(
            **inputs, **self.kwargs, attention_mask=self._mask_for(start, end, extra), position_ids=positions,
            past_key_values=self.cache, use_cache=True, return_dict=True,
        )  # fmt: skip

    def _mask_for(self, start, end, extra):
        """What Transformers builds its masks from. Our layers read no mask; where all layers are ours, a ready-made 4D
        mask keeps it from building one."""
        if self.patch.all_own:
            return torch.empty(1, 1, 1, 1, device=self.device)
        if self.mask is None:
            return None
        mask = self.mask[:, : self.columns + end]
        return mask if extra is None else torch.cat([mask, mask.new_ones(extra.positions.shape)], 1)

    def _step(self, start, end, read=None, last=True, extra=None):
        positions = self._positions()[:, start:end]
        transient = 0
        if extra is not None:
            transient, behind = extra.positions.shape[1], extra.positions
            if self.patch.policy.score.probe_positions == "after":
                behind = positions[:, -1:] + 1 + torch.arange(transient, device=self.device)
            positions = torch.cat([positions, behind], 1)
        return Step(
            patch=self.patch, decoder=self.decoder, cache=self.cache, positions=positions.to(torch.int32).contiguous(),
            first=(self.first - start).clamp(0, end - start + transient).to(torch.int32),
            padding=np.clip(self.padding - start, 0, end - start + transient), read=read, last=last,
            transient=transient, final_position=int(self._positions().max()) if compat.rope_depends_on_length(
                self.decoder) else None,
        )  # fmt: skip

    def _positions(self):
        if self.position_ids is None:
            row = torch.arange(self.columns, self.columns + self.tokens, device=self.device)
            self.position_ids = row[None]
        if self.position_ids.ndim != 2:
            raise ValueError("position_ids must be [batch, tokens]")
        return self.position_ids.expand(self.batch, -1)

    def _new_read(self, prompt):
        """Budgets and probe lengths of every row, from its valid tokens."""
        patch, policy = self.patch, self.patch.policy
        layer = self.cache.layers[next(iter(patch.order))]
        tokens = np.maximum(prompt - self.padding, 0)
        seen = (tokens if layer.seen is None else tokens + layer.seen.tolist()).tolist()
        warmup = np.array([policy.warmup_slots(n) for n in seen])
        read = Read(tokens=tokens, seen=seen, warmup=warmup * self._heads())
        evicts = any(n > policy.slots(n) for n in seen)
        read.behind = policy.score.prepare(self, prompt) if evicts else None
        self._check_groups()
        length, span = policy.score.length, policy.score.span
        if length:
            whole = span or policy.score.behind
            read.probe_length = np.full_like(tokens, length) if whole else np.minimum(tokens // 2, length)
            read.probe_rows = int(read.probe_length.max()) if evicts and policy.score.append else 0
            self._check_probe(read, span, length)
        for layer in self._layers():
            layer.policy = policy
            layer.recent = None  # their slots are no longer the last ones
        return read

    def _split(self, read, start, end):
        """What every layer may keep after a chunk, by what it will hold then and what earlier chunks measured."""
        policy, layers, heads = self.patch.policy, self._layers(), self._heads()
        tokens = end - np.clip(self.padding, start, end)
        alive = np.stack([
            heads * np.minimum(tokens, propagate.limit(policy, self.patch.tsp, order))
            + (0 if layer.counts is None else layer.counts.sum(1))
            for order, layer in enumerate(layers)
        ])  # fmt: skip
        read.alive = torch.from_numpy(alive)
        total = np.array([policy.slots(n) for n in read.seen]) * heads * len(layers)
        read.cuts = (alive.sum(0) > total) & (tokens > 0)
        common = policy, len(layers), heads, read.seen
        measured = self._mean_errors(read)
        read.targets = layer_slots(*common, read.alive, measured).numpy()
        free = read.targets if read.cuts.all() else layer_slots(*common, None, measured).numpy()
        for layer, mine, most in zip(layers, read.targets, free, strict=True):
            layer.budget = np.minimum(np.where(read.cuts, mine, most), PLENTY)

    def _note_errors(self, read, step):
        errors = torch.stack([step.measured[index] * step.turned.get(index, 1) for index in self.patch.order])
        if read.errors is None:
            read.errors, read.measurements = torch.zeros_like(errors), np.zeros_like(read.cuts, np.int64)
        read.errors += errors * host.upload(read.cuts, self.device, torch.bool)
        read.measurements += read.cuts

    def _mean_errors(self, read):
        """Per row the layers' mean errors over the chunks so far; None where nothing was measured."""
        if read.errors is None:
            return [None] * self.batch
        means = (read.errors.cpu() / torch.from_numpy(read.measurements.clip(1))).T.tolist()
        return [row if n else None for row, n in zip(means, read.measurements, strict=True)]

    def _check_probe(self, read, span, length):
        size = self.patch.policy.chunk_size
        if span:
            start, stop = span
            shortest = min((n for n in read.tokens if n), default=0)
            if max(stop, -start) > shortest:
                raise ValueError(f"probe=({start}, {stop}) reaches outside a prompt of {shortest} tokens")
        elif size is not None and ((read.tokens > size) & (read.probe_length < read.probe_rows)).any():
            raise ValueError(
                f"chunk_size={size} is too small for a batch with prompts shorter than {2 * length} tokens, whose "
                f"probes are shorter; give chunk_size >= {2 * length}"
            )

    def _probe(self, read, prompt):
        """The rows that read along: a part of the prompt, or what follows it."""
        if read.behind is not None:
            ids, positions = read.behind, self._positions()[:, prompt - 1 : prompt] + 1
            positions = positions + torch.arange(ids.shape[1], device=self.device)
            return Probe(ids if self.embeds is None else self.decoder.get_input_embeddings()(ids), positions)
        start, span = prompt - read.probe_rows, self.patch.policy.score.span
        if span:
            start = self.first + span[0] if span[0] >= 0 else prompt + span[0]
        start = torch.as_tensor(start, device=self.device).expand(self.batch).long()
        columns = start[:, None] + torch.arange(read.probe_rows, device=self.device)
        row = torch.arange(self.batch, device=self.device)[:, None]
        whole = self.ids if self.embeds is None else self.embeds
        return Probe(whole[row, columns], self._positions().gather(1, columns))

    def _expect(self, ends):
        for order, layer in enumerate(self._layers()):
            most = propagate.limit(self.patch.policy, self.patch.tsp, order)
            tokens = sum(min(end - start, most) for start, end in pairwise([0, *ends]))
            layer.expect((layer.longest() if layer.is_initialized else 0) + tokens + ROOM)

    def _check_rows(self, prompt, wanted):
        flags = [flag for flag in OF_EVERY_TOKEN if self._asks(flag)]
        longest = min(self.patch.policy.chunk_size or prompt, prompt - int(self.padding.min()))
        propagate.check(self.patch, longest, wanted, flags)

    def _check_kwargs(self, calls):
        for name, value in self.kwargs.items():
            if calls > 1 and isinstance(value, torch.Tensor) and value.ndim > 1 and self.tokens in value.shape:
                raise ValueError(f"{name} cannot be split into chunks; read the prompt whole with chunk_size=None")
        for flag in OF_EVERY_TOKEN:
            if calls > 1 and self._asks(flag):
                raise ValueError(f"{flag}=True needs the prompt read whole: schedule='prompt' and no chunk_size")

    def _write_report(self, read):
        layers = [layer if index in self.patch.order else None for index, layer in enumerate(self.cache.layers)]
        own = [layer for layer in layers if layer is not None]
        live = sum(layer.live_bytes() for layer in own)

        def positions(layer):
            heads = [[None] * layer.len.shape[1] for _ in range(layer.len.shape[0])]
            for b, h, rows in layer.segments():
                heads[b][h] = layer.pos[rows].clone()
            return heads

        self.patch.last_report = dict(
            seen=own[0].seen.tolist(),
            kept=[None if layer is None else layer.counts.tolist() for layer in layers],
            cache_bytes=live,
            padded_bytes=sum(layer.padded_bytes() for layer in own),
            peak_cache_bytes=max(self.patch.peak, live),
            overhead_bytes=sum(layer.allocated_bytes() for layer in own) - live,
            positions=[None if layer is None else positions(layer) for layer in layers],
        )
        if self.patch.policy.diagnose:
            own = [index if index in self.patch.order else None for index in range(len(layers))]
            self.patch.last_report["diagnostics"] = diagnose.summary(read, own)


def _left_padding(mask):
    """[B] int32 number of leading zeros of a 2D mask whose ones are all at the right, and the same on the host."""
    mask = mask.bool()
    first = (~mask).sum(1)
    *padding, wrong = torch.cat([first, (mask.int().diff(dim=1) < 0).any()[None]]).tolist()
    if wrong:
        raise ValueError("attention_mask must be left-padded (zeros first); set tokenizer.padding_side='left'")
    return first.to(torch.int32), np.array(padding)


def _tail(hidden, wanted):
    """The chunks that hold the last `wanted` rows; all of them for 0."""
    if wanted:
        while sum(h.shape[1] for h in hidden[1:]) >= wanted:
            hidden = hidden[1:]
    return hidden


def _progress(ends, show):
    if not show or len(ends) < 2:
        return ends
    from tqdm import tqdm

    return tqdm(ends, desc="reading", unit="chunk")
