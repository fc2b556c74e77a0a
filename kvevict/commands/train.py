from pathlib import Path

from . import add_model, check_folder, command, model_name

NOT_OPTIONS = ("model", "dtype", "device", "data", "out", "targets", "json")  # of `kvevict.lookahead.train`


@command
def train(parser, argv):
    """Train a lookahead adapter for a model on prompts: `lookahead:adapter=OUT` then evicts with it."""
    add_model(parser)
    parser.add_argument("--data", required=True, help="JSONL of `prompt` and optionally `response`, or of `messages`")
    parser.add_argument("--out", required=True, help="folder for adapter, log and checkpoint; continued if begun")
    parser.add_argument("--steps", type=int, default=7600, help="optimizer steps; default 7600")
    parser.add_argument("--batch", type=int, default=32, help="pairs per step, over all processes; default 32")
    parser.add_argument("--lr", type=float, help="default 2e-4 for Qwen, 1e-3 for others")
    parser.add_argument("--tokens", type=int, default=32, help="lookahead rows; default 32")
    parser.add_argument("--rank", type=int, default=8, help="of the LoRA; default 8")
    parser.add_argument("--alpha", type=float, default=32, help="its scale is alpha / rank; default 32")
    parser.add_argument("--targets", nargs="+", default=["all"], help="all (default), qv, none, or linear layers")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of pairs; default 0")
    parser.add_argument("--max-prompt", type=int, default=16384, help="tokens at most; default 16384")
    parser.add_argument("--max-response", type=int, default=512, help="tokens at most; default 512")
    parser.add_argument(
        "--held-out", type=int, default=0, help="last pairs, kept from training to validate with; default 0"
    )
    parser.add_argument("--validate-every", type=int, default=100, help="steps; default 100")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints; default 100")
    args = parser.parse_args(argv)
    from ..analysis.run import load_model
    from ..lookahead import train
    from ..lookahead.training import check_installed

    check_installed(args.held_out)
    if not Path(args.data).is_file():
        raise ValueError(f"--data {args.data}: there is no such file; give JSON lines with a prompt each")
    check_folder("--out", args.out)
    name = model_name(args)
    model, tokenizer = load_model(name, args.dtype, args.device)
    given = {k: v for k, v in vars(args).items() if k not in NOT_OPTIONS}
    targets = args.targets[0] if len(args.targets) == 1 and "_" not in args.targets[0] else args.targets
    try:
        adapter = train(model, args.data, args.out, tokenizer=tokenizer, targets=targets, **given)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command goes on from the last checkpoint in {args.out}") from None
    return {"model": name, "out": args.out, "parameters": sum(p.numel() for p in adapter.parameters())}
