from __future__ import annotations

from argparse import ArgumentParser, Namespace
from itertools import product
from typing import TYPE_CHECKING, Any

from ...commands import add_budget, add_model, add_policies, command, complete_policies, loaded, number
from ...policy.text import DEFAULT

if TYPE_CHECKING:
    import torch

    from ...asking.prompts import Tokenizer


@command
def bench(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Measure time to first token, decode speed and memory of policies and of the unpatched model."""
    add_model(parser)
    add_policies(parser, default=(DEFAULT, "snapkv"))
    add_budget(parser)
    parser.add_argument("--lengths", nargs="+", type=int,
                        help="prompt tokens; default 1024 and 4096, as far as the context holds them")  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens decoded, the first included; default 32")
    parser.add_argument("--batch", nargs="+", type=int, default=[1],
                        help="prompts read and decoded together; each number is measured; default 1")  # fmt: skip
    parser.add_argument("--repeat", type=int, default=3, help="runs; medians are shown; default 3")
    args = parser.parse_args(argv)
    import torch
    from tqdm import tqdm

    from ...policy.checks import count
    from ..analysis.cost import UNPATCHED
    from ..analysis.speed import alternate, check

    count("--repeat", args.repeat, 1)
    count("--new-tokens", args.new_tokens, 2)
    for batch in args.batch:
        count("--batch", batch, 1)
    policies = complete_policies(args.policies, args)
    name, model, tokenizer = loaded(args)
    model.generation_config.eos_token_id = None  # no end token: all runs decode equally many tokens
    prompts = make_prompts(model, tokenizer, args)
    checked = prompts[min(prompts)][:, :1024]
    check(model, checked, policies)
    numbers = f"{str(model.dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads"
    print(f"{name}: {numbers}; {args.new_tokens} new tokens, median of {args.repeat} runs")
    print(f"Checked: on {checked.shape[1]} tokens, nothing evicted, every policy gives the {UNPATCHED} model's logits.")
    width = max(map(len, (UNPATCHED, *policies)))
    heads = ("first token s", "ms a token", "decode tok/s", "peak growth MiB", "KV MiB")
    print(f"{'prompt':>8} {'':{width}}" + "".join(f"{text:>17}" for text in heads) + f"{'slots/head':>13}")
    rows, total = [], args.repeat * len(prompts) * len(args.batch) * (len(policies) + 1)
    with tqdm(total=total, unit="run", delay=1, leave=False, disable=None) as bar:
        for (length, ids), batch in product(prompts.items(), args.batch):
            found = alternate(model, ids.repeat(batch, 1), policies, args.new_tokens, args.repeat, bar.update)
            if len(args.batch) > 1:
                bar.write(f"{batch} prompts together:")
            for key, row in found.items():
                bar.write(f"{length:8} {key:{width}}" + cells(row, found[UNPATCHED]))
                rows.append(dict(prompt_tokens=length, batch=batch, policy=key) | row)
    print(f"In brackets: relative to the {UNPATCHED} model.")
    evicted = {row["prompt_tokens"] for row in rows if row["slots"] != str(row["prompt_tokens"])}
    for length in sorted(prompts.keys() - evicted):
        print(f"Of {length} tokens none are evicted: give longer --lengths, or a smaller --budget.")
    settings = {name: getattr(args, name) for name in ("chunk_size", "new_tokens", "repeat")}
    return {"model": name, "budget": number(args.budget), **settings, "rows": rows}


def make_prompts(model: torch.nn.Module, tokenizer: Tokenizer, args: Namespace) -> dict[int, torch.Tensor]:
    """Return {length: ids [1, length]} of generated text, for each prompt length in tokens."""
    import torch

    from ...models.families import context_of, device_of, find_decoder
    from ..evaluate.haystack import haystack
    from ..evaluate.tasks import TaskSettings

    context: Any = context_of(find_decoder(model).config)
    most = context - args.new_tokens
    lengths = sorted(set(args.lengths or (min(n, most) for n in (1024, 4096))))
    if lengths[0] < 16 or lengths[-1] > most:
        raise ValueError(
            f"--lengths {lengths[0]} to {lengths[-1]}: give 16 to {most} tokens, what the model's context of {context} "
            f"leaves beside --new-tokens {args.new_tokens}"
        )
    settings = TaskSettings(tokenizer, lengths[-1] + 200, 1)
    text = haystack(settings).passage(settings.rng("bench"), settings.length, settings)
    ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"]])  # no warning that the text, not cut yet, is long
    return {length: ids[:, :length].to(device_of(model)) for length in lengths}


def cells(row: dict, base: dict) -> str:
    """Format the numbers of a policy's `row`, and in brackets their ratios to the unpatched model's, `base`."""
    scales = dict(read_seconds=1, token_seconds=1e-3, decode_tokens_per_second=1, peak_bytes=2**20, cache_bytes=2**20)
    shown = (
        f"{row[key] / scale:.4g} " + (f"({row[key] / base[key]:.2f})" if base[key] else "(-)")
        for key, scale in scales.items()
    )
    return "".join(f"{text:>17}" for text in shown) + f"{row['slots']:>13}"
