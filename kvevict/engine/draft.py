"""How a model drafts for itself (LAQ): a prompt is read with nothing evicted, a copy of its cache that SnapKV has cut
writes a few tokens, and the rows that these had then observe (`View.drafted_rows`)."""

import copy
from dataclasses import dataclass, replace

import torch

from .. import families
from ..policy.policy import Policy
from ..policy.rows.drafted import head
from ..policy.rows.window import Window
from . import evict
from .adopt import StatefulLayer
from .cache import EvictionLayer, fit
from .choosers import Chooser
from .latent import LatentLayer
from .meter import Meter
from .step import Step, enter
from .view import View


@dataclass(frozen=True)
class _FirstWindow(Window):
    """A window of at most half of what a layer keeps, so that a small budget holds more than a window."""

    def observers(self, view):
        return [view.chunk_rows(self.window, self.protect(view))]

    def protect(self, view):
        return (view.budget // 2).clamp(1, self.window)


FIRST_CUT = Policy(score="snapkv", rows=_FirstWindow(), budget=2**30)


class _DraftLayer(EvictionLayer):
    """The slots of `choice` in [stored | new] of a view, copied; notes the rows that are decoded over them."""

    def __init__(self, view, choice, room):
        super().__init__()
        self.lazy_initialization(view.new[0])
        kept = choice.index, choice.keep, *view.new, view.pos, view.first
        self.storage = view.layer.storage.gathered().moved(choice.keep + room, *kept)
        self.columns, self.seen = view.layer.columns, view.layer.seen
        self.rows = []  # (q [B, H, 1, D], k, v [B, Hkv, 1, D]) of each

    def decode(self, q, k, v, pos, module, **options):
        self.rows.append((q, k, v))
        return super().decode(q, k, v, pos, module, **options)


class _StatefulDraftLayer(_DraftLayer, StatefulLayer):
    """One with a copy of the state too, which is updated in place."""

    def __init__(self, view, choice, room):
        super().__init__(view, choice, room)
        self.state = copy.deepcopy(view.layer.state)


class _LatentDraftLayer(_DraftLayer, LatentLayer):
    """One of latents; notes every head's keys and values of the rows."""

    def __init__(self, view, choice, room):
        super().__init__(view, choice, room)
        self.widths = view.layer.widths

    def decode(self, q, k, v, pos, module, **options):
        whole = torch.cat([k, v], -1)[..., : sum(self.widths)]
        self.rows.append((q, *fit(*module.expand_kv(*whole.split(self.widths, -1)))))
        return LatentLayer.decode(self, q, k, v, pos, module, **options)


DRAFT_LAYERS = {EvictionLayer: _DraftLayer, StatefulLayer: _StatefulDraftLayer, LatentLayer: _LatentDraftLayer}


class _Watch(Chooser):
    """A draft's step: only what TADA measures of its rows is of interest."""

    def __init__(self, errors):
        self.errors = errors


class Drafting(Chooser):
    """Layers wait until tokens were drafted; then `chooser` sees them in order."""

    def __init__(self, chooser):
        self.chooser, self.errors, self.views = chooser, chooser.errors, []

    held = property(lambda self: len(self.views))

    def layer(self, view):
        """Wait, with no more than the rows that observe the prompt."""
        rows = max(FIRST_CUT.rows.window, view.policy.rows.window)
        view.q, view.lse = view.q[:, :, -rows:].clone(), view.lse[:, :, -rows:].clone()
        view.out = view.out[:, -rows:].clone() if view.policy.wants_outputs else None
        view.__dict__.pop("slots", None)
        self.views.append(view)

    def end(self, chunk_end):
        views, self.views = self.views, []
        caches = self._drafted(chunk_end, views)
        for view in views:
            rows, caches[view.index] = caches[view.index].rows, None
            view.state["drafted"] = tuple(torch.cat(part, 2) for part in zip(*rows, strict=True))
            with view.step.meter.clock("evict"):
                self.chooser.layer(view)
            del view.state["drafted"]

    def _drafted(self, chunk_end, views) -> list:
        """The layers of an evicted copy of the cache, over which tokens were drafted."""
        step, meter, n_d = chunk_end.step, chunk_end.step.meter, chunk_end.step.patch.policy.rows.n_d
        with meter.clock("draft"):
            quiet = copy.copy(step.patch)
            quiet.policy = replace(FIRST_CUT, keep_first=step.patch.policy.keep_first)
            cache = copy.copy(step.cache)
            copied = {families.STATE: copy.deepcopy}  # a state is updated in place
            cache.layers = [
                copied.get(kind, copy.copy)(layer)
                for kind, layer in zip(step.patch.kinds, step.cache.layers, strict=True)
            ]
            unseen = Meter()  # what is drafted leaves no trace in the report
            for view in views:
                kind = DRAFT_LAYERS[type(view.layer)]
                cache.layers[view.index] = kind(view, _first_choice(view, quiet, unseen), n_d)
            self._write(chunk_end, cache, quiet, unseen, n_d)
            meter.live["draft"] = sum(cache.layers[view.index].live_bytes() for view in views)
            meter.watch(views[0], len(views))
            del meter.live["draft"]
        return cache.layers

    def _write(self, chunk_end, cache, quiet, meter, n_d) -> None:
        """Draft greedily over `cache`, whose layers note their rows; past an end of sequence too."""
        step, request, hidden = chunk_end.step, chunk_end.request, chunk_end.hidden
        logits, at, none = head(request.top), step.positions[:, -1:], torch.zeros_like(step.first)
        for number in range(1, n_d + 1):
            ids, at = logits(hidden).argmax(-1), at + 1
            final = int(at.max()) if families.rope_depends_on_length(step.decoder) else None
            mask = request.mask_for(step.chunk.end, number)  # over all that were drafted so far
            one = Step(
                quiet, step.decoder, cache, meter, at, none, 0 * step.padding, _Watch(self.errors), final_position=final
            )
            enter(one)
            hidden = chunk_end.run(
                input_ids=ids, attention_mask=mask, position_ids=at.long(), past_key_values=cache, use_cache=True,
                return_dict=True,
            ).last_hidden_state  # fmt: skip


def _first_choice(view, quiet, meter):
    """SnapKV's choice under the layer's slots, its heads alike."""
    step = replace(view.step, patch=quiet, meter=meter)
    first = View(step, view.layer, view.index, view.module, view.q, view.k, view.v, view.out, view.lse, view.options,
                 new=view.new)  # fmt: skip
    slots = evict.within(first, view.step.read.budgets.targets[view.order])
    return evict.choose(first, evict.ranked(first, FIRST_CUT.score.score(first)), slots)
