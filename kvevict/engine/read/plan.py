"""The plan of a model's reads: what a policy needs of one model, and how the policy is run."""

import asyncio
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...models import families
from ...policy import reach
from ...policy.policy import Policy
from ...policy.run import Run
from ..measure import quantities
from ..memory.meter import Meter
from ..memory.ranks import Ranks


class Plan:
    """A policy for one model: the layers that evict, and the `Meter` of each caller's last read. A plan does not refer
    to the model, so that copies of the model stay independent.

    question   the kvevict.asking.question.Finder of a prompt's question, which then observes; None: the policy's rows
               observe
    """

    def __init__(self, policy: Policy, run: Run, decoder: Any, ranks: Ranks, question: Any = None) -> None:
        self.policy, self.run, self.ranks, self.question = policy, run, ranks, question
        self.kinds = kinds = families.layer_kinds(decoder.config)
        heads = families.heads(decoder.config)
        # Number of query heads and number of kv heads on this rank
        self.local_heads = heads[0] // ranks.size, heads[1] // ranks.size
        self.kv_heads = families.slot_heads(decoder.config)  # number of kv heads, of all ranks, to choose slots for
        # decoder layer -> its number among the layers that evict
        self.order = {index: order for order, index in enumerate(families.evicting(decoder.config))}
        # decoder layer without keys and values of its own -> the layer whose slots it reads
        self.readers = families.readers(decoder.config)
        self.last_reader = {producer: index for index, producer in sorted(self.readers.items())}
        self.rotates, self.after_attention = {}, {}  # layer -> what models/trial.py found, if the policy needs it
        # What a token reads of the archive and of the weights
        self.sizes = reach.sizes_of(decoder, run.archive_kv or run.kv) if policy.recall else None
        policy.check_layers(len(self.order))
        self.all_full_attention = set(kinds) == {families.FULL_ATTENTION}
        self.keeps_state = bool({families.STATE, families.FULL_ATTENTION_AND_STATE} & set(kinds))
        if policy.recall_check is not None and self.keeps_state:
            raise ValueError(
                f"recall_check={policy.recall_check}: tokens are taken back, which this model's layers with a state "
                f"({decoder.config.model_type}) cannot do: leave recall_check out"
            )
        self.tsp = tsp_of(policy, self.all_full_attention, len(kinds))
        self.wants_probs = policy.carry == "sum" or (policy.decode and policy.rows.newest)
        self.needed = quantities.of_policy(policy)
        self.wants_outputs = any(each.outputs for each in self.needed)
        self.wants_hidden = any("hidden" in each.inputs for each in self.needed)
        # `of_tokens`: the policy's quantity, if it needs only one and a token's hidden state alone determines that one.
        # Then the slot of a decoded token carries its score at once
        alone = len(self.needed) == 1 and self.needed[0].of_tokens and policy.carry == "keep"
        self.of_tokens = self.needed[0] if alone else None
        self.replays: bool | None = None  # whether decoded tokens can be recorded (record/); None: not known yet
        self.unrecorded: str | None = None  # the reason why decoded tokens can never be recorded; None: none is known
        self.watches = 0  # number of caches whose decoded tokens were watched in order to set `replays`
        self._forget()

    def records(self, device: torch.device) -> bool:
        """Return whether tokens that are decoded on a device are to be recorded."""
        return self.run.records(device.type, bool(self.policy.decode))

    def _forget(self) -> None:
        """Set the attributes that a copy of a plan does not share with the original."""
        # caller -> the meter of its last read
        self.meters: WeakKeyDictionary[asyncio.Task | threading.Thread, Meter] = WeakKeyDictionary()
        self.last_meter = Meter()  # the meter of the last read by any caller
        # Number of hooks registered in this process so far, when the model was last found without hooks to call
        self.unhooked: int | None = None

    def __getstate__(self) -> dict:
        return {name: x for name, x in self.__dict__.items() if name not in ("meters", "last_meter", "unhooked")}

    def __setstate__(self, state: dict) -> None:
        """Restore a copied plan, possibly in another process. A copy has no meters, since it has not read anything."""
        self.__dict__.update(state)
        self._forget()

    def keep(self, meter: Meter) -> None:
        """Note `meter` as that of the last read by the running task or thread."""
        self.meters[caller()] = self.last_meter = meter

    def meter(self) -> Meter:
        """Return the meter of the last read by the running task or thread, or, if it has not read, of the last read by
        any other."""
        return self.meters.get(caller(), self.last_meter)


def caller() -> asyncio.Task | threading.Thread:
    """Return the running asyncio task, or, outside of tasks, the running thread."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no event loop runs
        return threading.current_thread()


def tsp_of(policy: Policy, all_full_attention: bool, layers: int) -> int | None:
    """Return the last of `layers` decoder layers that reads every token, by `Policy.tsp`; None if all layers do. Raises
    ValueError if the layers after it cannot read fewer tokens. all_full_attention: no layer has a sliding window or a
    state."""
    tsp: Any = policy.tsp
    if tsp == "half":
        tsp = layers // 2 - 1 if layers > 1 else None
    if tsp is None:
        return None
    if tsp > layers - 2:
        raise ValueError(
            f"tsp={tsp} is not below the model's last layer, {layers - 1}: give a smaller one, or tsp=None"
        )
    if not all_full_attention:
        raise ValueError(
            "layers with a sliding window or a state hold every one of the last tokens, and layers after tsp do not "
            "read them all: pass tsp=None"
        )
    if policy.waiting_layers(layers) > tsp + 1:
        raise ValueError(
            f"the layer that others wait for reads every token, and no layer after tsp={tsp} does: give warmup_layers "
            f"<= {tsp + 1}, or tsp=None"
        )
    return tsp
