"""Reading a prompt and decoding under a policy: slow, in float64, from METHODS alone (sections 0, 1, 3, 4, 5
and 7).

One batch row at a time, over an unpatched Transformers model whose attention function is replaced. Every key and value
ever computed stays in memory; eviction only takes numbers out of lists. "Token t" is the t-th token that the row has
seen, so it is also the position it was rotated with.
"""

import copy
import functools
import math
from dataclasses import dataclass, field
from fractions import Fraction

import oracle_cake
import oracle_scores
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

DEFAULTS = dict(chunk_size=None, schedule="prompt", decode=False, interval=16, warmup_layers=None, warmup_budget=None)
DEFAULTS |= dict(layers="uniform", beta=20, tau1=1.0, tau2=1.0, errors=None, heads="equal", f=0.2, floor="mix")
DEFAULTS |= dict(select="token", c=10, per_head=False, exact=True, select_by_layer=(), n_reuse=1)
DEFAULTS |= oracle_scores.DEFAULTS
_ONLINE = dict(schedule="chunk", chunk_size=4096, decode=True, interval=1)
_SNAPKV = dict(score="snapkv", window=32, kernel=7, pool="max", reduce="sum")
_KVPRESS = _SNAPKV | dict(window=64, kernel=5, pool="avg", reduce="mean")
_TAKE = dict(score="take", probe=32, alpha=0.2, kernel=7, ema_space="aligned", probe_positions="after", append=True)
_TAKE |= dict(schedule="chunk", chunk_size=4096)
PRESETS = {
    "streaming": dict(score="streaming", sink=4, **_ONLINE),
    "h2o": dict(score="h2o", recent=None, **_ONLINE),
    "h2o/kvcf": dict(score="h2o", recent=8, **_ONLINE),
    "tova": dict(score="tova", per_head=False, **_ONLINE),
    "snapkv": _SNAPKV,
    "snapkv/kvcf": _SNAPKV | dict(window=8),
    "snapkv/kvpress": _KVPRESS,
    "knorm": dict(score="knorm"),
    "keydiff": dict(score="keydiff", unit=False),
    "keydiff/kvpress": dict(score="keydiff", unit=True),
    "oracle": dict(score="oracle", response=(), kernel=7, pool="max"),
    "take": _TAKE | dict(warmup_layers="half"),
    "take/no-probe": _TAKE | dict(warmup_layers="half", append=False),
    "take/no-delay": _TAKE,
    "take/chunk-only": _TAKE | dict(append=False),
    "adakv": _SNAPKV | dict(heads="ada"),
    "adakv/edie": _SNAPKV | dict(heads="ada", pool="avg"),
    "adakv/kvpress": _KVPRESS | dict(heads="ada", floor="all"),
    "pyramidkv": _SNAPKV | dict(layers="pyramid"),
    "chunkkv": _SNAPKV | dict(pool="none", select="chunk"),
    "chunkkv+reuse": _SNAPKV | dict(pool="none", select="chunk", n_reuse=2),
    "chunkkv/kvpress": _KVPRESS | dict(select="chunk", c=20, exact=False),
}
oracle_scores.add_presets(PRESETS)
LATER = 1 << 30  # the token number of rows that see every slot


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
    asked: list = field(default_factory=list)  # (token, queries [H, d], outputs [H, d]) of decoded tokens


