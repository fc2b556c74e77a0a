"""Refuses a request to vLLM's server whose named question is not in its prompt: `--middleware
kvevict.vllm.asked.InPrompt`. vLLM shows no other plugin of its frontend a prompt and its parameters together.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from ..asking.tokens import squeezed
from .questions import QUESTION

Call = Callable[..., Awaitable[Any]]  # a server, or what it gets messages from and sends them to


class InPrompt:
    """An ASGI middleware that answers such a request with 400, and hands on every other one as it came."""

    def __init__(self, app: Call) -> None:
        self.app = app

    async def __call__(self, scope: dict, receive: Call, send: Call) -> None:
        kinds = [value for name, value in scope.get("headers", ()) if name == b"content-type"]
        if scope.get("method") != "POST" or not any(b"json" in kind for kind in kinds):
            return await self.app(scope, receive, send)
        parts: list[dict] = []
        while not parts or parts[-1].get("more_body"):
            parts.append(await receive())
        if not lacks_question(b"".join(part.get("body", b"") for part in parts)):

            async def again() -> dict:
                return parts.pop(0) if parts else await receive()

            return await self.app(scope, again, send)
        said = f"{QUESTION} is not in the prompt: give it in the prompt's words, or leave it out"
        error = dict(message=said, type="BadRequestError", param=QUESTION, code=400)
        start = dict(type="http.response.start", status=400, headers=[(b"content-type", b"application/json")])
        await send(start)
        await send(dict(type="http.response.body", body=json.dumps(dict(error=error)).encode()))


def lacks_question(body: bytes) -> bool:
    """Whether a request names a question that, white space aside, is in none of its texts. Prompts of token ids are not
    looked into."""
    try:
        request = json.loads(body)
        question = request["vllm_xargs"][QUESTION]
    except (ValueError, TypeError, KeyError):
        return False
    texts = [*_texts(request.get("prompt")), *_texts(request.get("messages"))]
    if not isinstance(question, str) or not texts:
        return False
    return not any(squeezed(question) in squeezed(text) for text in texts)


def _texts(given: object) -> Iterator[str]:
    """Yield the texts of a prompt, of messages, or of a message's parts."""
    if isinstance(given, str):
        yield given
    for each in given if isinstance(given, list) else ():
        yield from _texts(each.get("content", each.get("text")) if isinstance(each, dict) else each)
