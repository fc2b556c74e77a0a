"""The two passes of LookaheadKV's training (eq. 5, METHODS section 6). The first pass reads prompt and response without
an autograd graph: it gives the true scores and the prompt's keys and values. In the second pass only the lookahead rows
go through the decoder, attend to these keys and values, and get gradients. No attention matrix outlives its layer;
memory grows with the prompt's length."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface

from ...context import context, within
from ...engine.hook.attention import divert, original, restore
from ...models import compat
from ...models.adapter import Adapter
from ...ops import _ops
from ...ops._ops import Held
from ..targets import numbers

NAME = "kvevict_lookahead"


@dataclass
class Truth:
    """The results of the first pass over a pair, by layer, on the model's device."""

    tokens: int  # N of the prompt
    keys: dict = field(default_factory=dict)  # [1, Hkv, N, D]; of a sliding layer only those that later rows see
    values: dict = field(default_factory=dict)
    target: dict = field(default_factory=dict)  # fp32 [1, H, N] mean attention of the response's rows; evicting layers


@torch.no_grad()
def truth(decoder: Module, prompt: Tensor, response: Tensor) -> Truth:
    """Make the first pass over ids [N] of a prompt and [R] of a response. An empty response gives no true scores."""
    found, ids = Truth(len(prompt)), torch.cat([prompt, response])[None]

    def attend(module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> tuple:
        index, n, window = module.layer_idx, found.tokens, options.get("sliding_window")
        first = 0 if window is None else max(n - window + 1, 0)
        found.keys[index], found.values[index] = (x[:, :, first:n].contiguous() for x in (key, value))
        if window is not None:
            return compat.base_attention(module, original(module))(module, query, key, value, mask, **options)
        options = _op_options(options)
        slots, new = slots_of(key[:, :, :0]), torch.zeros(1, dtype=torch.int32, device=key.device)
        out, lse = _ops.attend(query, slots, key, value, new, **options)
        if len(response):
            found.target[index] = _ops.score(
                query[:, :, n:], new, slots, key, new, new + n, lse[:, :, n:].contiguous(), reduce="mean", group="none",
                columns=n, **options,
            )  # fmt: skip
        return out, None

    with _attention(decoder, attend):
        decoder(input_ids=ids, use_cache=False)
    return found


def repeated(decoder: Any, prompt: Tensor, response: Tensor) -> Truth:
    """Make the first pass over the ids [N] of a prompt whose questions are not known yet (METHODS section 9). The true
    scores of a query head are its kv head's scores of `kvzip+`, divided by their sum. The response is ids [0]."""
    found = truth(decoder, prompt, response)
    heads = decoder.config.num_attention_heads

    def take(index: int, score: Tensor) -> None:
        share = score / score.sum(-1, keepdim=True)
        found.target[index] = share.repeat_interleave(heads // len(share), 0)[None].contiguous()

    numbers(decoder, "kvzip+", prompt, take)
    return found


def loss(decoder: Any, adapter: Adapter, found: Truth, note: Callable[..., None] | None = None) -> Tensor:
    """Average KL(true scores || the lookahead rows' scores) over layers and heads, in fp32, with a graph to the adapter
    where gradients are on. note(layer, q, k, slots, options) gets a layer's queries and keys of the rows and the
    prompt's slots."""
    each, count = [], adapter.tokens

    def attend(module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> tuple:
        index, window, options = module.layer_idx, options.get("sliding_window"), _op_options(options)
        past = found.keys[index], found.values[index]
        if window is not None:
            return _sliding_attention(query, key, value, *past, window, **options), None
        slots = slots_of(*past)
        columns = found.tokens + count
        each.append(_ops.kl(query, key, found.target[index], held=slots, columns=columns, **options))
        if note is not None:
            note(index, query, key, slots, options)
        return _Attend.apply(query, key, value, *past, options), None

    embeds = adapter.embeddings.to(decoder.get_input_embeddings().weight.dtype)[None]
    positions = torch.arange(found.tokens, found.tokens + count, device=embeds.device)[None]
    with _attention(decoder, attend), adapter.on(decoder):
        decoder(inputs_embeds=embeds, position_ids=positions, use_cache=False)
    return torch.stack(each).mean()


def _sliding_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, window: int, *, scale: float, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute the attention [1, n, H, D] of n rows of a sliding layer; keys and values: the prompt's last ones, at most
    window - 1."""
    k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    rows, columns = q.shape[2], k.shape[2]
    logits = (q.float().unflatten(1, (k.shape[1], -1)) @ k.float()[:, :, None].mT).flatten(1, 2) * scale
    at = torch.arange(columns, device=q.device)
    row = at[columns - rows :, None]
    logits = _ops.softcapped(logits, softcap).masked_fill((at > row) | (at <= row - window), -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None, None].to(logits).expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., :columns].to(v.dtype)
    return (weights.unflatten(1, (k.shape[1], -1)) @ v[:, :, None]).flatten(1, 2).transpose(1, 2)


class _Attend(torch.autograd.Function):
    """The attention [1, n, H, D] of n rows to a prompt's keys and values, which get no gradients, and causally to the
    rows' own keys and values."""

    BLOCK = 4096  # columns of the prompt whose attention weights are in memory at once

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, options: dict) -> Tensor:
        none = torch.zeros(1, dtype=torch.int32, device=q.device)
        out, lse = _ops.attend(q, slots_of(keys, values), k, v, none, **options)
        ctx.save_for_backward(q, k, v, keys, values, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, k, v, keys, values, out, lse = ctx.saved_tensors
        heads = k.shape[1]
        group = lambda x: x.float().unflatten(1, (heads, -1)).flatten(2, 3)  # noqa: E731  [1, Hkv, G * n, ..]
        rows, dout, lse = group(q), group(dout.transpose(1, 2)), group(lse[..., None])
        delta = (dout * group(out.transpose(1, 2))).sum(-1, keepdim=True)
        dq = torch.zeros_like(rows)
        for at in range(0, keys.shape[2], _Attend.BLOCK):
            part = keys[:, :, at : at + _Attend.BLOCK].float(), values[:, :, at : at + _Attend.BLOCK].float()
            _, dlogits = _dlogits(rows, *part, dout, delta, lse, ctx.options)
            dq += dlogits @ part[0]
        new = k.float(), v.float()
        steps = torch.arange(k.shape[2], device=q.device)
        hidden = (steps[None] > steps[:, None]).repeat(q.shape[1] // heads, 1)
        weights, dlogits = _dlogits(rows, *new, dout, delta, lse, ctx.options, hidden)
        dq += dlogits @ new[0]
        dq = dq.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
        dk, dv = dlogits.transpose(-1, -2) @ rows, weights.transpose(-1, -2) @ dout
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _dlogits(
    rows: Tensor, keys: Tensor, values: Tensor, dout: Tensor, delta: Tensor, lse: Tensor, options: dict,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute, for rows [1, Hkv, M, D] and the columns of `keys`, the attention weights a and the gradient of the
    products q.k, which is a (dout.v - delta) with delta = dout.out, times the scale."""
    scale, softcap = options["scale"], options["softcap"]
    logits = rows @ keys.transpose(-1, -2) * scale
    softcap_grad: Any = 1.0
    if softcap:
        logits = torch.tanh(logits / softcap)
        softcap_grad, logits = 1 - logits**2, logits * softcap
    weights = (logits - lse).exp()
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0)
    return weights, weights * (dout @ values.transpose(-1, -2) - delta) * softcap_grad * scale


def slots_of(keys: Tensor, values: Tensor | None = None) -> Held:
    """Return keys and values [1, Hkv, N, D] as stored slots: head h has rows h * N .. (h + 1) * N - 1."""
    values = keys if values is None else values
    _, heads, tokens, dim = keys.shape
    offset = torch.arange(heads, device=keys.device)[None] * tokens
    length = torch.full((1, heads), tokens, dtype=torch.int32, device=keys.device)
    return Held(keys.reshape(-1, dim), values.reshape(-1, dim), offset=offset, len=length)


def _op_options(options: dict) -> dict:
    """Translate options of Transformers' attention interface to those of the ops."""
    sinks = options.get("s_aux")
    return dict(
        scale=options["scaling"], softcap=options.get("softcap") or 0.0, sinks=None if sinks is None else sinks.float()
    )


def _call(*tensors: object, **options: object) -> tuple:
    return context().training_attention(*tensors, **options)


@contextlib.contextmanager
def _attention(decoder: Module, function: Callable[..., tuple]) -> Iterator[None]:
    """Let every layer of the decoder call `function` for attention, inside the context and in this thread alone."""
    AttentionInterface.register(NAME, _call)
    modules = [layer.self_attn for layer in decoder.layers]
    try:
        for module in modules:
            divert(module, NAME)
        with within(training_attention=function):
            yield
    finally:
        for module in modules:
            restore(module)
