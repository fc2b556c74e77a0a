"""How LAQ drafts: a prompt is read with nothing evicted, a copy of its cache that SnapKV has cut writes a few tokens,
and the rows that these had then take part in choosing the slots."""

import copy
from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from .. import _ops, compat
from ..policy.policy import Policy
from ..policy.scores.laq import head
from ..policy.scores.snapkv import SnapKV
from . import evict
from .cache import EvictionLayer
from .step import Probe, Step, running


@dataclass(frozen=True)
class _FirstCut(SnapKV):
    """SnapKV with a window of at most half of what a layer keeps, so that a small budget holds more than a window."""

    def protect(self, view):
        return 0, (view.budget // 2).clamp(1, self.window)

    def score(self, view):
        return view.attention(rows=self.window, reduce="sum", rows_of_row=self.protect(view)[1])


class _DraftLayer(EvictionLayer):
    """The slots of `choice` in [stored | new] of a view, copied; notes the rows that are decoded over them."""

    def __init__(self, view, choice):
        super().__init__()
        index, keep = choice
        self.lazy_initialization(view.k)
        self._allocate(keep + view.policy.score.n_d)
        self._move(view.layer._stored(), index, keep, view.k, view.v, view.pos, view.first)
        self.columns, self.seen = view.layer.columns, view.layer.seen
        self.rows = []  # (q [B, H, 1, D], k, v [B, Hkv, 1, D]) of each

    def decode(self, q, k, v, pos, **options):
        self.rows.append((q, k, v))
        return super().decode(q, k, v, pos, **options)


def finish(call, run, step, end, hidden) -> None:
    """The end of a read whose layers wait: draft, and let every layer choose with the drafted rows too.

    hidden [B, 1, E] is that of the prompt's last column, end - 1; `step.held` has the layers' views.
    """
    held, step.held = step.held, None
    try:
        caches = _drafted(call, run, step, end, hidden, held)
        step.transient = call.patch.policy.score.n_d
        for view in held:
            _append(view, caches[view.index].rows, call.patch.policy.score.draft_keys)
            caches[view.index] = None
            with call.patch.clock("evict"):
                evict.after_chunk(view)
    except BaseException:
        held[-1].layer.columns = -1  # half read, which the cache's next user is told
        raise


def _drafted(call, run, step, end, hidden, held) -> list:
    """The layers of an evicted copy of the cache, over which tokens were drafted."""
    patch = call.patch
    with patch.clock("draft"):
        quiet = copy.copy(patch)  # what is drafted leaves no trace in the report
        quiet.policy, quiet.seconds, quiet.live = Policy(score=_FirstCut(), budget=2**30), defaultdict(float), {}
        cache = copy.copy(call.cache)
        cache.layers = [copy.copy(layer) for layer in call.cache.layers]
        for view in held:
            cache.layers[view.index] = _DraftLayer(view, _first_choice(view, quiet))
        _write(call, run, step, end, hidden, cache, quiet)
        patch.live["draft"] = sum(cache.layers[view.index].live_bytes() for view in held)
        patch.watch_peak(step, *held)
        del patch.live["draft"]
    return cache.layers


def _first_choice(view, quiet):
    """SnapKV's choice under the layer's slots, its heads alike."""
    view = copy.copy(view)
    view.step, view.select = replace(view.step, patch=quiet), quiet.policy.select
    slots = evict.within(view, view.step.read.targets[view.order])
    return evict.choose(view, evict.ranked(view, quiet.policy.score.score(view)), slots)


def _write(call, run, step, end, hidden, cache, quiet) -> None:
    """Draft greedily over `cache`, whose layers note their rows; past an end of sequence too."""
    logits, at, none = head(call), step.positions[:, -1:], torch.zeros_like(step.first)
    for number in range(1, call.patch.policy.score.n_d + 1):
        ids, at = logits(hidden).argmax(-1), at + 1
        final = int(at.max()) if compat.rope_depends_on_length(call.decoder) else None
        mask = call._mask_for(0, end, Probe(ids, at.expand(-1, number)))  # over all that were drafted so far
        with running(Step(quiet, call.decoder, cache, at, none, 0 * step.padding, final_position=final)):
            hidden = run(
                input_ids=ids, attention_mask=mask, position_ids=at.long(), past_key_values=cache, use_cache=True,
                return_dict=True,
            ).last_hidden_state  # fmt: skip


def _append(view, rows, keys: bool) -> None:
    """Put drafted rows behind the view's own, as rows that read along; with `keys` they see each other's slots too."""
    q, k, v = (torch.cat(part, 2) for part in zip(*rows, strict=True))
    lse = view.lse.new_zeros(q.shape[:3])  # not read without keys
    if keys:
        layer, k, v = view.layer, torch.cat([view.k, k], 2), torch.cat([view.v, v], 2)
        _, lse = _ops.attend(q, layer.k, layer.v, layer.offset, layer.len, k, v, view.first, **view.options)
    view.q, view.lse = torch.cat([view.q, q], 2), torch.cat([view.lse, lse], 2)
