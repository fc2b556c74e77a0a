"""`kvevict train` in a separate process, for a server: at a low priority, first to go where memory runs out, and gone
with the server: then the pipe at standard input ends.

python -m kvevict.serve.trainer ARGUMENTS    `--data -` is Python's own documentation
"""

import contextlib
import io
import os
import sys
import threading
from pathlib import Path

from ..cli import main


def documentation() -> str:
    """A text that every Python has: 460,000 letters about the language."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def _wait() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    os.nice(10)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_wait, daemon=True).start()
    if "-" in sys.argv:
        sys.stdin = io.TextIOWrapper(io.BytesIO(documentation().encode()))
    sys.exit(main(["train", *sys.argv[1:]]))
