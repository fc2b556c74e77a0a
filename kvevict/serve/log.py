"""The log: a JSON object in each line, without prompts and answers."""

import json
import logging
import time
from typing import Any, TypeAlias

from . import errors
from .call import Call
from .errors import Refused

LOG = logging.getLogger("kvevict.serve")
AGAIN = 3600.0  # seconds between two lines about the same trouble
Client: TypeAlias = tuple[str, int] | None  # address and port


class Lines(logging.Formatter):
    """Writes a record as one line of JSON, with the facts of `extra={"facts": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        said = dict(time=round(record.created, 3), level=record.levelname.lower(), message=record.getMessage())
        said |= getattr(record, "facts", {})
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said)


def note(message: str, level: int = logging.INFO, **facts: Any) -> None:
    LOG.log(level, message, extra={"facts": facts})


def to_stderr() -> None:
    """Write the log, and the lines of uvicorn and asyncio, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    for logger in (LOG, *map(logging.getLogger, ("uvicorn", "asyncio"))):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if logger is LOG else logging.WARNING)


class Troubles:
    """Errors of a store. The log has a line for each kind of error at most every `AGAIN` seconds, not for each
    request."""

    def __init__(self) -> None:
        self._told: dict = {}  # kind of error -> when it was logged, by time.monotonic()

    def note(self, message: str, error: Exception) -> None:
        kind, now = (message, getattr(error, "errno", None) or str(error)), time.monotonic()
        if now - self._told.get(kind, -AGAIN) >= AGAIN:
            self._told[kind] = now
            note(message, logging.WARNING, reason=str(error))


def served(call: Call, status: int, client: Client, error: Refused | None) -> None:
    """Log the end of a call. error: the error that ended the call, if any."""
    facts: dict = dict(id=call.identity, endpoint=call.endpoint, status=status, prompt_tokens=call.prompt_tokens)
    facts |= dict(cached_tokens=call.cached_tokens, new_tokens=call.new_tokens)
    facts["seconds"] = round(time.monotonic() - call.began, 3)
    if call.first_token is not None:
        facts["first_token_seconds"] = round(call.first_token - call.began, 3)
    facts |= _of(error, client) if status >= 400 else {}
    note("request", **facts)


def refused(endpoint: str, error: Refused, client: Client) -> None:
    """Log a request that was refused before it became a call."""
    note("refused", endpoint=endpoint, status=error.status, **_of(error, client))


def _of(error: Refused | None, client: Client) -> dict[str, Any]:
    return dict(client=client and client[0], code=error and error.code, param=error and error.param)


def told(error: Exception) -> Refused:
    """Return the error that a client sees, and log one that no request caused."""
    known = errors.refused(error)
    if known.status == 500 and known is not error:
        LOG.error("the model's call failed", exc_info=error)
    return known
