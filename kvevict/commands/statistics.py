from argparse import ArgumentParser

from . import add_model, check_file, command, loaded, read_text


@command
def statistics(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Measure a model's queries on a text, from which the policy `expected:stats=OUT` predicts later attention."""
    add_model(parser)
    parser.add_argument("--data", required=True, help="text to read; - is standard input")
    parser.add_argument("--out", required=True, help="file to write (safetensors)")
    parser.add_argument("--length", type=int, default=1000, help="tokens of a part that is read at once; default 1000")
    parser.add_argument("--limit", type=int, default=100_000, help="tokens of the text at most; default 100000")
    args = parser.parse_args(argv)
    from ..policy.checks import count
    from ..train.query_statistics import measure_queries

    count("--limit", args.limit, 1)
    check_file("--out", args.out)
    text = read_text(args.data, "--data")
    name, model, tokenizer = loaded(args)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: args.limit]
    about = measure_queries(model, ids, args.out, length=args.length, progress=True)
    print(f"{args.out}: the queries of {about['tokens']} tokens in {about['layers']} layers")
    return {"model": name, "out": args.out, "tokens": about["tokens"]}
