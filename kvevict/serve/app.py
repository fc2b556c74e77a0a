"""The routes of a server, the Hosts that they answer to, and the errors that a client sees."""

import asyncio
import contextlib
import functools
import ipaddress
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from . import log
from .errors import Refused
from .metrics import OTHER
from .server import ENDPOINTS, Server

PAGE = Path(__file__).with_name("page.html")
OWN = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {429: {"Retry-After": "1"}, 504: {"x-should-retry": "false"}, 413: {"Connection": "close"}}
LOCAL = "localhost", "127.0.0.1", "::1"
HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]\s]*))(?::[0-9]*)?")


def application(server: Server) -> FastAPI:
    """Make the ASGI application of a server."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        written = await asyncio.wrap_future(server.scheduler.submit(server.prefixes.flush))
        if tasks := [call.task for call in server.calls]:  # cancelled by uvicorn: they are logged before the end
            await asyncio.wait(tasks, timeout=1)
        log.note("stopped", prefixes_written=written)

    allowed = {name_of(each) for each in (*LOCAL, *server.hosts)}

    async def own_host(request: Request) -> None:
        """Refuse a page of another site: that site's name may have this machine's address (DNS rebinding), but the
        browser sends the name as Host. A request without a Host (HTTP/1.0) is not from a browser. Starlette's
        TrustedHostMiddleware does not know the address that a request came to, and writes no log."""
        host, here = request.headers.get("host"), request.scope.get("server")
        if host is not None and name_of(host) not in allowed | {here and name_of(here[0])} - {None}:
            raise Refused(421, "this server does not answer for that Host: start it with --allow-host NAME")

    app = FastAPI(lifespan=lifespan, openapi_url=None, dependencies=[Depends(own_host)])

    async def said(request: Any, error: Any) -> Any:
        known = log.told(error)
        if isinstance(error, HTTPException) and known.status in (404, 405):
            known.message = routed(app, request.method, request.url.path)
        if not getattr(request.state, "noted", False):  # a call would count and log the error itself
            endpoint = getattr(request.scope.get("route"), "path", OTHER)
            server.metrics.refused(endpoint, known.status)
            log.refused(endpoint, known, request.client)
        headers = getattr(error, "headers", None) or HEADERS.get(known.status)  # a 405 has Allow
        return JSONResponse(known.body(), known.status, headers)

    for each in (HTTPException, Refused, ValueError, TypeError, TimeoutError, Exception):
        app.add_exception_handler(each, said)
    for path in ENDPOINTS:
        app.add_api_route(path, functools.partial(server.answer, path), methods=["POST"], response_model=None)
    for path, method, function in (
        ("/v1/kvevict/texts", "POST", server.store), ("/v1/kvevict/texts", "GET", server.list_texts),
        ("/v1/kvevict/texts/{name}", "DELETE", server.remove), ("/v1/kvevict/texts/{name}/kept", "GET", server.kept),
        ("/v1/kvevict/queue", "GET", server.queue),
    ):  # fmt: skip
        app.add_api_route(path, function, methods=[method], response_model=None)

    @app.get("/")
    async def page() -> Any:
        return HTMLResponse(PAGE.read_text("utf-8"), headers={"Content-Security-Policy": OWN})

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        server.owner(request)
        return {"object": "list", "data": [server.model()]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Any:
        server.owner(request)
        if name != server.name:
            raise server.other_model(name)
        return server.model()

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Any:
        return {"status": "ok"}

    @app.get("/metrics")
    def metrics(request: Request) -> Any:  # FastAPI calls it in a thread, as it looks at files
        server.owner(request)
        return Response(
            server.metrics.text(server.scheduler, server.prefixes, list(server.calls)),
            media_type="text/plain; version=0.0.4",
        )

    return app


def routed(app: FastAPI, method: str, path: str) -> str:
    """Return the sentence about a request that no route takes."""
    routes: list[Any] = list(app.routes)
    methods = {each for route in routes if route.path_regex.match(path) for each in route.methods}
    if methods:
        return f"{path[:200]} takes {' and '.join(sorted(methods))}, not {method[:20]}"
    if path == "/v1/responses":
        return f"{path} is not an endpoint of this server: ask at /v1/chat/completions"
    paths = ", ".join(dict.fromkeys(route.path_format for route in routes))
    return f"{path[:200]} is not an endpoint of this server, which has {paths}"


def name_of(host: str) -> str | None:
    """Return the name or the address in a Host, in lower case and without a port; None for anything else."""
    found = HOST.fullmatch(host)
    six, name = found.groups("") if found else (host, "")
    try:
        return str(ipaddress.ip_address(six or name))
    except ValueError:
        return None if six or "/" in name else name.lower().rstrip(".")
