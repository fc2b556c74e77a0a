import json
import textwrap
from argparse import ArgumentParser

from . import command, options_of


@command
def policies(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """List the preset policies with their options, and the parts from which policies are made."""
    args = parser.parse_args(argv)
    from ..policy.building import choose
    from ..policy.parts import PARTS
    from ..policy.presets import PRESETS, describe

    made = {name: choose(name, budget=0.5) for name in PRESETS}
    choices = {kind: list(registry) for kind, (registry, _) in PARTS.items()}
    if args.json:
        texts = {name: policy.to_json() for name, (policy, _) in made.items()}
        whole = {name: {"about": describe(name), "policy": json.loads(text)} for name, text in texts.items()}
        return {"policies": whole, **choices}
    margin = " " * 17
    for name, chosen in made.items():
        print(textwrap.fill(f"{name:16} {describe(name)}", 100, subsequent_indent=margin))
        options = options_of(chosen, "budget")
        print(textwrap.fill(options, 100, initial_indent=margin, subsequent_indent=margin) + "\n")
    for kind, names in choices.items():
        print(f"{kind:16} {', '.join(names)}")
    return {"policies": list(made), **choices}
