"""The log: a JSON object in each line, without prompts and answers."""

import json
import logging
import time

from .call import Call
from .sharing import said

LOG = logging.getLogger("kvevict.serve")


class Lines(logging.Formatter):
    """Writes a record as one line of JSON, with the facts of `extra={"facts": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        said = dict(time=round(record.created, 3), level=record.levelname.lower(), message=record.getMessage())
        said |= getattr(record, "facts", {})
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said)


def to_stderr() -> None:
    """Write the log, and the lines of uvicorn and asyncio, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    for logger in (LOG, *map(logging.getLogger, ("uvicorn", "asyncio"))):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if logger is LOG else logging.WARNING)


def served(call: Call, status: int) -> None:
    """Log the end of a call."""
    facts: dict = dict(id=call.identity, endpoint=call.endpoint, status=status, prompt_tokens=call.prompt_tokens)
    facts |= dict(cached_tokens=call.cached_tokens, new_tokens=call.new_tokens)
    facts["seconds"] = round(time.monotonic() - call.began, 3)
    if call.first_token is not None:
        facts["first_token_seconds"] = round(call.first_token - call.began, 3)
    LOG.info("request", extra={"facts": facts | said(call)})


def refused(endpoint: str, status: int, client: tuple[str, int] | None) -> None:
    """Log a request that was refused before it became a call."""
    facts = dict(endpoint=endpoint, status=status, client=client and client[0])
    LOG.info("refused", extra={"facts": facts})


def failed(error: Exception) -> None:
    """Log an error that no request caused."""
    LOG.error("the model's call failed", exc_info=error)
