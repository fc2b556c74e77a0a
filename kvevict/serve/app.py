"""Defines the server's HTTP routes, checks the Host header of requests, and turns exceptions into error responses."""

import asyncio
import contextlib
import functools
import ipaddress
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from . import log
from .errors import Refused
from .metrics import OTHER
from .server import ENDPOINTS, Server

PAGE = Path(__file__).with_name("page.html")
POLICY = (  # Content-Security-Policy: the page loads no other file, and connects only to its own server
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {429: {"Retry-After": "1"}, 504: {"x-should-retry": "false"}, 413: {"Connection": "close"}}
LOCAL = "localhost", "127.0.0.1", "::1"
HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]\s]*))(?::[0-9]*)?")


def application(server: Server) -> FastAPI:
    """Make the ASGI application of a server."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        written = await asyncio.wrap_future(server.scheduler.submit(server.prefixes.flush))
        # uvicorn has cancelled the tasks of calls that still ran: wait until each task has logged the end of its call.
        if tasks := [call.task for call in server.calls if call.task]:
            await asyncio.wait(tasks, timeout=1)
        log.note("stopped", prefixes_written=written)

    allowed = {name_of(each) for each in (*LOCAL, *server.hosts)}

    async def own_host(request: Request) -> None:
        """Raise Refused unless the Host header names this server. Otherwise a page of another site could send requests
        here by a name that resolves to this machine (DNS rebinding); the browser puts that name into Host. A request
        without Host (HTTP/1.0) passes: no browser sends it. Starlette's TrustedHostMiddleware would not do: it does not
        know this machine's addresses, and logs nothing."""
        host, here = request.headers.get("host"), request.scope.get("server")
        if host is not None and name_of(host) not in allowed | {here and name_of(here[0])} - {None}:
            raise Refused(421, "this server does not answer for that Host: start it with --allow-host NAME")

    app = FastAPI(lifespan=lifespan, openapi_url=None, dependencies=[Depends(own_host)])

    async def respond(request: Request, error: Exception) -> JSONResponse:
        known = log.failure(error)
        if isinstance(error, HTTPException) and known.status in (404, 405):
            known.message = no_route(app, request.method, request.url.path)
        if not getattr(request.state, "noted", False):  # noted: `Server._ended` has counted and logged the error
            endpoint = getattr(request.scope.get("route"), "path", OTHER)
            server.metrics.refused(endpoint, known.status)
            log.refused(endpoint, known, request.client)
        headers = getattr(error, "headers", None) or HEADERS.get(known.status)  # Starlette's error 405 has Allow
        return JSONResponse(known.body(), known.status, headers)

    for each in (HTTPException, Refused, ValueError, TypeError, TimeoutError, Exception):
        app.add_exception_handler(each, respond)

    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text("utf-8"), headers={"Content-Security-Policy": POLICY})

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    routes: tuple[tuple[str, str, Callable], ...] = (
        *((path, "POST", functools.partial(server.answer, path)) for path in ENDPOINTS),
        ("/v1/kvevict/texts", "POST", server.store), ("/v1/kvevict/texts", "GET", server.list_texts),
        ("/v1/kvevict/texts/{name}", "DELETE", server.remove), ("/v1/kvevict/texts/{name}/kept", "GET", server.kept),
        ("/v1/kvevict/queue", "GET", server.queue), ("/", "GET", page), ("/v1/models", "GET", server.list_models),
        ("/v1/models/{name:path}", "GET", server.find_model), ("/health", "GET HEAD", health),
        ("/metrics", "GET", server.read_metrics),
    )  # fmt: skip
    for path, methods, function in routes:
        app.add_api_route(path, function, methods=methods.split(), response_model=None)
    return app


def no_route(app: FastAPI, method: str, path: str) -> str:
    """Return the error message for a request whose method and path match no route."""
    routes: list[Any] = list(app.routes)
    methods = {each for route in routes if route.path_regex.match(path) for each in route.methods}
    if methods:
        return f"{path[:200]} takes {' and '.join(sorted(methods))}, not {method[:20]}"
    if path == "/v1/responses":
        return f"{path} is not an endpoint of this server: ask at /v1/chat/completions"
    paths = ", ".join(dict.fromkeys(route.path_format for route in routes))
    return f"{path[:200]} is not an endpoint of this server, which has {paths}"


def name_of(host: str) -> str | None:
    """Return the name or IP address in a Host header, in lower case and without the port; None if the header is
    malformed."""
    found = HOST.fullmatch(host)
    six, name = found.groups("") if found else (host, "")
    try:
        return str(ipaddress.ip_address(six or name))
    except ValueError:
        return None if six or "/" in name else name.lower().rstrip(".")
