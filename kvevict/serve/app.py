"""The routes of a server, whom they answer, and the errors that a client sees."""

import contextlib
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import StarletteHTTPException as HTTPException
from fastapi.responses import HTMLResponse, JSONResponse, Response

from . import log
from .errors import Refused, refused
from .hosts import Hosts
from .metrics import OTHER
from .server import ENDPOINTS, Server

PAGE = Path(__file__).with_name("page.html")
OWN = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {429: {"Retry-After": "1"}, 504: {"x-should-retry": "false"}, 413: {"Connection": "close"}}


def application(server: Server) -> FastAPI:
    """The ASGI application."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        if server.gates is not None:
            server.gates.begin(server)
        yield
        if server.gates is not None:
            server.gates.end()
        server.scheduler.submit(server.prefixes.flush).result()

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.exception_handler(HTTPException)
    @app.exception_handler(Refused)
    @app.exception_handler(Exception)
    async def said(request, error):
        if isinstance(error, HTTPException):
            error = Refused(error.status_code, " ".join(str(error.detail).split()))
        known = refused(error)
        if known.status == 500 and not isinstance(error, Refused):
            log.failed(error)
        return _response(server, request, known)

    def other_host(scope):
        sentence = "this server does not answer for that Host: start it with --allow-host NAME"
        return _response(server, Request(scope), Refused(421, sentence))

    app.add_middleware(Hosts, allowed=server.hosts, refusal=other_host)
    for each in (ValueError, TypeError, TimeoutError):
        app.add_exception_handler(each, said)
    for path in ENDPOINTS:
        app.add_api_route(path, _bound(server.answer, path), methods=["POST"])

    @app.post("/v1/kvevict/texts")
    async def store(request: Request):
        return await server.store(request)

    @app.get("/v1/kvevict/texts")
    def texts(request: Request):  # in a thread: it looks at files
        found = server.texts.of(server.owner(request))
        return {"object": "list", "data": [{"object": "kvevict.text", "name": n, "bytes": size} for n, size in found]}

    @app.delete("/v1/kvevict/texts/{name}")
    async def remove(request: Request, name: str):
        return await server.remove(request, name)

    @app.get("/v1/kvevict/queue")
    async def queue(request: Request):
        return server.queue(request)

    @app.get("/v1/kvevict/texts/{name}/kept")
    async def kept(request: Request, name: str):
        return await server.kept(request, name)

    @app.get("/")
    async def page():
        return HTMLResponse(PAGE.read_text("utf-8"), headers={"Content-Security-Policy": OWN})

    @app.get("/v1/models")
    async def models(request: Request):
        server.owner(request)
        return {"object": "list", "data": [server.model()]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str):
        server.owner(request)
        if name != server.name:
            raise server.other_model(name)
        return server.model()

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health():
        return {"status": "ok"}

    @app.get("/metrics")
    def metrics(request: Request):  # likewise
        server.owner(request)
        return Response(
            server.metrics.text(server.scheduler, server.prefixes, list(server.calls.values())),
            media_type="text/plain; version=0.0.4",
        )

    return app


def _response(server, request, refusal) -> JSONResponse:
    """A refusal, which is counted and logged where no call was."""
    if not getattr(request.state, "noted", False):
        endpoint = getattr(request.scope.get("route"), "path", OTHER)
        server.metrics.refused(endpoint, refusal.status)
        log.refused(endpoint, refusal.status, request.client)
    return JSONResponse(refusal.body(), refusal.status, HEADERS.get(refusal.status))


def _bound(answer, path):
    async def route(request: Request):
        return await answer(path, request)

    return route
