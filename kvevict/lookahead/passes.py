"""The two passes of LookaheadKV's training (eq. 5, METHODS section 6). One pass of prompt and response without a graph
gives the true scores and the prompt's keys and values; then the lookahead rows alone go through the decoder, attending
to these, and are differentiated. No attention matrix outlives its layer, memory grows with the prompt's length."""

import contextlib
import copy
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface

from .. import _ops, compat
from ..context import context, within

NAME = "kvevict_lookahead"


@dataclass
class Truth:
    """What the first pass of a pair leaves: by layer, all on the model's device."""

    tokens: int  # N of the prompt
    keys: dict = field(default_factory=dict)  # [1, Hkv, N, D]; of a sliding layer the last that a later row sees
    values: dict = field(default_factory=dict)
    target: dict = field(default_factory=dict)  # [1, H, N] fp32 mean attention of the response's rows, where we evict


@torch.no_grad()
def truth(decoder, prompt, response) -> Truth:
    """The first pass over ids [N] and [R]: every row sees those before it, the response's true scores are kept."""
    found, ids = Truth(len(prompt)), torch.cat([prompt, response])[None]

    def attend(module, query, key, value, mask, **options):
        index, n, window = module.layer_idx, found.tokens, options.get("sliding_window")
        first = 0 if window is None else max(n - window + 1, 0)
        found.keys[index], found.values[index] = (x[:, :, first:n].contiguous() for x in (key, value))
        if window is not None:
            return compat.base_attention(module, module._kvevict_original)(module, query, key, value, mask, **options)
        options = _own(options)
        slots, new = slots_of(key[:, :, :0]), torch.zeros(1, dtype=torch.int32, device=key.device)
        out, lse = _ops.attend(query, slots.k, slots.k, slots.offset, slots.len, key, value, new, **options)
        found.target[index] = _ops.score(
            query[:, :, n:], new, slots.k, slots.offset, slots.len, key, new, new + n, lse[:, :, n:].contiguous(),
            reduce="mean", group="none", columns=n, **options,
        )  # fmt: skip
        return out, None

    with _attention(decoder, attend):
        decoder(input_ids=ids, use_cache=False)
    return found


def loss(decoder, adapter, found: Truth, note=None):
    """Mean over layers and heads of KL(true scores || the lookahead rows' scores), fp32, with a graph to the adapter
    where gradients are on. note(layer, q, k, slots, options) sees the rows' queries and keys, and the prompt's."""
    each, count = [], adapter.tokens

    def attend(module, query, key, value, mask, **options):
        index, window, options = module.layer_idx, options.get("sliding_window"), _own(options)
        past = found.keys[index], found.values[index]
        if window is not None:
            return _plain(query, key, value, *past, window, **options), None
        slots = slots_of(*past)
        where = dict(k_slots=slots.k, offset=slots.offset, len=slots.len, columns=found.tokens + count)
        each.append(_ops.kl(query, key, found.target[index], **where, **options))
        if note is not None:
            note(index, query, key, slots, options)
        return _Attend.apply(query, key, value, *past, options), None

    embeds = adapter.embeddings.to(decoder.get_input_embeddings().weight.dtype)[None]
    positions = torch.arange(found.tokens, found.tokens + count, device=embeds.device)[None]
    with _attention(decoder, attend), adapter.on(decoder):
        decoder(inputs_embeds=embeds, position_ids=positions, use_cache=False)
    return torch.stack(each).mean()


def _logits(q, k, scale, softcap):
    """[B, H, R, S] of rows that are the last R of the S keys' own, -inf where one is not seen."""
    rows, columns = q.shape[2], k.shape[2]
    seen = (q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].transpose(-1, -2)).flatten(1, 2) * scale
    seen = softcap * torch.tanh(seen / softcap) if softcap else seen
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
    return seen.masked_fill(hidden, -torch.inf)


def _softmax(seen, sinks):
    if sinks is None:
        return seen.softmax(-1)
    column = sinks[None, :, None, None].to(seen).expand(*seen.shape[:3], 1)
    return torch.cat([seen, column], -1).softmax(-1)[..., :-1]


