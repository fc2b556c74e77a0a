"""LAQ and SpecKV for the float64 oracle, from METHODS section 1 alone: `oracle.Row` with drafts.

SpecKV's draft reads along as the oracle's response does. LAQ's evictions wait until the prompt was read; then a second
`Row` whose layers hold what SnapKV would keep writes the draft, and the evictions are made up for.
"""

import copy
import functools

import oracle
import torch

_LAQ = dict(score="laq", n_d=8, window=8, kernel=7, pool="max", reduce="sum", draft_keys=False)
_PAPER = dict(n_d=32, window=0, draft_keys=True)
oracle.PRESETS |= {
    "laq": _LAQ,
    "laq/paper": _LAQ | _PAPER,
    "speckv": _LAQ | dict(score="speckv", reduce="max", draft_model=None, response=None),
    "speckv/paper": _LAQ | dict(score="speckv", draft_model=None, response=None) | _PAPER,
}
FIRST_WINDOW = 32


class Row(oracle.Row):
    @property
    def always(self):
        run = max(map(self._run_length, range(len(self.own)))) if self.o["schedule"] == "chunk" else 1
        return max(self.rows if self.o["protect"] else 0, run - 1)

    @always.setter
    def always(self, value):
        pass  # the other scores' own

    rows = property(lambda self: self.o["window"] or self.o["n_d"])  # while decoding

    def read(self, ids):
        o, self.waiting, self.attention = self.o, [], {}
        if o["score"] == "speckv":
            o["response"] = self._follow(ids)
            return super().read(ids)
        logits = super().read(ids)
        if not self.waiting:
            return logits
        writer, token = self._writer(), self._best_token(logits[-1])
        for _ in range(o["n_d"]):
            token = self._best_token(writer.step(token))
        after, waiting, self.waiting = self.logit, self.waiting, None
        for layers, chooser, slots, order, q, attention, self.logit in waiting:
            self.layer_budget, wrote = self.limits[order], writer.layers[self.own[order]]
            self.drafted = dict(q=torch.stack([x for _, x, _ in wrote.asked], 1), k=wrote.k[:, -o["n_d"] :])
            self._evict(layers, chooser, slots, order, q, attention)
        self.logit = after
        for order, index in enumerate(self.own):  # groups that share what their first layer chose
            if order % o["n_reuse"]:
                first = self.layers[self.own[order - order % o["n_reuse"]]]
                self.layers[index].alive = [list(head) for head in first.alive]
        return logits

    def _after(self, index, layer, q, attention):
        if self.reading:
            self.attention[index] = attention
        super()._after(index, layer, q, attention)

    def _best_token(self, logits):
        best, second = logits.topk(2).values.tolist()
        if best - second < self.near * logits.abs().max():
            raise oracle.NearTie
        return logits.argmax().item()

    def _follow(self, ids):
        model, ids = _double(self.o["draft_model"]), list(ids)
        for _ in range(self.o["n_d"]):
            with torch.no_grad():
                ids.append(self._best_token(model(torch.tensor([ids]), use_cache=False).logits[0, -1]))
        return tuple(ids[-self.o["n_d"] :])

    def _evict(self, layers, chooser, slots, order, q, attention):
        if self.reading and self.o["score"] == "laq" and self.waiting is not None:
            self.waiting.append((layers, chooser, slots, order, q, attention, self.logit))
        else:
            super()._evict(layers, chooser, slots, order, q, attention)

    def _writer(self):
        """A row that holds what SnapKV keeps of each layer's slots."""
        writer = copy.copy(self)
        writer.o = self.o | dict(decode=False, n_reuse=1)
        writer.layers = [oracle.Layer(x.k, x.v, [list(head) for head in x.alive], x.carry) for x in self.layers]
        for order, index in enumerate(self.own):
            layer, attention, slots = writer.layers[index], self.attention[index], self.targets[order]
            heads = len(layer.alive)
            window = min(FIRST_WINDOW, max(1, slots // heads // 2))
            for g, alive in enumerate(layer.alive):
                keep, last = slots // heads + (g < slots % heads), min(window, len(alive))
                if keep >= len(alive):
                    continue
                score = oracle._pool(attention[g][:, -window:].sum(1).mean(0).tolist(), "max", 7, 0, last)
                items = [(-score[i], i, g, t, i) for i, t in enumerate(alive[: len(alive) - last])]
                kept = sorted(x[-1] for x in self._best(items, keep - last)[0])
                layer.alive[g] = [alive[i] for i in kept] + alive[len(alive) - last :]
        return writer

    def _protected(self, n, order):
        first, last = super()._protected(n, order)
        mine = self.rows if not self.reading else self.o["window"]
        return first, min(n - first, max(last, mine if self.o["protect"] else 0))

    def _scores(self, layer, q, attention, ends):
        o, result = self.o, []
        for g, slots in enumerate(layer.alive):
            if not self.reading:
                tokens, queries, _ = zip(*layer.asked[-self.rows :])
                every = [self._weights(g, torch.stack(queries, 1), tokens, layer.k[g, slots], slots)]
            else:
                every = [self._drafted_rows(layer, g, q, slots)]
                if o["window"]:
                    every.append(attention[g][:, -o["window"] :])
            a = torch.cat(every, 1)
            score = a.amax((0, 1)) if o["reduce"] == "max" else a.sum(1).mean(0)
            result.append(oracle._pool(score.tolist(), o["pool"], o["kernel"], *ends[g]))
        return result

    def _drafted_rows(self, layer, g, q, slots):
        """Attention [G, n_d, n] of the drafted rows, later than all, with the other drafted rows' keys or without."""
        n_d, keys, rows = self.o["n_d"], layer.k[g, slots], [oracle.LATER] * self.o["n_d"]
        if self.o["score"] == "speckv":
            return self.appended[g] if self.o["draft_keys"] else self._weights(g, q[:, -n_d:], rows, keys, slots)
        if not self.o["draft_keys"]:
            return self._weights(g, self.drafted["q"], rows, keys, slots)
        rows = [oracle.LATER + i for i in range(n_d)]
        keys = torch.cat([keys, self.drafted["k"][g]])
        return self._weights(g, self.drafted["q"], rows, keys, [*slots, *rows])[..., : len(slots)]


@functools.cache
def _double(model):
    return copy.deepcopy(model).double()
