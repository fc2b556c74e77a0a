import dataclasses
import textwrap

from . import command


@command
def policies(parser, argv):
    """List the presets, what each is, and its options."""
    parser.parse_args(argv)
    from ..policy import PRESETS, build, describe

    def options(thing, *skip):
        pairs = ((f.name, getattr(thing, f.name)) for f in dataclasses.fields(thing) if f.name not in skip)
        return [f"{name}={value!r}" for name, value in pairs]

    for name in PRESETS:
        policy = build(name, budget=0.5)
        words = [*options(policy.score), *options(policy, "score", "budget", "progress")]
        print(textwrap.fill(f"{name:16} {describe(name)}", 100, subsequent_indent=" " * 17))
        print(textwrap.fill(", ".join(words), 100, initial_indent=" " * 17, subsequent_indent=" " * 17) + "\n")
    return {"policies": list(PRESETS)}
