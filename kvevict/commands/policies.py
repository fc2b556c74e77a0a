import json
import textwrap

from . import command


@command
def policies(parser, argv):
    """List the presets and the choices they are made of, with their options."""
    parser.add_argument("--json", action="store_true", help="only the JSON line, with every preset's whole policy")
    args = parser.parse_args(argv)
    from ..policy import PARTS, build
    from ..presets import PRESETS, describe

    made = {name: json.loads(build(name, budget=0.5).to_json()) for name in PRESETS}
    choices = {kind: list(registry) for kind, (registry, _) in PARTS.items()}
    if args.json:
        return {"policies": {name: {"about": describe(name), **policy} for name, policy in made.items()}, **choices}
    for name, policy in made.items():
        words = [word for field, value in policy.items() if field not in ("budget", "progress")
                 for word in _words(field, value)]  # fmt: skip
        print(textwrap.fill(f"{name:16} {describe(name)}", 100, subsequent_indent=" " * 17))
        print(textwrap.fill(", ".join(words), 100, initial_indent=" " * 17, subsequent_indent=" " * 17) + "\n")
    for kind, names in choices.items():
        print(f"{kind:16} {', '.join(names)}")
    return {"policies": list(made), **choices}


def _words(field, value):
    """A field as NAME=VALUE; of a part its name, then its options."""
    if not isinstance(value, dict):
        return [f"{field}={value!r}"]
    options = [f"{name}={option!r}" for name, option in value.items() if name != "name"]
    return [f"{field}={value['name']}", *options]
