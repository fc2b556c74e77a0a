"""Runs each red test of the last pytest run once more, alone:

    python .ci/again.py EXIT_CODE REPORT     EXIT_CODE: pytest's; REPORT gets a line for each test that is green now
    python .ci/again.py --check              fails if .ci/flaky.txt has more than MOST entries

Exits with 0 if all are green now. More than MOST red tests, or an exit code other than 1, are not run again. Who sees a
line of REPORT adds the test to .ci/flaky.txt, with its cause once known, and takes it off with the fix.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

MOST = 10
ROOT = Path(__file__).parents[1]
LIST = ROOT / ".ci/flaky.txt"
RED = ROOT / ".pytest_cache/v/cache/lastfailed"


def listed() -> dict:
    """{test: cause} of .ci/flaky.txt, whose lines are `test: cause`; # begins a comment."""
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line.strip() and line[0] != "#"]
    return {test.strip(): cause.strip() for test, _, cause in (line.partition(": ") for line in lines)}


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        count = len(listed())
        if count > MOST:
            print(f".ci/flaky.txt has {count} tests, at most {MOST} are allowed: fix some first")
        return count > MOST
    code, report = int(sys.argv[1]), Path(sys.argv[2])
    red = sorted(json.loads(RED.read_text(encoding="utf-8"))) if RED.is_file() else []
    if code != 1 or not 0 < len(red) <= MOST:
        return code
    environment = {name: value for name, value in os.environ.items() if name != "KVEVICT_DURATIONS"}
    still = []
    with report.open("w", encoding="utf-8") as out:
        for test in red:
            print(f"again, alone: {test}", flush=True)
            if subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-n0", test], cwd=ROOT, env=environment
            ).returncode:
                still.append(test)
            else:
                known = listed().get(test.partition("[")[0], "not yet in .ci/flaky.txt: add it")
                out.write(f"red, then green alone: {test} ({known})\n")
    return bool(still)


if __name__ == "__main__":
    sys.exit(main())
