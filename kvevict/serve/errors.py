"""Turns exceptions into the errors that a client of the server sees."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException

Json: TypeAlias = dict[str, Any]  # an object of JSON
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """An error response: HTTP status, message, OpenAI's error code (None: OpenAI has none), and the request field that
    caused the error (None: no single field did)."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> Json:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(error: Exception) -> Refused:
    """Return the error response for an exception. It has the exception's message only if the request caused it."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):  # raised by Starlette, for example 404 for an unknown path
        return Refused(error.status_code, " ".join(str(error.detail).split()))
    if isinstance(error, TimeoutError):
        return Refused(504, "the request took longer than the server allows: ask for fewer tokens, or try again later")
    if isinstance(error, (ValueError, TypeError)):
        return Refused(400, " ".join(str(error).split())[:1000])
    return Refused(500, "the server failed to answer; its log has the error")


@contextlib.contextmanager
def of_field(name: str | None) -> Iterator[None]:
    """Turn errors that the block raises into `Refused`, with the field `name` as their cause (None: no field)."""
    try:
        yield
    except (Refused, ValueError, TypeError) as error:
        known = refused(error)
        known.param = name
        raise known from None