class Row:
    """One batch row: `read` a prompt, `step` a token; both return logits."""

    def __init__(self, model, policy, budget, near=0.0, **options):
        self.model, self.near, self.margin = _doubled(model), near, math.inf
        config, self.o = model.config, DEFAULTS | PRESETS[policy] | dict(budget=budget)
        if "chunk_size" in options:
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
        self.seen, self.limits = 0, [0] * len(self.own)  # slots of each layer, from the first eviction on

    @property
    def positions(self):
        """[layer][kv head] -> ascending positions; None for layers with a sliding window."""
        return [None if w else [list(head) for head in layer.alive] for w, layer in zip(self.windows, self.layers)]

    def read(self, ids):
        """Section 3, steps 1, 2 and 6, for every score; without a probe nothing is appended."""
        o, N = self.o, len(ids)
        total = self.seen + N
        kept = o if o["protect"] else {}
        self.always = (
            kept.get("window", 0) or kept.get("sink", 0) or kept.get("recent") or _length(kept.get("probe", 0))
        )
        if kept and o["score"] in oracle_scores.SCORES:
            self.always = oracle_scores.always(o)
        if o["schedule"] == "chunk":
            run = max(map(self._run_length, range(len(self.own))))
            self.always = max(self.always, kept.get("sink", 0) + run - 1)
        self.B = o["budget"]
        if isinstance(self.B, float):
            self.B = max(math.ceil(self.B * total), self.always + 1)
        self.shares = self._shares(total)
        self.warmup = max(self.B, o["warmup_budget"] or min(total, 10240, max(self.B, math.ceil(total * 5 / 64))))
        span = isinstance(o.get("probe"), tuple)
        self.p = _length(o["probe"]) if span else min(o.get("probe", 0), N // 2)
        where = range(N)[slice(*_span(o["probe"], N))] if span else range(N - self.p, N)
        for layer in self.layers:
            layer.probe, layer.asked = None, []
        Z, logits, self.errors = o["chunk_size"] or N, [], [[] for _ in self.own]
        start, base = 0, self.seen
        while start < N:
            stop = start + ((N - start) % Z or Z)
            self.reading, self.last = True, stop == N
            self.own_probe = self.last and not span  # the chunk ends with the probe
            reads_along = o["score"] == "take" and o["append"] and not self.own_probe
            extra = list(where) if reads_along else []
            extra_ids, true = [ids[t] for t in extra], [base + t for t in extra]
            if o.get("response"):
                extra = extra_ids = list(o["response"])
                true = list(range(base + N, base + N + len(extra)))
            positions = list(range(base + start, base + stop))
            after = range(base + stop, base + stop + len(extra))
            positions += true if o.get("probe_positions", "true") == "true" else after
            self._split(stop - start)
            logits.append(self._run([*ids[start:stop], *extra_ids], positions, len(extra)))
            start = stop
        return torch.cat(logits)

    def step(self, token):
        self.reading = self.own_probe = False
        return self._run([token], [self.seen], 0)[0]

    # -- section 4: layers ------------------------------------------------------------------------------------------

    def _shares(self, tokens):
        L, b = len(self.own), self.B - self.always
        if self.o["errors"]:
            return [Fraction(x) for x in self.o["errors"]]
        if self.o["layers"] in ("uniform", "cake") or tokens < 2 * b or L == 1:
            return [Fraction(1)] * L
        low = b // self.o["beta"]
        high = min(2 * b - low, tokens - self.always)
        low = 2 * b - high
        return [self.always + high - Fraction(i * (high - low), L - 1) for i in range(L)]

    def _split(self, tokens):
        """Slots of every layer, all heads together: C in whole numbers, no layer below what it always keeps or above
        what it has."""
        L, heads = len(self.own), len(self.layers[0].alive)
        alive = [heads * tokens + sum(map(len, self.layers[i].alive)) for i in self.own]
        self.cuts, self.later = sum(alive) > self.B * L * heads, []
        if self.cuts:
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
        own = self.always * heads // unit if o["layers"] == "cake" else 0  # which the shares are beyond
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
                return "token" if type(select).__name__ == "Token" else "chunk"
        return self.o["select"]

    def _run_length(self, order):
        return self.o["c"] if self._selection(order) == "chunk" else 1

    def _run(self, ids, positions, extra):
        self.extra, self.at, new = extra, positions, len(ids) - extra
        self.chunk_end = self.seen + new
        _running.append(self)
        try:
            with torch.no_grad():
                inputs = dict(input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]))
                logits = self.model(**inputs, use_cache=False).logits[0, :new]
        finally:
            _running.pop()
        self.seen += new
        return logits

    # -- one layer ----------------------------------------------------------------------------------------------------

    def attend(self, module, q, k, v, scale, softcap, sinks):
        """q [H, T, d], k and v [Hkv, T, d] -> [T, H, d]; then evicts. Softmax over all visible slots; a model's sink
        logit and softcap are part of it."""
        index, (H, T, _), Hkv = module.layer_idx, q.shape, k.shape[0]
        layer, new, window = self.layers[index], T - self.extra, self.windows[index]
        self.group, self.logit = H // Hkv, (scale, softcap, sinks)
        layer.k, layer.v = torch.cat([layer.k, k[:, :new]], 1), torch.cat([layer.v, v[:, :new]], 1)
        rows = range(self.seen, self.seen + T)  # the probe's rows count on behind the chunk
        self.out, attention, self.appended = [], [], []
        for g in range(Hkv):
            layer.alive[g] = layer.alive[g] + list(rows[:new])
            slots = layer.alive[g]
            keys, values = (torch.cat([t[g, slots], x[g, new:]]) for t, x in ((layer.k, k), (layer.v, v)))
            a = self._weights(g, q, rows, keys, [*slots, *rows[new:]], window)
            self.out.append(a @ values)
            attention.append(a[:, :new, : len(slots)])
            self.appended.append(a[:, new:, : len(slots)])
        if window is None:
            self._after(index, layer, q, attention)
        return torch.cat(self.out).transpose(0, 1)

    def _weights(self, g, q, rows, keys, columns, window=None):
        """a [G, R, n] of kv head g: row j sees columns of tokens up to rows[j]."""
        scale, softcap, sinks = self.logit
        mine = slice(g * self.group, (g + 1) * self.group)
        x = q[mine] @ keys.T * scale
        x = softcap * torch.tanh(x / softcap) if softcap else x
        distance = torch.tensor(rows)[:, None] - torch.tensor(columns)
        x = x.masked_fill((distance < 0) | (distance >= (window or 2 * LATER)), -math.inf)
        if sinks is not None:
            x = torch.cat([x, sinks[mine, None, None].double().expand(-1, x.shape[1], 1)], -1)
        return x.softmax(-1)[..., : len(columns)]

    def _after(self, index, layer, q, attention):
        """When: section 7, section 3 step 5, and index reuse."""
        o, order = self.o, self.own.index(index)
        if order % o["n_reuse"]:
            layer.alive = [list(head) for head in self.layers[self.own[order // o["n_reuse"] * o["n_reuse"]]].alive]
            return
        if oracle_scores.carries(o):  # every row so far, mean over the group
            for slots, carry, a in zip(layer.alive, layer.carry, attention):
                for slot, x in zip(slots, a.sum(1).mean(0).tolist()):
                    carry[slot] = carry.get(slot, 0.0) + x
        n, heads = sum(map(len, layer.alive)), len(layer.alive)
        delayed = self.W is not None and order <= self.W - 1
        cut = [layer] + [self.layers[i] for i in self.own[:order] if delayed]
        self.layer_budget = self.limits[order]
        if not self.reading:
            layer.asked.append((self.seen, q[:, 0], torch.cat(self.out)[:, 0]))
            waits = delayed and order < self.W - 1
            if o["decode"] and n > self.layer_budget + (o["interval"] - 1) * heads and not waits:
                self._evict(cut, layer, self.layer_budget, order, q, attention)
            return
        if o["score"] == "take" and o["append"]:
            self._accumulate(layer, q)
        if not self.last and o["schedule"] == "prompt":
            return
        if delayed and order < self.W - 1:
            return  # layer W-1 decides
        if o["layers"] == "cake" and self.cuts:
            self.later.append((order, layer, q, attention, self.out, self.logit))
            if len(self.later) == len(self.own):  # nothing is cut before all layers have been read
                oracle_cake.cut(self)
            return
        keep = self.warmup * heads if delayed and not self.last else self.targets[order]
        if o["measure"] and self.cuts:
            ends = [self._protected(len(slots), order) for slots in layer.alive]
            self.errors[order].append(oracle_scores.layer_error(self, layer, q, attention, ends))
        if n > keep:
            self._evict(cut, layer, keep, order, q, attention)

    def _accumulate(self, layer, q):
        """Eq. 9. "aligned": what is averaged are queries turned to where the probe is now."""
        now, at = q[:, q.shape[1] - self.p :], self.at[len(self.at) - self.p] if self.p else 0
        if layer.probe is not None:
            past = layer.probe
            if self.o["ema_space"] == "aligned":
                past = self._turn(self._turn(past, -layer.probe_at), at)
            now = self.o["alpha"] * past + (1 - self.o["alpha"]) * now
        layer.probe, layer.probe_at = now, at

    def _turn(self, x, position):
        """RoPE by `position`, half-split layout; the angle rounded as the model rounds it."""
        rotary = self.model.model.rotary_emb
        frequency = getattr(rotary, "inv_freq", None)
        frequency = (rotary.full_attention_inv_freq if frequency is None else frequency).float()
        angle = (float(position) * frequency).double()
        a, b, rest = x.split([len(angle), len(angle), x.shape[-1] - 2 * len(angle)], -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)

    def _evict(self, layers, chooser, slots, order, q, attention):
        """All `layers` keep the slots that `chooser` takes, `slots` in all; kv head g decides for kv head g."""
        heads = range(len(chooser.alive))
        ends = [self._protected(len(chooser.alive[g]), order) for g in heads]
        scores = oracle_scores.refined(self, chooser, q, attention, self._scores(chooser, q, attention, ends))
        inside = [range(first, len(score) - last) for (first, last), score in zip(ends, scores)]
        run = self._run_length(order)
        ranks = self._ranked(scores, chooser.alive, inside, run) if run > 1 else scores
        items = [[(-ranks[g][i], chooser.alive[g][i] // run, g, chooser.alive[g][i], i) for i in inside[g]]
                 for g in heads]  # fmt: skip
        wins = self._split_heads(items, [first + last for first, last in ends], slots)
        for g in heads:
            kept, lost = self._best(items[g], wins[g])
            if not self.o["exact"] and kept and lost and kept[-1][1] == lost[0][1]:
                whole = [x for x in kept if x[1] != lost[0][1]]
                kept = whole if whole or sum(ends[g]) else kept
            first, last = ends[g]
            taken = sorted([*range(first), *(x[-1] for x in kept), *range(len(scores[g]) - last, len(scores[g]))])
            for layer in layers:
                layer.alive[g] = [layer.alive[g][i] for i in taken]
                layer.carry[g] = {t: x for t, x in layer.carry[g].items() if t in layer.alive[g]}

    def _split_heads(self, items, ends, slots):
        """Section 4: how many of its unprotected slots each head keeps."""
        o, heads, rooms = self.o, len(items), [len(x) for x in items]
        if o["heads"] == "equal":
            bounds = [(end, end + room) for end, room in zip(ends, rooms)]
            return [x - end for x, end in zip(_apportion([Fraction(1)] * heads, slots, bounds), ends)]
        wanted, every = slots - sum(ends), [x for head in items for x in head]
        f, forced = Fraction(str(o["f"])), []
        if o["heads"] == "ada" and o["floor"] != "mix":
            own = [int(f * wanted / heads) if o["floor"] == "max" else max(0, int(f * slots / heads) - e) for e in ends]
            forced = [x for head, n in zip(items, own) for x in self._best(head, n)[0]]
        best = forced + self._best([x for x in every if x not in forced], wanted - len(forced))[0]
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
            for number in {alive[g][i] // run for i in slots}:
                members = [i for i in slots if alive[g][i] // run == number]
                for i in members:
                    ranks[g][i] = sum(scores[g][j] for j in members) / len(members) * run
        return ranks

    def _best(self, items, wanted):
        """(kept, lost) of (-score, run, head, position, slot), best first; raises NearTie."""
        rest = sorted(items)
        kept, lost = rest[:wanted], rest[wanted:]
        if kept and lost:
            scores = [-x[0] for x in rest]
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

    def _protected(self, n, order):
        o, first, last = self.o, 0, 0
        if o["score"] == "streaming":
            first = min(o["sink"], n)
        if o["score"] == "h2o":
            last = self.layer_budget // len(self.layers[0].alive) // 2 if o["recent"] is None else o["recent"]
        if o["score"] == "snapkv":
            last = o["window"]
        if o["score"] == "take":  # while decoding its rows are the last p decoded ones, a window as any other
            last = _length(o["probe"]) if not self.reading else self.p if self.own_probe else 0
        if o["score"] in oracle_scores.SCORES:
            first, last = oracle_scores.ends(o, self.layer_budget // len(self.layers[0].alive) // 2)
        if not o["protect"]:
            first = last = 0
        if self.reading and not self.last:  # a run cut by the chunk's end is kept until it is whole
            last = max(last, self.chunk_end % self._run_length(order))
        return min(first, n), min(last, n - min(first, n))

    def _scores(self, layer, q, attention, ends):
        """Section 1: per kv head the scores of its alive slots."""
        o, heads = self.o, range(len(layer.alive))
        if o["score"] in oracle_scores.SCORES:
            each = oracle_scores.scores(self, layer, q, attention)
            return [_pool(score, o.get("pool", "none"), o.get("kernel", 1), *end) for score, end in zip(each, ends)]
        if o["score"] == "streaming":
            return [[float(i) for i in range(len(slots))] for slots in layer.alive]
        if o["score"] == "h2o":
            return [[carry[t] for t in slots] for slots, carry in zip(layer.alive, layer.carry)]
        if o["score"] == "tova":
            rows = [a[:, -1].mean(0).tolist() for a in attention]
            return rows if o["per_head"] else [[sum(x) / len(x) for x in zip(*rows)]] * len(rows)
        keys = [layer.k[g, layer.alive[g]] for g in heads]
        if o["score"] == "knorm":
            return [(-k.pow(2).sum(-1).sqrt()).tolist() for k in keys]
        if o["score"] == "keydiff":
            means = [(k / k.norm(dim=-1, keepdim=True) if o["unit"] else k).mean(0) for k in keys]
            return [(-(k @ m) / (k.pow(2).sum(-1) * m.pow(2).sum()).sqrt()).tolist() for k, m in zip(keys, means)]
        if o["score"] == "oracle":
            means = [a.mean((0, 1)).tolist() for a in self.appended]
            return [_pool(score, o["pool"], o["kernel"], *end) for score, end in zip(means, ends)]
        if o["score"] == "take" and o["append"] and self.reading:
            rows, queries = [LATER] * self.p, layer.probe
            unscored = self.p if self.own_probe else 0  # the probe's own slots
        else:
            rows, queries = self._window(layer, q, o["window"] if o["score"] == "snapkv" else self.p)
            unscored = 0
        scores = []
        for g in heads:
            n = len(layer.alive[g]) - unscored
            a = self._weights(g, queries, rows, keys[g][:n], layer.alive[g][:n])
            a = {"sum": a.sum(1), "max": a.amax(1)}.get(o.get("reduce"), a.mean(1))
            score = F.pad(a.mean(0), (0, unscored))
            scores.append(_pool(score.tolist(), o.get("pool", "avg"), o["kernel"], *ends[g]))
        return scores

    def _window(self, layer, q, rows):
        """(tokens, queries [H, R, d]) of the last rows: the chunk's own, or the decoded ones remembered."""
        if self.reading:
            rows = min(rows, q.shape[1] - self.extra)
            stop = q.shape[1] - self.extra
            return range(self.seen + stop - rows, self.seen + stop), q[:, stop - rows : stop]
        asked = layer.asked[-(rows if self.o["score"] == "snapkv" else _length(self.o["probe"])) :]
        return [t for t, *_ in asked], torch.stack([x for _, x, _ in asked], 1)


def _pool(score, kind, kernel, first, last):
    """Stride 1 over the unprotected slots; max pads with -inf, avg with zeros and divides by the kernel size."""
    end, half = len(score) - last, kernel // 2
    if kind == "none":
        return score
    near = {i: score[max(first, i - half) : min(end, i + half + 1)] for i in range(first, end)}
    return [score[i] if i not in near else max(near[i]) if kind == "max" else sum(near[i]) / kernel
            for i in range(len(score))]  # fmt: skip


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
    level = (
        below
        if mass(below) == mass(above)
        else below + (above - below) * (total - mass(below)) / (mass(above) - mass(below))
    )
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


def _span(probe, tokens):
    start, stop = probe
    return (start, stop) if start >= 0 else (tokens + start, tokens + stop)


def _length(probe):
    return probe[1] - probe[0] if isinstance(probe, tuple) else probe


# -- the model ------------------------------------------------------------------------------------------------------

_running = []


def _attention(module, q, k, v, mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    return _running[-1].attend(module, q[0], k[0], v[0], scaling, softcap, s_aux)[None], None


@functools.cache
def _doubled(model):
    """A float64 copy of an unpatched model, whose attention modules call `_attention`."""
    AttentionInterface.register("oracle", _attention)
    copied = copy.deepcopy(model).double()
    copied.config._experts_implementation = "eager"  # the grouped kernels have no float64
    for layer in copied.model.layers:
        layer.self_attn.config = copy.copy(layer.self_attn.config)
        layer.self_attn.config._attn_implementation_internal = "oracle"
    return copied
