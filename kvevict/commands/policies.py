import textwrap

from . import command, options_of


@command
def policies(parser, argv):
    """List the presets, what each is, and its options."""
    parser.parse_args(argv)
    from ..policy import PRESETS, build, describe

    margin = " " * 17
    for name in PRESETS:
        print(textwrap.fill(f"{name:16} {describe(name)}", 100, subsequent_indent=margin))
        options = options_of(build(name, budget=0.5), "budget")
        print(textwrap.fill(options, 100, initial_indent=margin, subsequent_indent=margin) + "\n")
    return {"policies": list(PRESETS)}
