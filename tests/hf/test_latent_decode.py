"""A decoded token over latents (MLA): against keys and values of every head in float64, by the paper's equations
(DeepSeek-V2, arXiv 2405.04434, 9 to 18), whether the module's up-projection is absorbed or not."""

import pytest
import torch
from helpers import FP32, OUT, close
from torch import nn

from kvevict.engine.memory.latent import LatentLayer, up_projection
from kvevict.engine.memory.sequence import Sequence

HEADS, NOPE, ROTATED, VALUE, RANK = 3, 24, 8, 16, 40


class Adapted(nn.Linear):
    """As quantisation and adapters replace it: not to be looked into."""


class Attention(nn.Module):
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim = NOPE, ROTATED, VALUE

    def __init__(self, kind, dtype):
        super().__init__()
        self.kv_b_proj = kind(RANK, HEADS * (NOPE + VALUE), bias=False, dtype=dtype)

    def expand_kv(self, latent, rotated):
        both = self.kv_b_proj(latent).unflatten(-1, (HEADS, -1))[:, 0].transpose(1, 2)
        key, value = both.split([NOPE, VALUE], -1)
        return torch.cat([key, rotated.expand(-1, HEADS, -1, -1)], -1), value


def filled(dtype, lengths):
    """A layer with random latents, and what it holds: [(latents [n, RANK], rotated [n, ROTATED])] by row."""
    layer, most, batch = LatentLayer(Sequence()), max(lengths), len(lengths)
    latent, rotated = torch.randn(batch, 1, most, RANK).to(dtype), torch.randn(batch, 1, most, ROTATED).to(dtype)
    layer.lazy_initialization(layer.pack(latent[:, :, :0], rotated[:, :, :0])[0])
    first = torch.tensor([most - n for n in lengths], dtype=torch.int32)
    pos = torch.arange(batch * most, dtype=torch.int32).view(batch, most)
    layer.append(*layer.pack(latent, rotated), pos, first, first.numpy())
    return layer, [(latent[b, 0, most - n :], rotated[b, 0, most - n :]) for b, n in enumerate(lengths)]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, dict(softcap=3.0), dict(sinks=torch.tensor([1.0, -2.0, 0.5]))], ids=str)
@pytest.mark.parametrize("kind", [nn.Linear, Adapted])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches(dtype, kind, options):
    module, lengths = Attention(kind, dtype), [0, 1, 77]
    layer, held = filled(dtype, lengths)
    new = torch.randn(3, 1, 1, RANK).to(dtype), torch.randn(3, 1, 1, ROTATED).to(dtype)
    q = torch.randn(3, HEADS, 1, NOPE + ROTATED).to(dtype)
    options = dict(scale=0.2, softcap=0.0, sinks=None) | options
    layer.tick()
    out, lse, probs = layer.decode(
        q, *layer.pack(*new), torch.zeros(3, 1, dtype=torch.int32), module, columns=80, **options
    )
    assert (up_projection(module) is None) == (kind is Adapted)
    assert layer.counts[:, 0].tolist() == [n + 1 for n in lengths] and out.dtype == dtype
    of_keys, of_values = module.kv_b_proj.weight.double().unflatten(0, (HEADS, -1)).split([NOPE, VALUE], 1)
    # A key or value that is made in bf16 is off by 2^-9 of itself, and a logit by scale |q| |k| of that, as is e^logit.
    loose = dtype != torch.float32 and kind is Adapted
    for b, (latent, rotated) in enumerate(held):
        latent = torch.cat([latent, new[0][b, 0]]).double()
        rotated = torch.cat([rotated, new[1][b, 0]]).double()
        key = torch.cat([torch.einsum("nr,hdr->hnd", latent, of_keys), rotated.expand(HEADS, -1, -1)], -1)
        value = torch.einsum("nr,hdr->hnd", latent, of_values)
        x = torch.einsum("hd,hnd->hn", q[b, :, 0].double(), key) * options["scale"]
        x = options["softcap"] * torch.tanh(x / options["softcap"]) if options["softcap"] else x
        sink = torch.full((HEADS,), -torch.inf) if options["sinks"] is None else options["sinks"]
        want_lse = torch.cat([x, sink.double()[:, None]], 1).logsumexp(1)
        a = (x - want_lse[:, None]).exp()
        size = (q[b, :, 0].double().norm(dim=-1)[:, None] * key.norm(dim=-1)).max().item() * options["scale"]
        more = 2.0**-9 * size if loose else 0
        close(out[b, 0, :, :VALUE], torch.einsum("hn,hnd->hd", a, value), OUT[dtype] + 4 * more)
        close(lse[b, :, 0], want_lse, FP32 + more, least=1.0)
        close(probs[b, 0, : len(latent)], a.mean(0), 2 * FP32 + 2 * more)
        assert not probs[b, 0, len(latent) :].any()