def _plain(q, k, v, keys, values, window, *, scale, softcap, sinks):
    """Attention of a sliding layer's rows [1, n, H, D]: its matrix is no wider than the window."""
    k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    rows, columns = q.shape[2], k.shape[2]
    seen = _logits(q.float(), k.float(), scale, softcap)
    at = torch.arange(columns, device=q.device)
    gone = at[None] <= at[columns - rows :, None] - window
    weights = _softmax(seen.masked_fill(gone, -torch.inf), sinks).to(v.dtype)
    return (weights.unflatten(1, (k.shape[1], -1)) @ v[:, :, None]).flatten(1, 2).transpose(1, 2)


class _Attend(torch.autograd.Function):
    """Attention [1, n, H, D] of rows to a prompt's keys and values, which are constants, and causally to their own."""

    BLOCK = 4096  # columns of the prompt whose weights exist at once, for the rows alone

    @staticmethod
    def forward(ctx, q, k, v, keys, values, options):
        slots = slots_of(keys, values)
        none = torch.zeros(1, dtype=torch.int32, device=q.device)
        out, lse = _ops.attend(q, slots.k, slots.v, slots.offset, slots.len, k, v, none, **options)
        ctx.save_for_backward(q, k, v, keys, values, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, keys, values, out, lse = ctx.saved_tensors
        heads = k.shape[1]
        group = lambda x: x.float().unflatten(1, (heads, -1)).flatten(2, 3)  # noqa: E731  [1, Hkv, G * n, ..]
        rows, there = group(q), group(grad.transpose(1, 2))
        shared = (there * group(out.transpose(1, 2))).sum(-1, keepdim=True)
        sums = group(lse[..., None])
        dq = torch.zeros_like(rows)
        for at in range(0, keys.shape[2], _Attend.BLOCK):
            part = keys[:, :, at : at + _Attend.BLOCK].float(), values[:, :, at : at + _Attend.BLOCK].float()
            _, pull = _pull(rows, *part, there, shared, sums, ctx.options)
            dq += pull @ part[0]
        own = k.float(), v.float()
        steps = torch.arange(k.shape[2], device=q.device)
        hidden = (steps[None] > steps[:, None]).repeat(q.shape[1] // heads, 1)
        weights, pull = _pull(rows, *own, there, shared, sums, ctx.options, hidden)
        dq += pull @ own[0]
        dq = dq.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
        dk, dv = pull.transpose(-1, -2) @ rows, weights.transpose(-1, -2) @ there
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _pull(rows, keys, values, there, shared, sums, options, hidden=None):
    """(weights, gradient of the products q.k) of rows [1, Hkv, M, D] at some columns: with o = sum a v and its gradient
    g, ds = a (g.v - g.o)."""
    scale, cap = options["scale"], options["softcap"]
    seen = rows @ keys.transpose(-1, -2) * scale
    bend = 1.0
    if cap:
        seen = torch.tanh(seen / cap)
        bend, seen = 1 - seen**2, seen * cap
    weights = (seen - sums).exp()
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0)
    return weights, weights * (there @ values.transpose(-1, -2) - shared) * bend * scale


@dataclass
class Slots:
    """Keys and values as slots of the ops: head h owns rows h * N .. (h + 1) * N - 1."""

    k: torch.Tensor
    v: torch.Tensor
    offset: torch.Tensor
    len: torch.Tensor


def slots_of(keys, values=None):
    values = keys if values is None else values
    _, heads, tokens, dim = keys.shape
    offset = torch.arange(heads, device=keys.device)[None] * tokens
    return Slots(
        keys.reshape(-1, dim), values.reshape(-1, dim), offset,
        torch.full((1, heads), tokens, dtype=torch.int32, device=keys.device),
    )  # fmt: skip


def _own(options):
    """What the ops take of the options of Transformers' attention interface."""
    sinks = options.get("s_aux")
    return dict(
        scale=options["scaling"], softcap=options.get("softcap") or 0.0, sinks=None if sinks is None else sinks.float()
    )


def _call(module, query, key, value, mask, **options):
    return context().training_attention(module, query, key, value, mask, **options)


@contextlib.contextmanager
def _attention(decoder, function):
    """Inside, and in this thread alone, every layer of the decoder calls `function` for attention."""
    AttentionInterface.register(NAME, _call)
    modules = [layer.self_attn for layer in decoder.layers]
    before = [module.config for module in modules]
    try:
        for module in modules:
            config = copy.copy(module.config)
            config._attn_implementation_internal = NAME
            module.__dict__["_kvevict_original"], module.config = module.config, config
        with within(training_attention=function):
            yield
    finally:
        for module, config in zip(modules, before):
            module.config = config
            module.__dict__.pop("_kvevict_original", None)
