import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from ...models import families
from ...models.adapter import CONFIG, Adapter, base_of, bundled, config_of, load
from ...models.weights import differ, fingerprint
from ..checks import count, hold_text
from ..inputs import LayerRows, Observation, OwnPolicy, PromptCall, PromptRead
from . import ROWS, AppendedRows, Rows
from .probe import Probe

USUAL = 32  # number of lookahead rows of the bundled adapter, which is used if no adapter is named
_loaded = WeakKeyDictionary()  # decoder -> (option `adapter`, the Adapter)


@ROWS.add("lookahead")
@dataclass(frozen=True)
class Lookahead(Rows):
    """Learned rows after the prompt observe, read with an adapter (LookaheadKV, METHODS section 6).

    adapter    a `kvevict.lookahead.Adapter` or its folder; None: the bundled adapter, for the bundled model
    probe      number of the prompt's last tokens, at most half of the prompt, that are appended before the learned rows
               to every chunk but the last, so that the learned rows know the task: [chunk | probe | lookahead]. 0:
               [chunk | lookahead]
    window     number of a chunk's own last rows that observe, too (table 7)

    A learned row attends to the alive slots, the probe and the learned rows before it. Learned rows are not stored and
    no slot is protected.
    """

    adapter: Any = None
    probe: int = 32
    window: int = 0
    supports_tensor_parallel: ClassVar[bool] = False  # the adapter's weights fit unsplit projections only

    def __post_init__(self) -> None:
        hold_text(self, "adapter")

    @property
    def most(self) -> int:
        return self._learned + self.window

    @property
    def decoded(self) -> int:
        return self._learned

    @property
    def _learned(self) -> int:
        """The number of learned rows."""
        if isinstance(self.adapter, str):
            path = Path(self.adapter) / CONFIG
            return _tokens(self.adapter, path.stat().st_mtime_ns if path.is_file() else None)
        return USUAL if self.adapter is None else self.adapter.tokens

    def check(self, policy: OwnPolicy) -> None:
        count("probe", self.probe, 0)
        count("window", self.window, 0)
        if not isinstance(self.adapter, (str, Adapter, type(None))):
            raise TypeError(f"adapter must be a kvevict.lookahead.Adapter or its folder, got {self.adapter!r}")
        _ = self._learned  # raises ValueError for a folder that holds no adapter

    def ready(self, decoder: Any) -> None:
        if decoder is not None:
            _loaded.pop(decoder, None)  # load again: the folder's content may have changed
            self.adapter_of(decoder)

    def adapter_of(self, decoder: Any) -> Adapter:
        """Return the adapter on the decoder's device. Raises ValueError if it is missing or was trained on another
        model."""
        known = _loaded.get(decoder)
        if known is None or known[0] != self.adapter:
            known = _loaded[decoder] = self.adapter, self._load(decoder)
        return known[1].to(families.device_of(decoder.get_input_embeddings()))

    def _load(self, decoder: Any) -> Adapter:
        if isinstance(self.adapter, Adapter):
            self.adapter.check(decoder)
            return self.adapter
        if self.adapter is not None:
            return load(self.adapter, decoder)
        own = config_of(bundled()) if Path(bundled()).is_dir() else None
        if own is None or own["base"] != base_of(decoder) or differ(own["weights"], fingerprint(decoder)):
            raise ValueError(
                "lookahead needs an adapter that was trained on this model: adapter=FOLDER or a "
                "kvevict.lookahead.Adapter; `kvevict train` makes one"
            )
        return load(bundled(), decoder)

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        return self._learned if last else min(tokens // 2, self.probe) + self._learned

    def prepare(self, arguments: PromptCall, read: PromptRead) -> AppendedRows | None:
        if not read.evicts:
            return None
        adapter = self.adapter_of(arguments.decoder)
        embed = arguments.decoder.get_input_embeddings()
        rows = adapter.embeddings.to(embed.weight.dtype).expand(arguments.batch, -1, -1)
        if self.probe:
            probe = Probe(self.probe).prepare(arguments, read).tokens  # not None, since slots are evicted
            rows = torch.cat([probe if probe.is_floating_point() else embed(probe), rows], 1)
        return AppendedRows(rows, None, adapter=adapter)

    def observe(self, call: LayerRows, past: object) -> Observation:
        learned = call.appended_rows(count=self._learned)
        return learned + call.chunk(self.window) if self.window else learned


@functools.lru_cache
def _tokens(folder: str, changed: int | None) -> int:
    """Return the number of lookahead rows of the adapter in a folder. changed: modification time of its config.json,
    which makes the cached result invalid when the file changes."""
    return config_of(folder)["tokens"]
