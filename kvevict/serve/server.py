"""Handles the requests of all endpoints, from a request's body to the end of its response."""

import asyncio
import copy
import functools
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from ..asking.prompts import Tokenizer
from . import check, fields, log
from .beginnings import mark_of
from .call import Call
from .errors import Json, Refused, of_field, refused
from .fields import CHAT, COMPLETIONS, TEXTS
from .generation import Generation
from .handlers import ChatCompletions, Completions
from .messages import of_chat
from .metrics import Metrics, progress
from .options import Options
from .outgoing import Stream, together, unless_gone
from .policies import Policies
from .prefixes import Prefixes
from .prompt import parts
from .scheduler import Scheduler
from .texts import Texts, checked
from .written import Written

SMALL = 1 << 16  # largest body, in bytes, that is parsed in the event loop, so that small requests keep their order
JSON_TYPE = re.compile(r"application/(json|.+\+json)\s*(;|$)", re.IGNORECASE)
ENDPOINTS = {
    CHAT: (ChatCompletions, check.chat),
    COMPLETIONS: (Completions, check.completion),
}  # path -> (class that formats answers, function that checks a request's body)
Result = TypeVar("Result")


class Server:
    """Serves a patched model. name: the model's name in requests; most: the most bytes of a request's body."""

    def __init__(
        self, name: str, model: Any, tokenizer: Tokenizer, policies: Policies, prefixes: Prefixes, texts: Texts,
        options: Options, most: int = 1 << 24,
    ) -> None:  # fmt: skip
        self.name, self.tokenizer, self.policies, self.texts, self.most = name, tokenizer, policies, texts, most
        self.keys, self.timeout, self.hosts = options.keys, options.timeout, options.hosts
        self.began = int(time.time())
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.scheduler, self.room = Scheduler(model, prefixes, options.batch), options.batch + options.queue
        self.metrics = Metrics()
        self.prefixes, self.manager = prefixes, Generation(model, tokenizer, prefixes, self.scheduler)
        self.calls: list[Call] = []  # calls that have not ended
        self._threads = CapacityLimiter(2)
        self._tokenisers = {
            large: (copy.deepcopy(tokenizer) if large else tokenizer, CapacityLimiter(1)) for large in (False, True)
        }
        self.handlers: dict[str, Completions] = {path: kind(name) for path, (kind, _) in ENDPOINTS.items()}

    def owner(self, request: Request) -> str:
        """Return the owner that a request's API key stands for, whose texts alone the request may see. Raises Refused
        for a missing or wrong key. If the server has no keys, there is one owner."""
        if not self.keys:
            return "everyone"
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        for key in self.keys if scheme.lower() == "bearer" else ():
            if hmac.compare_digest(given.encode("latin-1"), key.encode()):  # compare_digest takes ASCII only in a str
                return hashlib.sha256(key.encode()).hexdigest()[:16]
        raise Refused(401, "the API key is missing or wrong: send Authorization: Bearer KEY", "invalid_api_key")

    async def body(self, request: Request) -> Json:
        """Return a request's body, parsed. Raises Refused for a body that is not a JSON object, or is too large."""
        if not JSON_TYPE.match(
            request.headers.get("content-type", "")
        ):  # a browser does not let a page of another site send this type
            raise Refused(415, "send Content-Type: application/json")
        data, declared = bytearray(), request.headers.get("content-length", "")
        self._fits(int(declared) if declared.isdecimal() else 0)
        try:
            async for part in request.stream():
                data += part
                self._fits(len(data))
        except ClientDisconnect:
            raise Refused(499, "the client has left") from None
        request.state.large = len(data) > SMALL
        return await self._work(request, check.parsed, bytes(data))

    def _fits(self, size: int) -> None:
        if size > self.most:
            raise Refused(413, f"the body is larger than {self.most} bytes")

    def _checked(self, path: str, body: Json) -> tuple[Json, Json]:
        """Check the body of a request to the endpoint `path`. Returns (the body without its field `kvevict`, the value
        of that field)."""
        fields.known(path, body)
        ENDPOINTS[path][1](body, self.vocabulary, self.tokenizer.chat_template)
        self._check_model(body.get("model", self.name))
        return body, body.pop("kvevict", {})

    def _call(self, path: str, owner: str, body: Json, asked: Json, text: str | None) -> Call:
        """Make a `Call` from a checked body. asked: the value of its field `kvevict`; text: the stored text that is put
        before the prompt, if any."""
        policy, deadline = self.policies.of(asked, text is not None), time.monotonic() + self.timeout
        return Call.of(path, owner, policy, body, asked.get("question"), text, deadline)

    async def answer(self, path: str, request: Request) -> Response:
        """Answer a POST request to `path`, one of `ENDPOINTS`."""
        owner, text = self.owner(request), None
        body, asked = await self._work(request, self._checked, path, await self.body(request))
        if asked.get("text") is not None:
            with of_field("kvevict.text"):
                text, own = await self._aside(self.texts.get, owner, asked["text"])
            asked = own | asked
        call = await self._work(request, self._call, path, owner, body, asked, text)
        return await self._ended(call, request, self._answer(call, body, request.state.large or _is_large(call)))

    async def _answer(self, call: Call, body: Json, large: bool) -> Response:
        handler, calls = self.handlers[call.endpoint], call.of_prompts()

        def prepare(tokenizer: Tokenizer) -> list[list[Written]]:
            if "messages" in body:
                call.messages = of_chat(tokenizer, body["messages"])
            for each in calls:
                self.manager.prepare(each, tokenizer)
            return [self.manager.answers(each) for each in calls]

        of_each = await self._tokenising(large, prepare)
        streams = [self.manager.write(each, own) for each, own in zip(calls, of_each, strict=True)]
        parts = streams[0] if calls == [call] else together(streams, call.answers)
        answers = [answer for own in of_each for answer in own]
        if body.get("stream"):
            return Stream(handler.events(call, answers, parts), call)
        return JSONResponse(handler.whole(call, answers, [each async for each in parts]))

    async def store(self, request: Request) -> Response:
        """POST /v1/kvevict/texts: have the model read a text, and store the text by its name."""
        owner, body = self.owner(request), await self.body(request)
        fields.known(TEXTS, dict(text="") | body)
        name, text = checked(body.get("name")), body["text"]
        if text.startswith("%PDF-"):
            raise Refused(400, "text is a PDF file: give the words in it", param="text")
        replace, asked = body.get("replace", True), {key: body[key] for key in body if key in ("policy", "budget")}
        await self._aside(self.texts.check, owner, name, text, replace)
        call = self._of_text(TEXTS, owner, asked, text)
        return await self._ended(call, request, self._store(call, name, replace, asked))

    async def _store(self, call: Call, name: str, replace: bool, asked: Json) -> Response:
        _, (start, stop) = await self._alone(call)
        await self.manager.read(call)
        await self._forget(await self._aside(self.texts.put, call.owner, name, call.text, replace, asked))
        return JSONResponse(dict(object="kvevict.text", name=name, tokens=stop - start))

    def list_texts(self, request: Request) -> Json:
        """GET /v1/kvevict/texts: list the texts of the request's owner. This function is not async, so that FastAPI
        calls it in a thread, because it looks at files."""
        found = self.texts.of(self.owner(request))
        return {"object": "list", "data": [{"object": "kvevict.text", "name": n, "bytes": size} for n, size in found]}

    async def remove(self, request: Request, name: str) -> Json:
        """DELETE /v1/kvevict/texts/NAME: delete a text and its caches."""
        await self._forget(await self._aside(self.texts.remove, self.owner(request), name))
        return {"object": "kvevict.text", "name": name, "deleted": True}

    async def _forget(self, *marks: str | None) -> None:
        """Remove the caches of deleted texts. marks: `mark_of` texts that this server has just deleted; the marks of
        texts that other servers have deleted are found."""
        await self.manager.forget(await self._aside(self.texts.gone, *marks))

    def _tidied(self, call: Call) -> None:
        """Remove the caches of deleted texts in the background, also of the call's stored text if it was deleted while
        the call ran."""

        def tidy() -> None:
            marks = () if call.text is None else (mark_of(call.owner, call.text),)
            if gone := self.texts.gone(*marks):
                self.scheduler.submit(self.prefixes.forget, gone)

        asyncio.get_running_loop().run_in_executor(None, tidy)

    async def kept(self, request: Request, name: str) -> Response:
        """GET /v1/kvevict/texts/NAME/kept: the share of heads that kept each piece of a text for the last question."""
        owner = self.owner(request)
        text, asked = await self._aside(self.texts.get, owner, name)
        call = self._of_text("/v1/kvevict/texts/kept", owner, asked, text)
        return await self._ended(call, request, self._kept(call, name))

    async def _kept(self, call: Call, name: str) -> Response:
        ids, (start, stop) = await self._alone(call)
        shares = self.manager.reader.kept(call)
        pieces = await self._tokenising(_is_large(call), lambda tokenizer: parts(tokenizer, ids[start:stop], shares))
        return JSONResponse({"object": "kvevict.kept", "name": name, "pieces": pieces})

    def _of_text(self, endpoint: str, owner: str, asked: Json, text: str) -> Call:
        """Make a `Call` that reads a stored text without a question. asked: the text's `policy` and `budget`."""
        deadline = time.monotonic() + self.timeout
        return Call(endpoint, owner, self.policies.of(asked, True, prefix=""), text=text, deadline=deadline)

    async def _alone(self, call: Call) -> tuple[list[int], tuple[int, int]]:
        """Tokenise a prompt that consists of a call's stored text alone. Returns (the prompt's ids, (start, stop) of
        the text in them). Raises Refused for a text that does not fit the model's context."""
        if self.tokenizer.chat_template:
            call.messages = [{"role": "user", "content": ""}]
        await self._tokenising(_is_large(call), functools.partial(self.manager.prepare, call))
        text = call.whole.text or (0, 0)
        call.prompt_tokens = text[1]
        return call.whole.ids, text

    # Work that takes longer for a larger request runs in threads, so that the event loop can serve other requests.

    async def _work(self, request: Request, function: Callable[..., Result], *args: object) -> Result:
        """Run function(*args), in a thread if the request's body is large, else in the event loop."""
        return await self._aside(function, *args) if request.state.large else function(*args)

    async def _aside(self, function: Callable[..., Result], *args: object) -> Result:
        """Run function(*args) in a thread."""
        return await to_thread.run_sync(function, *args, limiter=self._threads)

    async def _tokenising(self, large: bool, function: Callable[[Tokenizer], Result]) -> Result:
        """Run function(tokenizer) in a thread. A tokenizer has state (whether special tokens are read as text), so it
        serves one request at a time. Large requests use a separate tokenizer, so that small requests never wait
        for large ones."""
        tokenizer, limiter = self._tokenisers[large]
        return await to_thread.run_sync(function, tokenizer, limiter=limiter)

    async def _ended(self, call: Call, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        """Await a call's response, and return it. The end of the call is counted and logged: at once, or, for a stream,
        after its last event."""
        request.state.noted = True
        self.calls.append(call)
        call.task = asyncio.current_task()

        def end(status: int, error: Refused | None = None) -> None:
            call.cancel()
            self.calls.remove(call)
            if call.endpoint != TEXTS or status not in (499, 504):  # else the next request continues to read the text
                self._tidied(call)
            self.metrics.note(call, status)
            log.served(call, status, request.client, error)

        try:
            if len(self.calls) > self.room:
                raise Refused(429, f"{self.room} requests are here already: try again later", "queue_full")
            response = await unless_gone(request, call, work)
        except BaseException as error:
            work.close()
            known = refused(error) if isinstance(error, Exception) else Refused(499, "the request was cancelled")
            end(known.status, known)
            raise
        if isinstance(response, Stream):
            response.end = end
        else:
            end(response.status_code)
        return response

    def stop(self) -> None:
        """End all calls with an error that asks the clients to try again."""
        for call in list(self.calls):
            call.cancel(Refused(503, "the server stops: send the request again"))

    async def queue(self, request: Request) -> Json:
        """GET /v1/kvevict/queue: report the progress of the owner's calls, and how many of all calls wait and run."""
        owner, calls = self.owner(request), list(self.calls)
        every = [(call.owner, progress(call)) for call in calls]
        waiting = sum(each["state"] == "waiting" for _, each in every)
        data = [each for known, each in every if known == owner]
        return {"object": "kvevict.queue", "waiting": waiting, "running": len(calls) - waiting, "data": data}

    def read_metrics(self, request: Request) -> Response:
        """GET /metrics: return the metrics. Not async, so that FastAPI calls it in a thread: it looks at files."""
        self.owner(request)
        text = self.metrics.text(self.scheduler, self.prefixes, list(self.calls))
        return Response(text, media_type="text/plain; version=0.0.4")

    async def list_models(self, request: Request) -> Json:
        """GET /v1/models: list the one model of the server."""
        return {"object": "list", "data": [await self.find_model(request, self.name)]}

    async def find_model(self, request: Request, name: str) -> Json:
        """GET /v1/models/NAME: describe the model of the server."""
        self.owner(request)
        self._check_model(name)
        model = {"id": self.name, "object": "model", "created": self.began, "owned_by": "kvevict"}
        return model | {"kvevict": {"chat": bool(self.tokenizer.chat_template)}}

    def _check_model(self, name: str) -> None:
        """Raise Refused unless `name` is the name of the server's model."""
        if name != self.name:
            sentence = f"there is no model {name[:200]!r}: this server has {self.name!r}"
            raise Refused(404, sentence, "model_not_found", "model")


def _is_large(call: Call) -> bool:
    """Return whether a call's stored text is too long for the tokenizer of small requests."""
    return len(call.text or "") > SMALL
