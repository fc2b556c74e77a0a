"""FastKV's part of `oracle.Row` (METHODS section 1): layers after `tsp` read a chunk's best tokens only. The
decoder's layers are called one by one."""

import torch
from oracle import Row, Seen, _running


class FastRow(Row):
    def __init__(self, model, budget, near=0.0, tsp="half", tsp_len=2048, **options):
        super().__init__(model, "fastkv", budget, near, **options)
        last = len(self.layers) - 1
        self.tsp = {"half": (last + 1) // 2 - 1, None: last}.get(tsp, tsp)
        self.tsp_len = tsp_len

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
                    self.turns[index] = turn.clamp_min(0)
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
        """In layers after `tsp` only the propagated tokens have keys and values."""
        if len(self.going) == self.new:
            return super().attend(module, q, k, v, scale, softcap, sinks)
        index, layer, tokens = module.layer_idx, self.layers[module.layer_idx], [self.seen + t for t in self.going]
        self.group, self.logit = q.shape[0] // k.shape[0], (scale, softcap, sinks)
        seen = Seen(index, index, layer, q, len(tokens), self.logit)
        none = k.new_full((k.shape[0], self.new, k.shape[2]), torch.nan)
        places = torch.tensor(self.going)
        layer.k, layer.v = (
            torch.cat([old, none.index_copy(1, places, x)], 1) for old, x in ((layer.k, k), (layer.v, v))
        )
        for g, slots in enumerate(layer.alive):
            layer.alive[g] = slots = slots + tokens
            seen.attention.append(self._weights(g, q, tokens, layer.k[g, slots], slots))
            seen.out.append(seen.attention[g] @ layer.v[g, slots])
        self._after(seen)
        return torch.cat(seen.out).transpose(0, 1)

    def _after(self, seen):
        if self.reading and seen.index == self.tsp and self.new > self.tsp_len:
            ends = [self._protected(len(slots), seen.order) for slots in seen.layer.alive]
            worth = [sum(each) for each in zip(*(score[-self.new :] for score in self._scores(seen, ends)))]
            stop = self.new - min(max(self.o["window"], ends[0][1]), self.tsp_len)
            best, _ = self.best([(-worth[t], t, 0, t, t) for t in range(stop)], self.tsp_len - (self.new - stop))
            self.going = [*sorted(x[-1] for x in best), *range(stop, self.new)]
        super()._after(seen)
