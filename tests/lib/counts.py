"""What can be said without Transformers: commands' output, and the costs of every preset."""

import contextlib
import io
import json
import sys

COMMANDS = [["policies"], ["plan", "--policy", "tkae"], ["--help"], ["plan", "--help"], ["policies", "--nothing"]]


def counted() -> dict:
    from kvevict import cli
    from kvevict.lab.analysis.cost import plan
    from kvevict.lab.analysis.shape import Shape
    from kvevict.policy import PRESETS, build

    shape = Shape(64, 192, 4, 2, 16, (None,) * 4, 9000, 9500, 6000, 15500, 2)
    found: dict = {"commands": [], "presets": {}}
    for argv in COMMANDS:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(argv)
            except SystemExit as end:
                code = end.code
        found["commands"].append((argv, code, out.getvalue(), err.getvalue()))
    for name in PRESETS:
        try:
            found["presets"][name] = plan(shape, build(name, budget=80), 500, new_tokens=5)
        except ValueError as error:
            found["presets"][name] = str(error)
    return json.loads(json.dumps(found))


if __name__ == "__main__":
    result = counted()
    assert "transformers" not in sys.modules
    print(json.dumps(result))
