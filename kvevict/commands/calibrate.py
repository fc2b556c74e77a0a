import itertools
import sys
from argparse import ArgumentParser
from dataclasses import asdict

from ..policy.checks import fraction
from ..policy.text import DEFAULT
from . import add_model, add_policies, check_file, command, grid


@command
def calibrate(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Find the smallest budget that keeps the full cache's answers to your prompts, and a bound for later ones."""
    add_model(parser, "model", nargs="?")
    parser.add_argument("--prompts", required=True, metavar="FILE",
                        help='JSON lines with a "prompt", a text, or "messages"; drawn as later ones are')  # fmt: skip
    parser.add_argument("--agree", type=float, default=0.95, help="share of answers word for word; default 0.95")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the promise; default 0.95")
    add_policies(parser, (DEFAULT,))
    parser.add_argument("--budgets", nargs="+", type=int, default=None, help="slots per kv head; default 4096 to 128")
    parser.add_argument("--kinds", nargs="+", default=["model"], metavar="KIND",
                        help="kinds of slots to try: model (default), int8, k8v4, int4")  # fmt: skip
    parser.add_argument("--chunk-size", type=int, help="tokens read at once; default is up to the policy")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens of an answer; default 64")
    parser.add_argument("--out", default="calibrated.json",
                        help="for `kvevict.patch(model, FILE)`, --policy and --policies; an interrupted run goes on "
                        "from FILE.lines; default calibrated.json")  # fmt: skip
    args = parser.parse_args(argv)
    check_file("--out", args.out)
    from ..answering.calibration import BUDGETS, allowed, calibrate, candidates_of, read_prompts
    from ..models.loading import load_model, small_llama

    try:
        prompts = read_prompts(args.prompts)
    except OSError as error:
        raise ValueError(f"--prompts {args.prompts}: {error.strerror}; give a file of JSON lines") from None
    fraction("--agree", args.agree)
    fraction("--confidence", args.confidence)
    candidates, level = candidates_of(args.policies, args.kinds, args.confidence)
    most = allowed(len(prompts), args.agree, level)  # raises ValueError for too few prompts
    enough = next(n for n in itertools.count(len(prompts)) if allowed(n, args.agree, level) > most)
    print(
        f"{len(prompts)} prompts, {len(candidates)} candidate{'' if len(candidates) == 1 else 's'}: to promise "
        f"{args.agree:.1%} of equal answers at most {most} may differ here, of {enough} prompts {most + 1}.",
        file=sys.stderr,
    )
    model, tokenizer = load_model(args.model or small_llama(), args.dtype, args.device)
    result = calibrate(
        model, tokenizer, prompts, agree=args.agree, confidence=args.confidence, policies=args.policies,
        budgets=args.budgets or BUDGETS, kinds=args.kinds, chunk_size=args.chunk_size,
        max_new_tokens=args.max_new_tokens, file=f"{args.out}.lines", progress=True,
    )  # fmt: skip
    rows = [("policy", "kv", "budget", "MiB", "answers that differ", "agreement of further prompts")]
    for each in result.tried:
        promised = "not promised" if each.agreed is None else f"{each.agreed:.1%} or more"
        size, differing = f"{each.slots_bytes / 2**20:.1f}", f"{each.differing} of {result.prompts}"
        rows.append((each.policy, each.kv, str(each.budget), size, differing, promised))
    print(grid(rows, left=2))
    found = result.found
    if found is None:
        print("No budget can be promised: add larger --budgets, recall=true, or prompts; or ask for less agreement.")
        return asdict(result)
    result.save(args.out)
    print(f"{found.policy} with budget={found.budget}, kv={found.kv!r}: written to {args.out}.")
    print(f"To use it: kvevict.patch(model, {args.out!r}), or --policy {args.out}")
    return asdict(result) | dict(out=args.out)
