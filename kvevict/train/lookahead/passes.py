"""The two forward passes of LookaheadKV's training (eq. 5, METHODS section 6). The first pass reads prompt and response
without an autograd graph, and returns the true scores and the prompt's keys and values. In the second pass only the
lookahead rows go through the decoder; they attend to these keys and values and get gradients. No attention matrix is
kept after its layer; memory grows linearly with the prompt's length."""

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
    """The results of the first pass over a prompt and its response, on the model's device. Dicts are by layer."""

    tokens: int  # N, the number of the prompt's tokens
    # [1, Hkv, N, D]; of a sliding-window layer only the last of the N tokens, which rows after the prompt see
    keys: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)  # shaped as keys
    target: dict = field(default_factory=dict)  # fp32 [1, H, N] true scores, of evicting layers only


@torch.no_grad()
def truth(decoder: Module, prompt: Tensor, response: Tensor) -> Truth:
    """Run the first pass over the ids of a prompt [N] and of a response [R]. The true scores are the mean attention of
    the response's rows; for an empty response there are none."""
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
    """Run the first pass over the ids [N] of a prompt whose questions are not known yet (METHODS section 9). The true
    scores of a query head are the `kvzip+` scores of its kv head, divided by their sum. response: ids [0], empty."""
    found = truth(decoder, prompt, response)
    heads = decoder.config.num_attention_heads

    def take(index: int, score: Tensor) -> None:
        share = score / score.sum(-1, keepdim=True)
        found.target[index] = share.repeat_interleave(heads // len(share), 0)[None].contiguous()

    numbers(decoder, "kvzip+", prompt, take)
    return found


def loss(decoder: Any, adapter: Adapter, found: Truth, note: Callable[..., None] | None = None) -> Tensor:
    """Return KL(true scores || lookahead rows' scores), averaged over layers and heads, in fp32, with an autograd graph
    to the adapter if gradients are enabled. note(layer, q, k, slots, options) is called for every evicting layer with
    the lookahead rows' queries and keys, the prompt's slots and the ops' options."""
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
    """Compute the attention outputs [1, n, H, D] of n rows in a sliding-window layer. q, k, v belong to the rows; keys
    and values to the prompt's last tokens, at most window - 1 of them."""
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
    """Computes the attention outputs [1, n, H, D] of n rows that attend to a prompt's keys and values, which get no
    gradients, and causally to the rows' own keys and values."""

    BLOCK = 4096  # number of the prompt's columns whose attention weights are in memory at once

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
        group = lambda x: x.float().unflatten(1, (heads, -1)).flatten(2, 3)  # noqa: E731  to [1, Hkv, G * n, ..]
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
    """Return, for query rows [1, Hkv, M, D] and the columns of `keys`, the attention weights a and the gradient of the
    dot products q.k: a (dout.v - delta) * scale, where dout is the gradient of the attention output `out` and
    delta = dout.out; the derivative of a softcap is multiplied in."""
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
    """Return keys and values [1, Hkv, N, D] as stored slots, in which head h has the rows h * N .. (h + 1) * N - 1."""
    values = keys if values is None else values
    _, heads, tokens, dim = keys.shape
    offset = torch.arange(heads, device=keys.device)[None] * tokens
    length = torch.full((1, heads), tokens, dtype=torch.int32, device=keys.device)
    return Held(keys.reshape(-1, dim), values.reshape(-1, dim), offset=offset, len=length)


def _op_options(options: dict) -> dict:
    """Convert the options of Transformers' attention interface to the options of `kvevict.ops._ops`."""
    sinks = options.get("s_aux")
    return dict(
        scale=options["scaling"], softcap=options.get("softcap") or 0.0, sinks=None if sinks is None else sinks.float()
    )


def _call(*tensors: object, **options: object) -> tuple:
    return context().training_attention(*tensors, **options)


@contextlib.contextmanager
def _attention(decoder: Module, function: Callable[..., tuple]) -> Iterator[None]:
    """Let every layer of the decoder compute attention by `function`, inside the context and in this thread only."""
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
