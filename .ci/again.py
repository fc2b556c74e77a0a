"""Runs each red test of the last pytest run once more, alone:

    python .ci/again.py EXIT_CODE REPORT     EXIT_CODE: pytest's; REPORT gets a line for each red test
    python .ci/again.py --check              fails if .ci/flaky.txt has more than MOST entries

Exits with 0 if all are green now. More than MOST red tests, or an exit code other than 1, are not run again. Who sees a
line of REPORT adds the test to .ci/flaky.txt, with its cause once known, and takes it off with the fix.
"""

import json
import os
import shlex
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
    once_more = code == 1 and 0 < len(red) <= MOST
    tier = " ".join(f"{name}={os.environ[name]}" for name in ("KVEVICT_TESTS", "KVEVICT_SEED") if name in os.environ)
    still = []
    with report.open("w", encoding="utf-8") as out:
        for test in red:
            alone = [sys.executable, "-m", "pytest", "-q", "-n0", test]
            if once_more and not subprocess.run(alone, cwd=ROOT).returncode:
                known = listed().get(test.partition("[")[0], "not yet in .ci/flaky.txt: add it")
                out.write(f"red, then green alone: {test} ({known})\n")
            else:
                still.append(test)
                out.write(f"red: {tier} python -m pytest -n0 {shlex.quote(test)}\n")
    return 0 if once_more and not still else code


if __name__ == "__main__":
    sys.exit(main())
