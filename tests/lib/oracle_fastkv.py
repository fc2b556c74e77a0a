"""FastKV's part of `oracle.Row` (METHODS section 1): scores pooled per query head before the group's sum, and layers
behind `tsp` that read a chunk's best tokens only. The decoder's layers are called one by one."""

import torch
from oracle import Row, _pool, _running
from oracle_scores import _rows


class FastRow(Row):
    def __init__(self, model, budget, near=0.0, tsp="half", tsp_len=2048, **options):
        super().__init__(model, "snapkv", budget, near, **dict(window=8) | options)
        last = len(self.layers) - 1
        self.tsp = {"half": (last + 1) // 2 - 1, None: last}.get(tsp, tsp)
        self.tsp_len, self.turns = tsp_len, {}  # turns: how far the last chunk's window was turned by each layer

    def _run(self, ids, positions, extra):
        self.extra, self.at, self.new, decoder = 0, positions, len(ids), self.model.model
        self.chunk_end, self.going = self.seen + self.new, list(range(self.new))
        _running.append(self)
        try:
            with torch.no_grad():
                hidden = decoder.embed_tokens(torch.tensor([ids]))
                for index, layer in enumerate(decoder.layers):
                    at = torch.tensor([positions])[:, self.going]
                    angles = decoder.rotary_emb(hidden, at)
                    before = hidden[0, -self.o["window"] :]
                    hidden = layer(hidden, attention_mask=None, position_ids=at, position_embeddings=angles)
                    turn = 1 - torch.cosine_similarity(before, hidden[0, -self.o["window"] :], dim=-1)
                    self.turns[index] = turn.clamp_min(0).mean().item()
                    if index == self.tsp:
                        hidden = hidden[:, self.going]
                logits = self.model.lm_head(decoder.norm(hidden))[0]
        finally:
            _running.pop()
        self.seen += self.new
        return logits

    def _split(self, tokens):
        heads, L = len(self.layers[0].alive), len(self.layers)
        read = [tokens if i <= self.tsp else min(tokens, self.tsp_len) for i in range(L)]
        alive = [heads * n + sum(map(len, layer.alive)) for n, layer in zip(read, self.layers)]
        self.cuts = sum(alive) > self.B * L * heads
        self.targets = self._whole_slots(alive) if self.cuts else alive
        self.limits = self.targets if self.cuts else self._whole_slots([1 << 40] * L)

    def attend(self, module, q, k, v, scale, softcap, sinks):
        """In layers behind `tsp` only the tokens that went on have keys and values."""
        if len(self.going) == self.new:
            return super().attend(module, q, k, v, scale, softcap, sinks)
        layer, tokens = self.layers[module.layer_idx], [self.seen + t for t in self.going]
        self.group, self.logit = q.shape[0] // k.shape[0], (scale, softcap, sinks)
        none = k.new_full((k.shape[0], self.new, k.shape[2]), torch.nan)
        index = torch.tensor(self.going)
        layer.k, layer.v = (
            torch.cat([old, none.index_copy(1, index, x)], 1) for old, x in ((layer.k, k), (layer.v, v))
        )
        self.out, attention = [], []
        for g, slots in enumerate(layer.alive):
            layer.alive[g] = slots = slots + tokens
            attention.append(self._weights(g, q, tokens, layer.k[g, slots], slots))
            self.out.append(attention[g] @ layer.v[g, slots])
        self._after(module.layer_idx, layer, q, attention)
        return torch.cat(self.out).transpose(0, 1)

    def _after(self, index, layer, q, attention):
        if self.reading and index == self.tsp and self.new > self.tsp_len:
            ends = [self._protected(len(slots), index) for slots in layer.alive]
            scores = self._scores(layer, q, attention, ends)
            worth = [sum(each) for each in zip(*(score[-self.new :] for score in scores))]
            stop = self.new - min(max(self.o["window"], ends[0][1]), self.tsp_len)
            best, _ = self._best([(-worth[t], t, 0, t, t) for t in range(stop)], self.tsp_len - (self.new - stop))
            self.going = [*sorted(x[-1] for x in best), *range(stop, self.new)]
        super()._after(index, layer, q, attention)

    def _scores(self, layer, q, attention, ends):
        o, result = self.o, []
        for g, end in enumerate(ends):
            a, *_ = _rows(self, layer, q, attention, g, o["window"])
            pooled = [_pool(head.tolist(), o["pool"], o["kernel"], *end) for head in a.sum(1)]
            result.append([sum(each) for each in zip(*pooled)])
        return result
