"""Seconds and peak memory of one training step of a lookahead adapter, against the same step in two whole passes with
the attention of the rows that count materialised, as LookaheadKV's appendix C has it.

    python tests/benchmarks/bench_lookahead.py --model FOLDER [--tokens 1024 4096 8192] [--dtype float32]

Each measurement is a process of its own: growth of its peak resident memory over that of the loaded model. Both must
come to the same loss.
"""

import argparse
import json
import subprocess
import sys
import time

import torch


def materialised(model, adapter, prompt, response):
    """The loss in plain torch: [prompt | response] without a graph, then [prompt | lookahead] with one."""
    from transformers import AttentionInterface

    import kvevict  # noqa: F401

    decoder, n, mean_attn = model.get_decoder(), len(prompt), {}

    def attend(module, query, key, value, mask, scaling=None, **options):
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
        logits = query[:, :, n:] @ keys.transpose(-1, -2) * scaling
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(n + 1)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32)
        mean_attn[module.layer_idx] = weights[..., :n].mean(2)
        return out.transpose(1, 2), None

    AttentionInterface.register("materialised", attend)
    before, decoder.config._attn_implementation = decoder.config._attn_implementation, "materialised"
    try:
        with torch.no_grad():
            decoder(input_ids=torch.cat([prompt, response])[None], use_cache=False)
        target = dict(mean_attn)
        with adapter.on(decoder):
            embeds = torch.cat([decoder.embed_tokens(prompt), adapter.embeddings.to(model.dtype)])[None]
            decoder(inputs_embeds=embeds, use_cache=False)
    finally:
        decoder.config._attn_implementation = before
    each = []
    for layer, got in mean_attn.items():
        got, want = (x / x.sum(-1, keepdim=True) for x in (got, target[layer]))
        each.append(torch.xlogy(want, want / got.clamp_min(1e-30)).sum(-1).mean())
    return torch.stack(each).mean()


def ours(model, adapter, prompt, response):
    from kvevict.lookahead import passes

    decoder = model.get_decoder()
    return passes.loss(decoder, adapter, passes.truth(decoder, prompt, response))


def measure(args):
    from kvevict.analysis.run import _peak, _reset_peak, load_model
    from kvevict.lookahead import Adapter

    model, _ = load_model(args.model, args.dtype, "cpu")
    for weight in model.parameters():
        weight.requires_grad_(False)
    torch.manual_seed(0)
    adapter, step = Adapter(model), dict(ours=ours, materialised=materialised)[args.run]
    draw = lambda count: torch.randint(model.config.vocab_size, (count,))  # noqa: E731
    step(model, adapter, draw(64), draw(8)).backward()
    prompt, response = draw(args.tokens[0]), draw(args.response)
    before, start = _reset_peak(model.device), time.perf_counter()
    loss = step(model, adapter, prompt, response)
    loss.backward()
    print(json.dumps(dict(tokens=len(prompt), run=args.run, seconds=round(time.perf_counter() - start, 2),
                          mib=round((_peak(model.device) - before) / 2**20), loss=loss.item())))  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return measure(args)
    for tokens in args.tokens:
        found = {}
        for run in ("ours", "materialised"):
            command = [sys.executable, __file__, "--model", args.model, "--tokens", str(tokens), "--run", run]
            command += ["--response", str(args.response), "--dtype", args.dtype]
            found[run] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        ours, other = found["ours"], found["materialised"]
        ratios = [ours[name] / other[name] for name in ("seconds", "mib")]
        if abs(ours["loss"] - other["loss"]) > 1e-3 * other["loss"] and args.dtype == "float32":
            raise SystemExit(f"the losses differ: {ours['loss']} and {other['loss']}")
        print(
            f"{tokens:6} tokens: {ours['seconds']:7.2f} s, {ours['mib']:5} MiB; materialised "
            f"{other['seconds']:7.2f} s, {other['mib']:5} MiB; ratios {ratios[0]:.2f} and {ratios[1]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
