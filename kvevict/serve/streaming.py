"""Streamers of `generate` that end with their call."""

from transformers.cli.serving.utils import DirectStreamer

from .call import Call


class Tokens:
    """Tells the call of its tokens."""

    def __init__(self, call: Call):
        self.call, self.started = call, False

    def put(self, value) -> None:
        if self.started:
            self.call.token()
        self.started = True  # the first are the prompt's

    def end(self) -> None:
        pass


class Streamer(DirectStreamer):
    """Transformers' streamer, whose text ends before a stop string of the call."""

    def __init__(self, *args, call: Call, **options):
        self.call, self.tokens = call, Tokens(call)
        self.held, self.stopped = "", False  # text that may begin a stop string; whether one came
        super().__init__(*args, **options)

    def put(self, value) -> None:
        self.tokens.put(value)
        super().put(value)

    def cancel(self) -> None:
        self.call.cancel()

    def _enqueue(self, item) -> None:
        if self.call.stop and (item is None or type(item) is str):
            if self.stopped and item is not None:
                return
            text = self.held + (item or "")
            cut = cut_at(text, self.call.stop)
            self.stopped = self.stopped or cut < len(text)
            if item is not None and not self.stopped:
                cut -= unfinished(text, self.call.stop)
            self.held = "" if self.stopped else text[cut:]
            if cut:
                super()._enqueue(text[:cut])
        if item is None or not (self.call.stop and type(item) is str):
            super()._enqueue(item)


def cut_at(text: str, stops) -> int:
    """Where the first stop string begins; the text's length without one."""
    return min((at for at in map(text.find, stops) if at >= 0), default=len(text))


def unfinished(text: str, stops) -> int:
    """How many of the text's last letters may begin a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
