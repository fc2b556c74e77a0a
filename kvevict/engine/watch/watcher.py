"""How to see what a read does, from outside: `with within(watchers=(watcher,)): model(..)` (context.py)."""


class Watcher:
    """Told of every layer of a read, in the thread that reads. It changes nothing."""

    rows = 0  # the last rows of a call that `cut` needs, of a layer that waits for another one's choice, too

    def read(self, call, score) -> None:
        """A layer has attended. call: a `kvevict.engine.read.layer_call.LayerCall`; score: of its slots, neither pooled
        nor refined, None where they were not scored."""

    def cut(self, call, choice) -> None:
        """A layer is about to lose slots, by a `kvevict.engine.read.evict.Choice`."""

    def report(self, rows: int, own: list) -> dict:
        """What `kvevict.report` is to show of a batch of so many rows. own: by layer, whether it is evicted from."""
        return {}
