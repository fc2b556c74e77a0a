"""Reading a prompt and decoding under a policy: slow, in float64, from METHODS alone (sections 0, 1, 3, 4, 5
and 7).

One batch row at a time, over an unpatched Transformers model with another attention function. Every key and value ever
computed stays in memory; eviction only takes numbers out of lists. "Token t" is the t-th token that the row has seen,
so it is also the position it was rotated with.
"""

import contextlib
import copy
import functools
import math
from dataclasses import dataclass, field
from fractions import Fraction

import oracle_cake
import oracle_drafted
import oracle_pool
import oracle_rows
import oracle_scores
import oracle_values
import torch
from oracle_rows import LATER
from transformers import AttentionInterface

from kvevict.policy.text import parse_policy

DEFAULTS = dict(chunk_size=None, schedule="prompt", decode=False, interval=16, warmup_layers=None, warmup_budget=None)
DEFAULTS |= dict(keep_prompt=False, keep_first=0)
DEFAULTS |= dict(layers="uniform", errors=None, heads="equal", f=0.2, floor="mix")
DEFAULTS |= dict(least=4, threshold=None, keep_last=128)
DEFAULTS |= dict(select="token", c=10, per_head=False, exact=True, over_kept=False, select_by_layer=(), n_reuse=1)
DEFAULTS |= oracle_scores.DEFAULTS
_ONLINE = dict(schedule="chunk", chunk_size=4096, decode=True, interval=1)
_ASKED = dict(score="edie", schedule="chunk", rows="probe", kernel=31, pool="avg", keep_first=4)
_TAKE = dict(score="take", schedule="chunk", chunk_size=4096, warmup_layers="half")
_EDIE = dict(score="edie", heads="flat")
PRESETS = {
    "streaming": dict(score="streaming", **_ONLINE),
    "h2o": dict(score="h2o", **_ONLINE),
    "tova": dict(score="tova", **_ONLINE),
    "snapkv": dict(score="snapkv"),
    "fastkv": dict(score="fastkv"),  # with tsp=None; `oracle_fastkv` has the rest, also of take+edie/half
    "knorm": dict(score="knorm"),
    "keydiff": dict(score="keydiff"),
    "oracle": dict(score="oracle"),
    "take": _TAKE,
    "take+caote": _TAKE | dict(refine="caote"),
    "take+chunkkv": _TAKE | dict(select="chunk"),
    "take+edie": _ASKED | dict(chunk_size=4096),
    "take+edie/half": _ASKED | dict(chunk_size=512),
    "adakv": dict(score="snapkv", heads="ada"),
    "pyramidkv": dict(score="snapkv", layers="pyramid"),
    "chunkkv": dict(score="snapkv", pool="none", select="chunk"),
    "cake": dict(score="cake", layers="cake"),
    "edie": _EDIE,
    "edie-exact": _EDIE | dict(score="edie-exact"),
    "vatp": dict(score="vatp"),
    "kvzip": dict(score="kvzip", heads="flat", layers="pool", schedule="chunk", chunk_size=512),
    "kvzip+": dict(score="kvzip+", heads="flat", layers="pool", schedule="chunk", chunk_size=512),
    "read-twice": dict(score="kvzip", heads="flat", layers="pool", schedule="chunk", chunk_size=1024),
    "read-once": dict(score="compactor", heads="flat", schedule="chunk", chunk_size=512),
    "gate": dict(score="gate", heads="flat", layers="pool", schedule="chunk", chunk_size=512),
    "expected": dict(score="expected", heads="ada"),
    "defensive": dict(score="defensive", heads="ada"),
    "compactor": dict(score="compactor"),
    "tri": dict(score="tri", decode=True, interval=128, keep_prompt=True),
    "rkv": dict(score="rkv", decode=True, interval=128),
    "lagkv": dict(score="lagkv"),
    "paasvn": dict(score="paasvn", heads="ada"),
    "laq": dict(score="laq"),
    "speckv": dict(score="speckv", n_d=9, window=32),
}
for _refine in ("caote", "fastcaote"):  # in blocks of 128 tokens, one slot a decoded token
    for _base in ("h2o", "tova", "snapkv"):
        _own = dict(score=_base, refine=_refine, schedule="chunk", chunk_size=128, decode=True, interval=1)
        PRESETS[f"{_base}+{_refine}"] = _own | ({"per_head": True} if _base == "tova" else {})


