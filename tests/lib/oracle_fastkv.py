"""FastKV's part of `oracle.Row` (METHODS section 1): layers after `tsp` read a chunk's best tokens only. The
decoder's layers are called one by one."""

import math

import oracle_rows
import oracle_scores
import torch
from oracle import Row, Seen, _running


class FastRow(Row):
    def __init__(self, model, policy, budget, near=0.0, tsp="half", tsp_len=2048, **options):
        super().__init__(model, policy, budget, near, **options)
        last = len(self.layers) - 1
        self.tsp = {"half": (last + 1) // 2 - 1, None: last}.get(tsp, tsp)
        self.tsp_len, self.goes_on = tsp_len, oracle_rows.while_decoding(self.o)
        self.sinks, _ = oracle_scores.protected(self.o, self.o.get("sink", 0))

    def _most(self, tokens):
        """Of a chunk's tokens, those that go on: a number, or a share, but the first tokens that are always kept, the
        rows that observe, and one token at least."""
        share = math.ceil(self.tsp_len * tokens) if self.tsp_len < 1 else self.tsp_len
        return min(tokens, max(share, self.sinks + self.goes_on + 1))

    def _run(self, ids, positions, extra):
        self.extra, self.at, self.new, decoder = extra, positions, len(ids) - extra, self.model.model
        self.chunk_end, self.going, appended = self.seen + self.new, [*range(self.new)], [*range(self.new, len(ids))]
        _running.append(self)
        try:
            with torch.no_grad():
                hidden = decoder.embed_tokens(torch.tensor([ids]))
                for index, layer in enumerate(decoder.layers):
                    at = torch.tensor([positions])[:, [*self.going, *appended]]
                    angles = decoder.rotary_emb(hidden, at)
                    before = hidden[0, -self.goes_on :]
                    hidden = layer(hidden, attention_mask=None, position_ids=at, position_embeddings=angles)
                    turn = 1 - torch.cosine_similarity(before, hidden[0, -self.goes_on :], dim=-1)
                    self.turns[index] = turn.clamp_min(0)
                    if index == self.tsp:
                        hidden = hidden[:, [*self.going, *appended]]
                logits = self.model.lm_head(decoder.norm(hidden))[0, : len(self.going)]
        finally:
            _running.pop()
        self.seen += self.new
        return logits

    def _split(self, tokens):
        heads, L = len(self.layers[0].alive), len(self.layers)
        read = [tokens if i <= self.tsp else self._most(tokens) for i in range(L)]
        alive = [heads * n + sum(map(len, layer.alive)) for n, layer in zip(read, self.layers)]
        self.cuts = sum(alive) > self.B * L * heads
        self.targets = self._whole_slots(alive) if self.cuts else alive
        self.limits = self.targets if self.cuts else self._whole_slots([1 << 40] * L)

    def attend(self, module, q, k, v, scale, softcap, sinks):
        """In layers after `tsp` only the propagated tokens have keys and values."""
        if len(self.going) == self.new:
            return super().attend(module, q, k, v, scale, softcap, sinks)
        index, layer, tokens = module.layer_idx, self.layers[module.layer_idx], [self.seen + t for t in self.going]
        self.group, self.logit, new = q.shape[0] // k.shape[0], (scale, softcap, sinks), len(tokens)
        seen = Seen(index, index, layer, q, new, self.logit)
        rows = [*tokens, *range(self.chunk_end, self.chunk_end + self.extra)]
        none = k.new_full((k.shape[0], self.new, k.shape[2]), torch.nan)
        places = torch.tensor(self.going)
        layer.k, layer.v = (
            torch.cat([old, none.index_copy(1, places, x[:, :new])], 1) for old, x in ((layer.k, k), (layer.v, v))
        )
        for g, slots in enumerate(layer.alive):
            layer.alive[g] = slots = slots + tokens
            keys, values = (torch.cat([t[g, slots], x[g, new:]]) for t, x in ((layer.k, k), (layer.v, v)))
            a = self._weights(g, q, rows, keys, [*slots, *rows[new:]])
            seen.out.append(a @ values)
            seen.attention.append(a[:, :new, : len(slots)])
            seen.appended.append(a[:, new:, : len(slots)])
        self._after(seen)
        return torch.cat(seen.out).transpose(0, 1)

    def _propagate(self, seen):
        most = self._most(self.new)
        if self.reading and seen.index == self.tsp and self.new > most:
            ends = [self._protected(len(slots), seen.order) for slots in seen.layer.alive]
            worth = [sum(each) for each in zip(*(score[-self.new :] for score in self._scores(seen, ends)))]
            stop = self.new - min(max(self.goes_on, ends[0][1]), most)
            first = min(max(ends[0][0] - self.seen, 0), most - (self.new - stop))
            best, _ = self.best([(-worth[t], t, 0, t, t) for t in range(first, stop)], most - first - (self.new - stop))
            self.going = [*range(first), *sorted(x[-1] for x in best), *range(stop, self.new)]
