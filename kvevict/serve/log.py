"""Writes the server's log: one JSON object per line, which never contains prompts or answers."""

import json
import logging
import time
from typing import Any, TypeAlias

from . import errors
from .call import Call
from .errors import Json, Refused

LOG = logging.getLogger("kvevict.serve")
AGAIN = 3600.0  # least seconds between two lines of the log about the same error
Client: TypeAlias = tuple[str, int] | None  # a client's (address, port)


class Lines(logging.Formatter):
    """Formats a log record as one line of JSON, with the further fields that `extra={"facts": {...}}` gives."""

    def format(self, record: logging.LogRecord) -> str:
        line = dict(time=round(record.created, 3), level=record.levelname.lower(), message=record.getMessage())
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def note(message: str, level: int = logging.INFO, **facts: Any) -> None:
    LOG.log(level, message, extra={"facts": facts})


def to_stderr() -> None:
    """Send the server's log, and the warnings and errors of uvicorn and asyncio, to standard error as lines of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    for logger in (LOG, *map(logging.getLogger, ("uvicorn", "asyncio"))):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if logger is LOG else logging.WARNING)


class Troubles:
    """Logs errors of stored prefixes or texts as warnings: the same message with the same error at most once in `AGAIN`
    seconds."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, Any], float] = {}  # (message, error) -> time.monotonic() when logged

    def note(self, message: str, error: Exception) -> None:
        kind, now = (message, getattr(error, "errno", None) or str(error)), time.monotonic()
        if now - self._logged.get(kind, -AGAIN) >= AGAIN:
            self._logged[kind] = now
            note(message, logging.WARNING, reason=str(error))


def served(call: Call, status: int, client: Client, error: Refused | None) -> None:
    """Log the end of a call, with the error that ended it; error=None: no error."""
    facts: Json = dict(
        id=call.identity, endpoint=call.endpoint, status=status, prompt_tokens=call.prompt_tokens,
        cached_tokens=call.cached_tokens, new_tokens=call.new_tokens, seconds=round(time.monotonic() - call.began, 3),
    )  # fmt: skip
    if call.first_token is not None:
        facts["first_token_seconds"] = round(call.first_token - call.began, 3)
    note("request", **facts, **(_of(error, client) if status >= 400 else {}))


def refused(endpoint: str, error: Refused, client: Client) -> None:
    """Log a request that was refused before there was a `Call` for it."""
    note("refused", endpoint=endpoint, status=error.status, **_of(error, client))


def _of(error: Refused | None, client: Client) -> Json:
    return dict(client=client and client[0], code=error and error.code, param=error and error.param)


def failure(error: Exception) -> Refused:
    """Return the error response for an exception. An exception that the request did not cause is logged."""
    known = errors.refused(error)
    if known.status == 500 and known is not error:
        LOG.error("the model's call failed", exc_info=error)
    return known