class NearTie(Exception):
    """The worst slot kept and the best one lost are so close that float32 may swap them."""


@dataclass
class Layer:
    k: torch.Tensor  # [Hkv, tokens, d], of all tokens
    v: torch.Tensor
    alive: list  # per kv head the tokens that are kept, ascending
    carry: list  # per kv head {token: score}, h2o's
    probe: torch.Tensor | None = None  # [H, p, d] accumulated probe, as if rotated with `probe_at`
    probe_at: int = 0
    queries: list = field(default_factory=list)  # [H, d] before rotation, of the rows that expected attention counts
    asked: list = field(default_factory=list)  # (token, queries [H, d], outputs [H, d]) of decoded tokens
    prompt: list | None = None  # slots of each kv head that stay while decoding: all that the prompt left

    def keep(self, g, taken):
        """Kv head g keeps its slots of these numbers."""
        self.alive[g] = [self.alive[g][i] for i in taken]
        self.carry[g] = {t: x for t, x in self.carry[g].items() if t in self.alive[g]}


@dataclass
class Seen:
    """One layer's attention in one call."""

    index: int
    order: int | None  # among the layers that evict
    layer: Layer
    q: torch.Tensor  # [H, T, d]
    new: int  # of the T rows; those after them are appended rows
    logit: tuple  # scale, softcap, sinks
    attention: list = field(default_factory=list)  # per kv head [G, new, n] over the alive slots
    appended: list = field(default_factory=list)  # [G, T - new, n]; they attend to each other, too
    out: list = field(default_factory=list)  # [G, T, d]


