import os
from argparse import ArgumentParser
from dataclasses import fields
from typing import Any

from ..serve.options import Options
from . import add_budget, add_model, check_folder, command, complete_policies, number

EXTRA = ("fastapi", "uvicorn", "openai", "prometheus_client", "transformers.cli.serving")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@command
def serve(parser: ArgumentParser, argv: list[str]) -> None:
    """Answer OpenAI's clients over HTTP, in bounded memory; questions about one text share its stored slots."""

    def option(name: str, about: str, default: Any = None, **how: Any) -> None:
        if default is not None:
            about = f"{about}; default {str(default).removesuffix('.0')}"
            how |= dict(default=default, type=type(default))
        parser.add_argument(name, help=about, **how)

    parser.set_defaults(allow_host=[], api_key=[])
    add_model(parser, "model", nargs="?")
    option("--name", "the model's name in requests; default: a folder's name, or the hub id")
    recalls = "one that can recall (docs/usage.md) reads what several prompts begin with once"
    option("--policy", f"the policy that reads prompts; {recalls}", Options.policy)
    add_budget(parser, Options.budget, Options.chunk_size)
    option(
        "--memory-bytes", "most bytes of prefixes in memory, and again of answers' slots", f"{Options.memory >> 30}G"
    )
    option("--store", "folder of texts and of prefixes that come again; servers may share it; default: memory alone")
    option("--store-bytes", "most bytes of that folder's files", f"{Options.disk >> 30}G")
    option("--host", "address to listen at; 127.0.0.1 is for this machine alone", "127.0.0.1")
    host = "a Host that requests may name, beside localhost and the address that they come to; repeatable"
    option("--allow-host", host, metavar="NAME", action="append")
    option("--port", "port to listen at; 0: any that is free", 8000)
    key = "a key of requests; repeatable, each key has separate texts; default: KVEVICT_API_KEY, or none needed"
    option("--api-key", key, metavar="KEY", action="append")
    option("--batch", "most answers that are written at once, a token of each in a step", Options.batch)
    option("--queue", "most requests that wait; further ones get 429", Options.queue)
    option("--timeout", "seconds that a request may take", Options.timeout)
    args = parser.parse_args(argv)
    from ..policy.checks import at_least_0, count, installed

    installed("serve", "kvevict serve", *EXTRA)
    installed("serve", "kvevict serve", "transformers.cli.serving.completion")  # part of Transformers since 5.23
    memory, disk = size("--memory-bytes", args.memory_bytes), size("--store-bytes", args.store_bytes)
    complete_policies([args.policy], args)
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port}: give a number from 0 to 65535")
    count("--batch", args.batch, 1)
    count("--queue", args.queue, 0)
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
    given["budget"] = number(args.budget)
    from ..serve.app import name_of
    from ..serve.start import start

    for each in args.allow_host:
        if not name_of(each):
            raise ValueError(f"--allow-host {each}: give a name or an address, as in texts.example")
    start(args.model, args.host, args.port, Options(**given))


def size(option: str, text: str) -> int:
    """Parse an option's number of bytes, which may end with the unit K, M, G or T (powers of 1,024)."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in UNITS else (text, "")
    try:
        found = int(float(digits) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise ValueError(f"{option} {text}: give a number of bytes, such as 4G or 500M")
    return found
