import os
from argparse import ArgumentParser
from dataclasses import fields

from ..serve.options import Options
from . import add_budget, add_model, build_policies, check_complete, check_folder, command, number

EXTRA = ("fastapi", "uvicorn", "openai", "prometheus_client", "transformers.cli.serving")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@command
def serve(parser: ArgumentParser, argv: list[str]) -> None:
    """Answer OpenAI's clients over HTTP, with bounded memory: questions about a text share its stored slots."""
    add_model(parser, "model", nargs="?")
    parser.add_argument("--name", help="the model's name in requests; default: a folder's name, or the hub id")
    parser.add_argument(
        "--policy",
        default=Options.policy,
        help=f"reads prompts; default {Options.policy}. One that can recall "
        "(docs/usage.md) reads what several prompts begin with once",
    )
    add_budget(parser, Options.budget, Options.chunk_size)
    parser.add_argument(
        "--memory-bytes",
        default=f"{Options.memory >> 30}G",
        help=f"of stored prefixes in memory at most, and of running answers' slots; default {Options.memory >> 30}G",
    )
    parser.add_argument(
        "--store",
        help="folder, which servers may share, for texts and for prefixes that come again; default: memory alone",
    )
    parser.add_argument(
        "--store-bytes",
        default=f"{Options.disk >> 30}G",
        help=f"of that folder's files at most; default {Options.disk >> 30}G",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; default 127.0.0.1, this machine alone"
    )
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME",
                        help="a name of the server that requests may have as their Host, beside localhost and the "
                        "address that they come to; repeatable")  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0: any that is free")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY",
                        help="a key that requests may use; repeatable, each key has separate texts; default: "
                        "KVEVICT_API_KEY, or none needed")  # fmt: skip
    parser.add_argument(
        "--batch",
        type=int,
        default=Options.batch,
        help=f"answers that are written at once at most, a token of each in a step; default {Options.batch}",
    )
    parser.add_argument(
        "--queue",
        type=int,
        default=Options.queue,
        help=f"requests that wait at most, further ones get 429; default {Options.queue}",
    )
    parser.add_argument("--stall", type=float, default=Options.stall, metavar="SECONDS",
                        help="after which a prompt that is read pauses between two layers, for a token of each running "
                        f"answer; default {Options.stall}")  # fmt: skip
    parser.add_argument(
        "--timeout",
        type=float,
        default=Options.timeout,
        help=f"seconds that a request may take; default {Options.timeout:.0f}",
    )
    args = parser.parse_args(argv)
    from ..policy.checks import at_least_0, count, installed

    installed("serve", "kvevict serve", *EXTRA)
    installed("serve", "kvevict serve", "transformers.cli.serving.completion")  # of Transformers 5.23
    memory, disk = size("--memory-bytes", args.memory_bytes), size("--store-bytes", args.store_bytes)
    check_complete(build_policies([args.policy], args))
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port}: give a number from 0 to 65535")
    count("--batch", args.batch, 1)
    count("--queue", args.queue, 0)
    at_least_0("--stall", args.stall)
    at_least_0("--timeout", args.timeout, positive=True)
    if args.store is not None:
        check_folder("--store", args.store)
    if "" in args.api_key:
        raise ValueError("--api-key is empty: give a key, or leave it out")
    keys = args.api_key
    if not keys and "KVEVICT_API_KEY" in os.environ:
        keys = [os.environ["KVEVICT_API_KEY"]]
        if not keys[0]:
            raise ValueError("KVEVICT_API_KEY is empty: give a key, or unset it")
    given = {field.name: getattr(args, field.name) for field in fields(Options) if hasattr(args, field.name)}
    given |= dict(keys=tuple(keys), hosts=(args.host, *args.allow_host), memory=memory, disk=disk)
    options = Options(**given | dict(budget=number(args.budget)))
    from ..serve.app import name_of
    from ..serve.start import start

    for each in args.allow_host:
        if not name_of(each):
            raise ValueError(f"--allow-host {each}: give a name or an address, as in texts.example")
    start(args.model, args.host, args.port, options)


def size(option: str, text: str) -> int:
    """Bytes: a number, or one with K, M, G or T."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in UNITS else (text, "")
    try:
        found = int(float(digits) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise ValueError(f"{option} {text}: give a number of bytes, such as 4G or 500M")
    return found
