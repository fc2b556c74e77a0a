from argparse import ArgumentParser

from . import add_model, check_folder, command, loaded


@command
def convert(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Convert KVzap's published gates (safetensors) to the format that the policy `gate:gates=OUT` reads."""
    add_model(parser)
    parser.add_argument("--source", required=True, help="folder of config.json and model.safetensors, or its hub id")
    parser.add_argument("--out", required=True, help="folder for the gates")
    args = parser.parse_args(argv)
    from ..train.gates import convert

    check_folder("--out", args.out)
    name, model, _ = loaded(args)
    made = convert(args.source, model, args.out)
    kind, layers = made.about["kind"], len(made.layers)
    print(f"{args.out}: {kind} gates of {layers} layers; their source does not name the model they were trained on")
    return {"model": name, "out": args.out, "kind": kind, "layers": layers}
