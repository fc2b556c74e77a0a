"""A decoded token of Inductor's step beside the recorded one, on a CPU:

    python tests/benchmarks/bench_compile.py [--model DIR] [--rows 1 8]

The unpatched model after 500 tokens as it is and compiled by Inductor with freezing, over a `StaticCache`; and
`take+edie` with 512 slots with `compiled=True`. First the compiled model must choose the unpatched one's tokens, up to
near-ties. Then rounds alternate; prints medians in ms a token and one JSON line. Without --model: random weights, four
layers of an 8B model's shape.
"""

import json
import statistics
import time

import torch
import torch._inductor.config
from bench_read import arguments
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

import kvevict

TOKENS, SLOTS, EACH = 500, 512, 12  # tokens before, slots, tokens of a round


def loaded(folder):
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    config = LlamaConfig(
        vocab_size=1000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).bfloat16().eval()


def unpatched(model, ids):
    """A function that decodes a given token [B, 1], and returns logits."""
    cache = model(ids).past_key_values
    return lambda token: model(token, past_key_values=cache).logits


def inductor(model, ids):
    cache = StaticCache(model.config, max_cache_len=1024)
    model(ids, past_key_values=cache, logits_to_keep=1)
    step = torch.compile(model, fullgraph=False, dynamic=False)
    at = torch.tensor([[ids.shape[1]]] * len(ids))

    def decode(token):
        logits = step(token, past_key_values=cache, position_ids=at.clone()).logits
        at.add_(1)
        return logits

    return decode


def recorded(model, ids):
    cache = model(ids, logits_to_keep=1).past_key_values
    return lambda token: model(token, past_key_values=cache).logits


@torch.inference_mode()
def main():
    args = arguments(__doc__, model=None, rows=[1, 8], rounds=9)
    torch._inductor.config.freezing = True
    model, patched = loaded(args.model), loaded(args.model)
    kvevict.patch(patched, "take+edie", budget=SLOTS, compiled=True)
    for rows in args.rows:
        ids = torch.randint(1000, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
        token, began = ids[:, -1:], time.perf_counter()
        steps = {"inductor": inductor(model, ids)}
        compiled = steps["inductor"](token)
        seconds = time.perf_counter() - began
        steps |= {"unpatched": unpatched(model, ids), "recorded": recorded(patched, ids)}
        want = steps["unpatched"](token).float()
        best, chosen = want.max(-1).values, want.gather(-1, compiled.argmax(-1, keepdim=True))[..., 0]
        assert (best - chosen).max() < 0.05 * want.std(), "the compiled model chooses another token"
        for _ in range(16):  # the recorded step begins after some tokens
            steps["recorded"](token)
        times = {name: [] for name in steps}
        for _ in range(args.rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                for _ in range(EACH):
                    step(token)
                times[name].append((time.perf_counter() - start) / EACH * 1e3)
        medians = {name: statistics.median(each) for name, each in times.items()}
        print(f"{rows} rows; compiled in {seconds:.0f} s")
        for name, ms in medians.items():
            print(f"  {name:10} {ms:7.1f} ms  {ms / medians['unpatched']:.2f}")
        result = dict(model=args.model, rows=rows, threads=torch.get_num_threads(), ms=medians)
        print(json.dumps({"bench": "compile", **result}))


if __name__ == "__main__":
    main()
