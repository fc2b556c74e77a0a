"""The way of a request from its first byte to its last."""

import asyncio
import copy
import functools
import hashlib
import hmac
import re
import time
from collections.abc import Callable
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from . import check, fields, log
from .call import Call
from .errors import Refused, of_field, refused
from .fields import CHAT, COMPLETIONS, TEXTS
from .generation import Generation
from .handlers import Chat, Completions
from .metrics import Metrics, progress
from .options import Options
from .outgoing import Stream, together, unless_gone
from .policies import Policies
from .prefixes import Prefixes, mark_of
from .prompt import parts
from .sampling import Decoding
from .scheduler import Scheduler
from .texts import Texts, checked

SMALL = 1 << 16  # most bytes of a body that the event loop parses itself, so that small requests keep their order
JSON = re.compile(r"application/(json|.+\+json)\s*(;|$)", re.IGNORECASE)
ENDPOINTS = {CHAT: (Chat, check.chat), COMPLETIONS: (Completions, check.completion)}  # path: handler, its check


class Server:
    """Serves a patched model.

    name  the model's name in requests
    most  most bytes of a request's body
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, policies: Policies, prefixes: Prefixes, texts: Texts,
                 options: Options, most: int = 1 << 24) -> None:  # fmt: skip
        self.name, self.tokenizer, self.policies, self.texts, self.most = name, tokenizer, policies, texts, most
        self.keys, self.timeout, self.hosts = options.keys, options.timeout, options.hosts
        self.began = int(time.time())
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.scheduler = Scheduler(model, prefixes, options.batch, options.queue)
        self.metrics = Metrics()
        self.prefixes, self.manager = prefixes, Generation(model, tokenizer, prefixes, self.scheduler)
        self.calls: list[Call] = []  # calls that have not ended
        self._threads = CapacityLimiter(2)
        self._tokenisers = {
            large: (copy.deepcopy(tokenizer) if large else tokenizer, CapacityLimiter(1)) for large in (False, True)
        }
        self.handlers: dict = {path: kind(name, tokenizer) for path, (kind, _) in ENDPOINTS.items()}

    # -- requests come in ---------------------------------------------------------------------------------------------

    def owner(self, request: Request) -> str:
        """Return the owner of the texts that a request may see. Raises Refused without a right key."""
        if not self.keys:
            return "everyone"
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        for key in self.keys if scheme.lower() == "bearer" else ():
            if hmac.compare_digest(given.encode("latin-1"), key.encode()):  # the bytes as they were sent
                return hashlib.sha256(key.encode()).hexdigest()[:16]
        raise Refused(401, "the API key is missing or wrong: send Authorization: Bearer KEY", "invalid_api_key")

    async def body(self, request: Request, function: Callable[[dict[str, Any]], Any] = lambda body: body) -> Any:
        """Run function(body). Raises Refused for a body that is not a JSON object, or too large."""
        if not JSON.match(request.headers.get("content-type", "")):  # a page of another site may not send that
            raise Refused(415, "send Content-Type: application/json")
        data, declared = bytearray(), request.headers.get("content-length", "")
        self._fits(int(declared) if declared.isdecimal() else 0)
        try:
            async for part in request.stream():
                data += part
                self._fits(len(data))
        except ClientDisconnect:
            raise Refused(499, "the client has left") from None

        def made() -> Any:
            return function(check.parsed(bytes(data)))

        request.state.large = len(data) > SMALL
        return await self._aside(made) if request.state.large else made()

    def _fits(self, size: int) -> None:
        if size > self.most:
            raise Refused(413, f"the body is larger than {self.most} bytes")

    def _checked(self, path: str, body: dict) -> tuple:
        """Take the field `kvevict` out of a body, and return both. Raises Refused for a field that cannot be obeyed."""
        fields.known(path, body)
        ENDPOINTS[path][1](body, self.vocabulary, self.tokenizer.chat_template)
        if body.get("model", self.name) != self.name:
            raise self.other_model(body["model"])
        return body, body.pop("kvevict", {})

    def _call(self, path: str, owner: str, body: dict, asked: dict, text: str | None) -> Call:
        """Build the `Call` of a checked body. text: the stored text that opens the prompt."""
        policy = self.policies.of(asked, text is not None)
        tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
        effort = {"reasoning_effort": body["reasoning_effort"]} if "reasoning_effort" in body else {}
        template = body.get("chat_template_kwargs", {}) | effort | (dict(tools=tools) if tools else {})
        prompts, stop = body.get("prompt", [""]), body.get("stop", [])
        return Call(
            path, owner, policy, asked.get("question"), text, answers=body.get("n", 1),
            seed=body.get("seed"), stop=tuple(stop) if isinstance(stop, list) else (stop,), tools=tools,
            usage=body.get("stream_options", {}).get("include_usage", False),
            sampling=Decoding.of(body, check.sampling(body)), deadline=time.monotonic() + self.timeout,
            single=not body.get("parallel_tool_calls", True), template=template, prompts=prompts, prompt=prompts[0],
        )  # fmt: skip

    # -- the way of a request -----------------------------------------------------------------------------------------

    async def answer(self, path: str, request: Request) -> Response:
        """POST to one of `ENDPOINTS`: answer a request."""
        owner, text = self.owner(request), None
        body, asked = await self.body(request, functools.partial(self._checked, path))
        if asked.get("text") is not None:
            with of_field("kvevict.text"):
                text, own = await self._aside(self.texts.get, owner, asked["text"])
            asked = own | asked
        made = functools.partial(self._call, path, owner, body, asked, text)
        call = await self._aside(made) if request.state.large else made()
        large = request.state.large or len(text or "") > SMALL
        return await self._ended(call, request, self._answer(call, body, large))

    async def _answer(self, call: Any, body: dict, large: bool) -> Any:
        handler, calls = self.handlers[call.endpoint], call.of_prompts()

        def prepare(tokenizer: Any) -> list | None:
            for each in calls:
                each.messages = handler.messages_of(body)
                self.manager.prepare(each, tokenizer)
            return [self.manager.answers(each) for each in calls]

        of_each = await self._tokenising(large, prepare)
        streams = [self.manager.write(each, own) for each, own in zip(calls, of_each, strict=True)]
        parts = streams[0] if calls == [call] else together(streams, call.answers, call.gather)
        answers = [answer for own in of_each for answer in own]
        if body.get("stream"):
            return handler.stream(call, answers, parts)
        return JSONResponse(handler.whole(call, answers, [each async for each in parts]))

    async def store(self, request: Request) -> Response:
        """POST /v1/kvevict/texts: store a text by its name, and read it."""
        owner, body = self.owner(request), await self.body(request)
        fields.known(TEXTS, dict(text="") | body)
        name, text = checked(body.get("name")), body["text"]
        if text.startswith("%PDF-"):
            raise Refused(400, "text is a PDF file: give the words in it", param="text")
        replace, asked = body.get("replace", True), {key: body[key] for key in ("policy", "budget") if key in body}
        await self._aside(self.texts.check, owner, name, text, replace)
        call = self._of_text(TEXTS, owner, asked, text)
        return await self._ended(call, request, self._store(call, name, replace, asked))

    async def _store(self, call: Any, name: str, replace: bool, asked: dict) -> Any:
        whole: Any = await self._alone(call)
        await self.manager.read(call)
        await self._forget(await self._aside(self.texts.put, call.owner, name, call.text, replace, asked))
        tokens = dict(tokens=whole.text[1] - whole.text[0])
        return JSONResponse(dict(object="kvevict.text", name=name) | tokens)

    def list_texts(self, request: Request) -> dict[str, Any]:
        """GET /v1/kvevict/texts: list the names of a key's texts. FastAPI calls it in a thread: it looks at files."""
        found = self.texts.of(self.owner(request))
        return {"object": "list", "data": [{"object": "kvevict.text", "name": n, "bytes": size} for n, size in found]}

    async def remove(self, request: Request, name: str) -> dict[str, Any]:
        """DELETE /v1/kvevict/texts/NAME: forget a text and its caches."""
        await self._forget(await self._aside(self.texts.remove, self.owner(request), name))
        return {"object": "kvevict.text", "name": name, "deleted": True}

    async def _forget(self, *marks: Any) -> None:
        """Remove the caches of deleted texts: those of `marks`, and those that other servers have deleted."""
        await self.manager.forget(await self._aside(self.texts.gone, *marks))

    def _tidied(self, call: Call) -> None:
        """Do as `_forget` in another thread, without waiting. The call's text may have been deleted."""

        def tidy() -> None:
            marks = () if call.text is None else (mark_of(call.owner, call.text),)
            if gone := self.texts.gone(*marks):
                self.scheduler.submit(self.prefixes.forget, gone)

        asyncio.get_running_loop().run_in_executor(None, tidy)

    async def kept(self, request: Request, name: str) -> Response:
        """GET /v1/kvevict/texts/NAME/kept: tell the share of heads that kept each piece of a stored text for the last
        question."""
        owner = self.owner(request)
        text, asked = await self._aside(self.texts.get, owner, name)
        call = self._of_text("/v1/kvevict/texts/kept", owner, asked, text)
        return await self._ended(call, request, self._kept(call, name))

    async def _kept(self, call: Any, name: str) -> Any:
        whole = await self._alone(call)
        start, stop = whole.text
        found = self.manager.reader.kept(call)

        def response(tokenizer: Any) -> Any:
            pieces = parts(tokenizer, whole.ids[start:stop], found)
            return JSONResponse({"object": "kvevict.kept", "name": name, "pieces": pieces})

        return await self._tokenising(len(call.text) > SMALL, response)

    def _of_text(self, endpoint: str, owner: str, asked: dict, text: str) -> Call:
        deadline = time.monotonic() + self.timeout
        return Call(endpoint, owner, self.policies.of(asked, True, prefix=""), text=text, deadline=deadline)

    async def queue(self, request: Request) -> dict[str, Any]:
        """GET /v1/kvevict/queue: tell how far the requests of a key are, and count the others."""
        owner, calls = self.owner(request), list(self.calls)
        every = [(call.owner, progress(call)) for call in calls]
        waiting = sum(each["state"] == "waiting" for _, each in every)
        data = [each for known, each in every if known == owner]
        return {"object": "kvevict.queue", "waiting": waiting, "running": len(calls) - waiting, "data": data}

    async def _alone(self, call: Any) -> Any:
        """Make the prompt of a call's text, without a question. Raises Refused where it does not fit the context."""
        if self.tokenizer.chat_template:
            call.messages = [{"role": "user", "content": ""}]
        await self._tokenising(len(call.text) > SMALL, functools.partial(self.manager.prepare, call))
        call.prompt_tokens = call.whole.text[1]
        return call.whole

    # Work that grows with a request is done in threads, while the event loop serves others.

    async def _aside(self, function: Any, *args: Any) -> Any:
        return await to_thread.run_sync(function, *args, limiter=self._threads)

    async def _tokenising(self, large: bool, function: Any) -> Any:
        """Run function(tokenizer) in a thread. A tokenizer has a state (whether special tokens are letters), so it
        serves one request at a time; large requests have a separate tokenizer, so that small ones never wait."""
        tokenizer, limiter = self._tokenisers[large]
        return await to_thread.run_sync(function, tokenizer, limiter=limiter)

    async def _ended(self, call: Call, request: Any, work: Any) -> Response:
        """Await the response of `work`. The end of the response, or of its stream, is counted and logged."""
        request.state.noted, entered = True, False
        self.calls.append(call)
        call.task = asyncio.current_task()

        def end(status: int, error: Refused | None = None) -> None:
            call.cancel()
            if entered:
                self.scheduler.leave()
            self.calls.remove(call)
            goes_on = call.endpoint == TEXTS and status in (499, 504)  # the next request continues this read
            if not goes_on:
                self._tidied(call)
            self.metrics.note(call, status)
            log.served(call, status, request.client, error)

        try:
            self.scheduler.enter()
            entered = True
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
        """End all calls, whose clients are told so."""
        for call in list(self.calls):
            call.cancel(Refused(503, "the server stops: send the request again"))

    def model(self) -> dict[str, Any]:
        model = {"id": self.name, "object": "model", "created": self.began, "owned_by": "kvevict"}
        return model | {"kvevict": {"chat": bool(self.tokenizer.chat_template)}}

    def other_model(self, name: str) -> Refused:
        sentence = f"there is no model {name[:200]!r}: this server has {self.name!r}"
        return Refused(404, sentence, "model_not_found", "model")