class Row:
    """One batch row: `read` a prompt, `step` a token; both return logits."""

    def __init__(self, model, policy, budget, near=0.0, **options):
        self.model, self.near, self.margin = _doubled(model), near, math.inf
        config, (name, given) = model.config, parse_policy(policy)
        preset, options = PRESETS[name], given | options
        score = options.get("score", preset["score"])
        rows = options.get("rows", preset.get("rows", oracle_scores.ROWS.get(score, "window")))
        self.o = DEFAULTS | dict(rows=rows, budget=budget) | oracle_scores.SCORES[score] | oracle_rows.OPTIONS[rows]
        self.o |= (oracle_scores.OWN_ROWS.get(score, {}) if "rows" not in options else {}) | preset
        if "chunk_size" in options and not oracle_rows.waits_for_a_draft(self.o | options):
            self.o["schedule"] = "chunk"
        assert options.keys() <= self.o.keys(), options
        self.o |= options
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self.own = [i for i, window in enumerate(self.windows) if window is None]
        heads = config.num_key_value_heads
        none = torch.empty(heads, 0, model.model.layers[0].self_attn.head_dim, dtype=torch.double)
        self.layers = [Layer(none, none, [[] for _ in range(heads)], [{} for _ in range(heads)]) for _ in kinds]
        self.W = len(self.own) // 2 if self.o["warmup_layers"] == "half" else self.o["warmup_layers"]
        self.calls = {}  # layer -> its attention in the last call, of those that evict
        self.turns = {}  # layer -> [T] 1 - cos(R, R + O) of the last call's rows
        self.inputs = {}  # layer -> [T, E] its attention block's input in the last call
        self.layer_budget = 0
        self.seen, self.limits = 0, [0] * len(self.own)  # slots of each layer, from the first eviction on
        self.part = None  # of a prompt that was read, the tokens that are repeated

    @property
    def positions(self):
        """[layer][kv head] -> ascending positions; None for layers with a sliding window."""
        return [None if w else [list(head) for head in layer.alive] for w, layer in zip(self.windows, self.layers)]

    def read(self, ids):
        """Section 3, steps 1, 2 and 6, for all rows; most have nothing that is appended."""
        o, N = self.o, len(ids)
        total = self.seen + N
        self.always = self._always()
        self.B = 1 << 31 if o["budget"] is None else o["budget"]
        if isinstance(self.B, float):
            self.B = max(math.ceil(self.B * total), self.always + 1)
        self.shares = self._shares(total)
        self.warmup = max(self.B, o["warmup_budget"] or min(total, 10240, max(self.B, math.ceil(total * 5 / 64))))
        for layer in self.layers:
            layer.probe, layer.asked = None, []
        Z, logits, self.errors = o["chunk_size"] or N, [], [[] for _ in self.own]
        oracle_rows.begin(self, ids)
        start, base, parts = 0, self.seen, oracle_rows.parts(self, N)
        while start < N:
            stop = start + ((N - start) % Z or Z)
            self.reading, self.last, self.waiting, drafted = True, stop == N and not parts, [], {}
            extra, at = oracle_rows.begin_chunk(self, base + stop)
            self._split(stop - start)
            logits.append(self._run([*ids[start:stop], *extra], [*range(base + start, base + stop), *at], len(extra)))
            if self.waiting:
                drafted = self._draft(logits[-1][-1])
            for order, index in enumerate(self.own):
                if self.errors[order] and self.cuts and index in self.turns:
                    self.errors[order][-1] *= oracle_rows.turned(self, self.turns[index], drafted.get(index))
            start = stop
        for self.part in parts:
            self.last = self.part is parts[-1]
            again = oracle_rows.again(self, [base + i for i in self.part])
            self._split(0)
            self._run(again, [*range(base + N, base + N + len(again))], len(again))
        self.part = None
        for layer in self.layers if o["keep_prompt"] else ():
            layer.prompt = list(map(len, layer.alive))
        return torch.cat(logits)

    def _draft(self, logits):
        """Draft, then evict from the layers that waited for it. Returns each layer's rotations of the drafted rows."""
        self.drafted, turns = oracle_drafted.write(self, logits)
        waiting, self.waiting = self.waiting, []
        for seen in waiting:
            self._decide(seen)
        for order, index in enumerate(self.own):  # groups share their first layer's choice
            self._follow(order, self.layers[index])
        return turns

    def follow(self, ids):
        return oracle_drafted.follow(self, ids)

    def step(self, token):
        self.reading = self.own_probe = False
        return self._run([token], [self.seen], 0)[0]

    def _always(self):
        """Slots that a head keeps at any budget; half of one holds sinks, so that the other can be recent."""
        o = self.o
        first, recent = oracle_scores.protected(o, o.get("sink", 0))
        last = max(recent, oracle_rows.always(o))
        run = max(map(self._run_length, range(len(self.own)))) if o["schedule"] == "chunk" else 1
        return first + max(last, run - 1, self._spared())

    def _spared(self):
        """Last slots that a threshold leaves alone (section 9)."""
        return 0 if self.o["threshold"] is None else self.o["keep_last"]

    # -- section 4: layers ------------------------------------------------------------------------------------------

    def _shares(self, tokens):
        L, b = len(self.own), self.B - self.always
        if self.o["errors"]:
            return [Fraction(x) for x in self.o["errors"]]
        if self.o["layers"] in ("uniform", "cake", "pool") or tokens < 2 * b or L == 1:
            return [Fraction(1)] * L
        low = b // 20
        high = min(2 * b - low, tokens - self.always)
        low = 2 * b - high
        return [self.always + high - Fraction(i * (high - low), L - 1) for i in range(L)]

    def _split(self, tokens):
        """Slots of every layer, all heads together: C split into whole numbers, at least a layer's protected slots and
        at most its alive ones."""
        L, heads = len(self.own), len(self.layers[0].alive)
        alive = [heads * tokens + sum(map(len, self.layers[i].alive)) for i in self.own]
        over, self.later = sum(alive) > self.B * L * heads, []
        self.cuts = over or self.o["threshold"] is not None
        if over:
            self.targets = self.limits = self._whole_slots(alive)
        else:
            self.targets, self.limits = alive, self._whole_slots([1 << 40] * L)

    def _whole_slots(self, most):
        o, L, heads = self.o, len(self.own), len(self.layers[0].alive)
        unit = heads if self._shared() else 1
        if (self.W or 1) > 1:
            groups = [list(range(self.W)), *([i] for i in range(self.W, L))]
        else:
            groups = [list(range(i, min(L, i + o["n_reuse"]))) for i in range(0, L, o["n_reuse"])]
        shares = [sum(self.shares[i] for i in group) / len(group) for group in groups]
        least = max(self.always, 1) * heads // unit
        own = self.always * heads // unit if o["layers"] == "cake" else 0  # the shares come on top
        bounds = [(least - own, max(least, min(most[i] for i in group) // unit) - own) for group in groups]
        sizes = [len(group) for group in groups]
        whole = _apportion(shares, self.B * L * heads // unit - own * L, bounds, sizes)
        return [unit * (own + x) for x, size in zip(whole, sizes) for _ in range(size)]

    def _shared(self):
        """Whether a choice is one for all heads of a layer."""
        chunked = any(self._selection(i) == "chunk" for i in range(len(self.own)))
        return not self.o["per_head"] and (chunked or self.o["score"] == "tova")

    def _selection(self, order):
        for start, stop, select in self.o["select_by_layer"]:
            if start <= order and (stop is None or order < stop):
                names = {"Selection": "token", "PooledTokens": "pooled", "Runs": "chunk"}
                return select if isinstance(select, str) else names[type(select).__name__]
        return self.o["select"]

    def _run_length(self, order):
        return self.o["c"] if self._selection(order) == "chunk" else 1

    def _run(self, ids, positions, extra):
        self.extra, self.at, new = extra, positions, len(ids) - extra
        self.chunk_end, self.turns = self.seen + new, {}
        _running.append(self)
        try:
            with torch.no_grad(), self._measured():
                inputs = dict(input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]))
                logits = self.model(**inputs, use_cache=False).logits[0, :new]
        finally:
            _running.pop()
        self.seen += new
        return logits

    @contextlib.contextmanager
    def _measured(self):
        """Records each attention block's input, and each layer's rotation of the residual stream, for each of the
        call's rows."""
        hooks, before = [], {}
        scale = getattr(self.model.config, "residual_multiplier", 1.0)

        def enter(index, module, args, kwargs):
            before[index] = args[0] if args else kwargs["hidden_states"]

        def leave(index, adds, module, args, out):
            out = out[0] if isinstance(out, tuple) else out
            after = before[index] + scale * out if adds else out
            self.turns[index] = (1 - torch.cosine_similarity(before[index], after, dim=-1))[0].clamp(min=0)

        def note(index, module, args, kwargs):
            self.inputs[index] = (args[0] if args else kwargs["hidden_states"])[0]

        for index, layer in enumerate(self.model.model.layers):
            hooks.append(layer.self_attn.register_forward_pre_hook(functools.partial(note, index), with_kwargs=True))
        for index, layer in enumerate(self.model.model.layers if self.o["cd"] != "off" else ()):
            module, adds = layer, self.o["cd"] == "attention"
            if adds:
                normed = self.model.config.model_type in ("gemma2", "gemma3_text", "olmo2")
                module = layer.post_attention_layernorm if normed else layer.self_attn
            hooks.append(layer.register_forward_pre_hook(functools.partial(enter, index), with_kwargs=True))
            hooks.append(module.register_forward_hook(functools.partial(leave, index, adds)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # -- one layer ----------------------------------------------------------------------------------------------------

    def attend(self, module, q, k, v, scale, softcap, sinks):
        """q [H, T, d], k and v [Hkv, T, d] -> [T, H, d]; then evicts. Softmax over all visible slots; a model's sink
        logit and softcap are part of it."""
        index, (H, T, _), Hkv = module.layer_idx, q.shape, k.shape[0]
        layer, new, window = self.layers[index], T - self.extra, self.windows[index]
        self.group, self.logit = H // Hkv, (scale, softcap, sinks)
        seen = Seen(index, self.own.index(index) if window is None else None, layer, q, new, self.logit)
        layer.k, layer.v = torch.cat([layer.k, k[:, :new]], 1), torch.cat([layer.v, v[:, :new]], 1)
        rows = range(self.seen, self.seen + T)  # appended rows are numbered on after the chunk
        for g in range(Hkv):
            layer.alive[g] = layer.alive[g] + list(rows[:new])
            slots = layer.alive[g]
            keys, values = (torch.cat([t[g, slots], x[g, new:]]) for t, x in ((layer.k, k), (layer.v, v)))
            a = self._weights(g, q, rows, keys, [*slots, *rows[new:]], window, (new, len(slots)))
            seen.out.append(a @ values)
            seen.attention.append(a[:, :new, : len(slots)])
            seen.appended.append(a[:, new:, : len(slots)])
        if window is None:
            self._after(seen)
        return torch.cat(seen.out).transpose(0, 1)

    def _weights(self, g, q, rows, keys, columns, window=None, appended=None):
        """a [G, R, n] of kv head g: row j sees columns of tokens up to rows[j]. appended: (rows, columns) of a
        chunk; later rows do not see the question before the text in it."""
        scale, softcap, sinks = self.logit
        mine = slice(g * self.group, (g + 1) * self.group)
        x = q[mine] @ keys.T * scale
        x = softcap * torch.tanh(x / softcap) if softcap else x
        distance = torch.tensor(rows)[:, None] - torch.tensor(columns)
        x = x.masked_fill((distance < 0) | (distance >= (window or 2 * LATER)), -math.inf)
        if appended is not None and window is None:
            hidden = [t in oracle_rows.before(self) for t in columns[: appended[1]]]
            x[:, appended[0] :, : appended[1]].masked_fill_(torch.tensor(hidden), -math.inf)
        if sinks is not None:
            x = torch.cat([x, sinks[mine, None, None].double().expand(-1, x.shape[1], 1)], -1)
        return x.softmax(-1)[..., : len(columns)]

    def weights(self, seen, g, *args):
        """The same with the logits of an attention that is past."""
        self.logit = seen.logit
        return self._weights(g, *args)

    def _follow(self, order, layer):
        """Index reuse: keep the slots of the group's first layer."""
        first = order - order % self.o["n_reuse"]
        if first < order:
            layer.alive = [list(head) for head in self.layers[self.own[first]].alive]

    def _after(self, seen):
        """When: section 7, section 3 step 5, and index reuse."""
        o, order, layer = self.o, seen.order, seen.layer
        self.calls[order] = seen
        if order % o["n_reuse"]:
            self._follow(order, layer)
            return
        oracle_rows.end_of_attention(self, seen)
        oracle_scores.grow_carry(self, seen)
        self._propagate(seen)
        waits = self._delayed(order) and order < self.W - 1  # for layer W-1
        self.layer_budget = self.limits[order]
        if not self.reading:
            layer.asked.append((self.seen, seen.q[:, 0], torch.cat(seen.out)[:, 0]))
            n, heads = sum(map(len, layer.alive)), len(layer.alive)
            most = self.layer_budget + sum(self._prompt(layer))
            if o["decode"] and n > most + (o["interval"] - 1) * heads and not waits:
                self._cut(seen, most)
        elif (not self.last and o["schedule"] == "prompt") or waits:
            return
        elif oracle_rows.waits_for_a_draft(o):
            self.waiting += [seen] if self.cuts else []
        else:
            self._decide(seen)

    def _propagate(self, seen):
        """The call's tokens that go on (`oracle_fastkv`); here all do."""

    def _delayed(self, order):
        return self.W is not None and order <= self.W - 1

    def _decide(self, seen):
        """Evict from a layer that was read, if it holds too much."""
        o, order = self.o, seen.order
        self.layer_budget = self.limits[order]
        if o["layers"] in ("cake", "pool") and self.cuts:
            self.later.append(seen)
            if len(self.later) == len(self.own):  # nothing is cut before all layers have been read
                (oracle_cake if o["layers"] == "cake" else oracle_pool).cut(self)
            return
        relaxed = self._delayed(order) and not self.last
        keep = self.warmup * len(seen.layer.alive) if relaxed else self.targets[order]
        if o["measure"] and self.cuts:
            ends = [self._protected(len(slots), order) for slots in seen.layer.alive]
            self.errors[order].append(oracle_scores.layer_error(self, seen, ends))
        alive = sum(map(len, seen.layer.alive))
        if alive > keep or o["threshold"] is not None:
            self._cut(seen, min(alive, keep))

    def _cut(self, seen, slots):
        """The layer, and those that waited for it, keep `slots` in all."""
        before = self.own[: seen.order] if self._delayed(seen.order) else []
        self.evict([seen.layer, *(self.layers[i] for i in before)], seen, slots)

    def turn(self, x, position):
        """RoPE by `position`, half-split layout; the angle rounded as the model rounds it."""
        angle = self.angles(position)
        a, b, rest = x.split([len(angle), len(angle), x.shape[-1] - 2 * len(angle)], -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)

    def angles(self, position):
        """[F] by which RoPE rotates the pairs of dimensions."""
        rotary = self.model.model.rotary_emb
        frequency = getattr(rotary, "inv_freq", None)
        frequency = (rotary.full_attention_inv_freq if frequency is None else frequency).float()
        return (float(position) * frequency).double()

    def evict(self, layers, seen, slots):
        """All `layers` keep the slots that `seen`'s layer takes, `slots` in all; kv head g decides for kv head g."""
        chooser, order = seen.layer, seen.order
        heads = range(len(chooser.alive))
        past = self._prompt(chooser)
        ends = [self._protected(len(chooser.alive[g]), order, past[g]) for g in heads]
        scores = oracle_scores.refined(self, seen, self._scores(seen, ends))
        kept_too = [oracle_rows.kept_between(self, chooser.alive[g], ends[g]) for g in heads]
        inside = [[i for i in range(first, len(score) - last) if i not in kept]
                  for (first, last), score, kept in zip(ends, scores, kept_too)]  # fmt: skip
        if self._selection(order) == "pooled":
            scores = [oracle_scores.pool(score, "max", 7, *end) for score, end in zip(scores, ends)]
        always = [first + last + len(kept) for (first, last), kept in zip(ends, kept_too)]
        run = self._run_length(order)
        ranks = self._ranked(scores, chooser.alive, inside, run) if run > 1 else scores
        items = [[(-ranks[g][i], chooser.alive[g][i] // run, g, chooser.alive[g][i], i) for i in inside[g]]
                 for g in heads]  # fmt: skip
        items = [self._limited(items[g], chooser.alive[g]) for g in heads]
        wins = self._split_heads(items, always, slots, past)
        for g in heads:
            wins[g] = min(wins[g], self.above(items[g]))
            if self.o["over_kept"] and run > 1 and wins[g] < len(inside[g]):
                wins[g] = self._of_best_runs(ranks[g], chooser.alive[g], inside[g], wins[g] // run, run)
            kept, lost = oracle_values.taken(self, seen, g, items[g], wins[g], always[g])
            if not self.o["exact"] and kept and lost and kept[-1][1] == lost[0][1]:
                whole = [x for x in kept if x[1] != lost[0][1]]
                kept = whole if whole or always[g] else kept
            first, last = ends[g]
            both = [*range(first), *kept_too[g], *range(len(scores[g]) - last, len(scores[g]))]
            taken = sorted([*both, *(x[-1] for x in kept)])
            for layer in layers:
                layer.keep(g, taken)

    def _limited(self, items, slots):
        """The worst of the request's slots, those past its limit, come after all others."""
        start, most = oracle_rows.limit(self)
        asked = [x for x in items if x[3] >= start]
        elsewhere = sum(position >= start for position in slots) - len(asked)  # of its slots those that are protected
        worst = self.best(asked, max(most - elsewhere, 0))[1]
        return [(math.inf, *x[1:]) if x in worst else x for x in items]

    def _scores(self, seen, ends):
        return oracle_scores.scores(self, seen, ends)

    def _prompt(self, layer):
        """Slots of each kv head that stay, beside the budget."""
        return [0] * len(layer.alive) if self.reading or layer.prompt is None else layer.prompt

    def _split_heads(self, items, ends, slots, past):
        """Section 4: how many of its unprotected slots each head keeps."""
        o, heads, rooms = self.o, len(items), [len(x) for x in items]
        if o["heads"] == "equal":
            ends = [end - own for end, own in zip(ends, past)]
            bounds = [(end, end + room) for end, room in zip(ends, rooms)]
            return [x - end for x, end in zip(_apportion([Fraction(1)] * heads, slots - sum(past), bounds), ends)]
        wanted, every = slots - sum(ends), [x for head in items for x in head]
        f, forced = Fraction(str(o["f"])), []
        if o["heads"] == "ada" and o["floor"] != "mix":
            own = [int(f * wanted / heads) if o["floor"] == "max" else max(0, int(f * slots / heads) - e) for e in ends]
            forced = [x for head, n in zip(items, own) for x in self.best(head, n)[0]]
        best = forced + self.best([x for x in every if x not in forced], wanted - len(forced))[0]
        wins = [sum(x[2] == g for x in best) for g in range(heads)]
        if o["heads"] == "ada" and o["floor"] == "mix":
            wins = _apportion([(1 - f) * n + f * wanted / heads for n in wins], wanted, [(0, room) for room in rooms])
        return wins

    def _ranked(self, scores, alive, inside, run):
        """Section 5, chunk: a run's score, for each of its members."""
        if not self.o["per_head"]:
            scores = [[sum(each) / len(scores) for each in zip(*scores)]] * len(scores)
        ranks = [list(score) for score in scores]
        for g, slots in enumerate(inside):
            slots = range(len(alive[g])) if self.o["over_kept"] else slots
            for number in {alive[g][i] // run for i in slots}:
                members = [i for i in slots if alive[g][i] // run == number]
                for i in members:
                    ranks[g][i] = sum(scores[g][j] for j in members)
                    ranks[g][i] *= 1 if self.o["over_kept"] else run / len(members)
        return ranks

    def _of_best_runs(self, ranks, slots, inside, wanted, run):
        """How many of the unprotected slots are of the best runs, whose members may be protected ones."""
        runs = {t // run: (-ranks[i], t // run, 0, t, i) for i, t in reversed(list(enumerate(slots)))}
        best = {number for _, number, *_ in self.best(list(runs.values()), wanted)[0]}
        return sum(slots[i] // run in best for i in inside)

    def best(self, items, wanted):
        """(kept, lost) of (-score, run, head, position, slot), best first; raises NearTie."""
        rest = sorted(items)
        kept, lost = rest[:wanted], rest[wanted:]
        if kept and lost and lost[0][0] < math.inf:
            scores = [-x[0] for x in rest if x[0] < math.inf]
            worst, best = -kept[-1][0], -lost[0][0]
            around = sorted(set(scores))
            cut = around.index(worst)
            steps = [abs(worst - around[j]) for j in (cut - 1, cut + 1) if 0 <= j < len(around)]
            gap = min(steps, default=math.inf) if worst == best else worst - best  # equal by pooling, or one run's
            scale = max(abs(worst), sum(map(abs, scores)) / len(scores))
            self.margin = min(self.margin, gap / scale)
            if self.margin < self.near:
                raise NearTie(self.margin)
        return kept, lost

    def above(self, items):
        """How many of (-score, ..) reach the threshold (section 9); raises NearTie."""
        bar = self.o["threshold"]
        if bar is None or not items:
            return len(items)
        self.margin = min(self.margin, *(abs(-x[0] - bar) / max(abs(x[0]), abs(bar)) for x in items))
        if self.margin < self.near:
            raise NearTie(self.margin)
        return sum(-x[0] >= bar for x in items)

    def _protected(self, n, order, past=0):
        share = self.layer_budget // len(self.layers[0].alive) // 2
        first, recent = oracle_scores.protected(self.o, share, self.chunk_end)
        last = max(recent, oracle_rows.protected(self))
        if self.reading and not self.last:  # a run cut by the chunk's end is kept until it is whole
            last = max(last, self.chunk_end % self._run_length(order))
        first, last = max(first, past), max(last, self._spared())
        return min(first, n), min(last, n - min(first, n))


def _apportion(shares, total, bounds, sizes=None):
    """Whole numbers x with sum(size * x) = total, in proportion to the shares within their bounds: the level at which
    the bounded parts sum to the total lies between two of the levels where a part meets a bound."""
    sizes, lows, highs = sizes or [1] * len(shares), [low for low, _ in bounds], [high for _, high in bounds]
    total = min(max(total, sum(map(int.__mul__, sizes, lows))), sum(map(int.__mul__, sizes, highs)))

    def parts(level):
        return [min(max(share * level, low), high) for share, low, high in zip(shares, lows, highs)]

    def mass(level):
        return sum(size * part for size, part in zip(sizes, parts(level)))

    if not any(shares):
        shares = [Fraction(1)] * len(shares)
    levels = sorted({Fraction(bound) / share for share, pair in zip(shares, bounds) if share for bound in pair})
    below = max((x for x in levels if mass(x) <= total), default=Fraction(0))
    above = min((x for x in levels if mass(x) >= total), default=below)
    level, rise = below, mass(above) - mass(below)
    if rise:
        level += (above - below) * (total - mass(below)) / rise
    exact = parts(level)
    short = total - mass(level)  # only parts without a share can still take something
    open_ = [i for i, share in enumerate(shares) if not share]
    if short and open_:
        more = _apportion(
            [Fraction(1)] * len(open_), sum(sizes[i] * lows[i] for i in open_) + short,
            [bounds[i] for i in open_], [sizes[i] for i in open_],
        )  # fmt: skip
        for i, x in zip(open_, more):
            exact[i] = Fraction(x)
    whole = [math.floor(x) for x in exact]
    left = total - sum(map(int.__mul__, sizes, whole))
    order, changed = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i]), True
    while changed:
        changed = False
        for i in order:
            if sizes[i] <= left and whole[i] < highs[i]:
                whole[i], left, changed = whole[i] + 1, left - sizes[i], True
    return whole


_running = []


def _attention(module, q, k, v, mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    return _running[-1].attend(module, q[0], k[0], v[0], scaling, softcap, s_aux)[None], None


@functools.cache
def _doubled(model):
    """A float64 copy of an unpatched model with attention modules that call `_attention`."""
    AttentionInterface.register("oracle", _attention)
    copied = copy.deepcopy(model).double()
    copied.config._experts_implementation = "eager"  # the grouped kernels have no float64
    for layer in copied.model.layers:
        layer.self_attn.config = copy.copy(layer.self_attn.config)
        layer.self_attn.config._attn_implementation_internal = "oracle"
    return copied
