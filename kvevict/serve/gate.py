"""Who may ask the model now: one request at a time, the others in the order they came."""

import asyncio
import time
from collections import deque

from .errors import Refused


class Gate:
    """most   requests that wait at most, beside the one that runs"""

    def __init__(self, most: int):
        self.most, self._busy, self._turns = most, False, deque()

    @property
    def waiting(self) -> int:
        return len(self._turns)

    async def enter(self, call) -> None:
        """Wait for a turn, which `leave` ends. Raises Refused when too many wait, and TimeoutError."""
        if not self._busy:
            self._busy = True
            return
        if self.waiting >= self.most:
            raise Refused(429, f"{self.waiting} requests are waiting already: try again later", "queue_full")
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await asyncio.wait((turn,), timeout=call.deadline - time.monotonic())
            if not turn.done():
                raise TimeoutError
        except BaseException:
            if turn.done():
                self.leave()
            else:
                self._turns.remove(turn)
            raise

    def leave(self) -> None:
        """Give the turn to who waits longest."""
        if self._turns:
            self._turns.popleft().set_result(None)
        else:
            self._busy = False


async def unless_gone(request, call, work):
    """The result of a coroutine; it is cancelled, and so is the call, when the client leaves. Raises Refused then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "the client has left")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            call.cancel()
            task.cancel()
            await asyncio.wait((task,))


async def _gone(request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
