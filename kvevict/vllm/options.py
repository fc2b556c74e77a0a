"""The options of kvevict for a model, from vLLM's `additional_config={"kvevict": {...}}`, and the checks that refuse
policies, models and configurations of vLLM."""

import contextlib
import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..asking.prompts import Tokenizer
from ..engine.measure.quantities import of_policy
from ..policy import kv
from ..policy.building import build
from ..policy.checks import SLOTS, count
from ..policy.layers import LayerBudget
from ..policy.policy import Policy
from ..policy.rows.probe import Probe
from ..policy.rows.window import All, Last, NoRows, Window
from ..policy.run import OPTIONS
from ..policy.text import DEFAULT, parse_policy
from ..policy.tokenizer import depends, told

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class VllmOptions:
    """The options of kvevict for one model.

    policy   the policy that chooses the slots that stay; its `budget` is the mean number of slots per kv head
    period   number of tokens, of a prompt or its answer, between two evictions
    group    number of query heads per kv head
    kv       how slots are stored, a name in `policy.kv.KINDS`
    """

    policy: Policy
    period: int
    group: int
    kv: str = "model"

    @functools.cached_property
    def window(self) -> int:
        """The number of a period's last tokens whose queries observe, that is, score the slots."""
        return 0 if self.sums else self.policy.rows.most or 0

    @property
    def alike(self) -> bool:
        """Whether keys and values have rows of equally many bytes, so that a block begins at the same row of both."""
        key, value = kv.KINDS[self.kv]
        return key == value

    @functools.cached_property
    def sums(self) -> bool:
        """Whether a slot is scored by the sum of the attention weights of all rows so far, which the state keeps."""
        return sums_attention(self.policy)

    @functools.cached_property
    def slots(self) -> int:
        """The mean number of slots per kv head after an eviction."""
        return self.policy.slots(0)

    def place(self, tokens: int) -> int:
        """The index of a token among the last `window` tokens of its period, which observe; negative for a token before
        them. tokens: the number of the request's tokens before this one."""
        return tokens % self.period - (self.period - self.window)

    def ends(self, tokens: int) -> bool:
        """Whether a period ends after this number of tokens of a request."""
        return tokens % self.period == 0


def sums_attention(policy: Policy) -> bool:
    """Whether slots are scored by the sum of all rows' attention weights (H2O, VATP)."""
    return policy.carry == "sum" and type(policy.rows) is All and policy.score.adds_attention


# Policies that need more than a layer's slots and a period's last rows: (function of a policy, True if it is refused;
# the reason; an option that avoids it, or "").
REFUSED = (
    (lambda p: p.recall, "an archive of all slots has no constant size", "recall=False"),
    (lambda p: p.keep_prompt, "a prompt's slots have no constant number", "keep_prompt=False"),
    (lambda p: p.tsp is not None, "vLLM's layers all read the same tokens", "tsp=none"),
    (lambda p: p.n_reuse > 1, "vLLM's layers each store their own slots", "n_reuse=1"),
    (lambda p: p.warmup_layers not in (None, 1), "vLLM's layers do not wait for each other", "warmup_layers=none"),
    (lambda p: type(p.layers) is not LayerBudget, "every layer's part of a state has the same size", "layers=uniform"),
    (lambda p: not sums_attention(p) and type(p.rows) not in (NoRows, Last, Window, Probe),
     "its observing rows are not a text's last ones", "rows=window"),
    (lambda p: getattr(p.rows, "span", None), "a span is counted in a prompt, and periods are not", "probe=32"),
    (lambda p: p.carry != "none" and not sums_attention(p), "a state keeps no numbers of slots but sums of attention",
     "carry=none"),
    (lambda p: any(each.needs or each.remembers for each in of_policy(p)),
     "it measures more than a layer's slots and rows", ""),
)  # fmt: skip
SCHEDULER = "kvevict.vllm.scheduler.create"  # value of --scheduler-cls that copies questions into prompts
PROCESSOR = "kvevict.vllm.copies:RequestCopies"  # value of --logits-processors that tells the backend of the copies
INSTEAD = "snapkv, edie, paasvn, chunkkv, take+edie, streaming, h2o, tova, knorm, keydiff or random"


def options_of(config: "VllmConfig") -> VllmOptions | None:
    """Return kvevict's options from a `VllmConfig`; None: it has none, and the model is served without kvevict."""
    more = config.additional_config
    if not isinstance(more, dict) or "kvevict" not in more:
        return None
    model = config.model_config
    heads = [get(config.parallel_config) for get in (model.get_num_attention_heads, model.get_num_kv_heads)]
    return _made(json.dumps(more["kvevict"]), heads[0] // heads[1], model.max_model_len, *tokenizer_name(config))


def copies_questions(config: "VllmConfig") -> bool:
    """Whether requests' prompts have copies of their questions."""
    return config.scheduler_config.scheduler_cls == SCHEDULER


def tokenizer_name(config: "VllmConfig") -> tuple[str, str | None, bool]:
    """The name of a model's tokenizer, its revision, and whether its code is trusted."""
    model = config.model_config
    return model.tokenizer, model.tokenizer_revision, model.trust_remote_code


@functools.cache
def _made(text: str, group: int, context: int, tokenizer: str, revision: str | None, trusted: bool) -> VllmOptions:
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError(f'kvevict in vLLM: give {{"kvevict": {{"budget": {SLOTS}}}}}, got {text}')
    given = {"policy": DEFAULT, "period": 512, "kv": "model"} | given
    period, kind = count("kvevict's period", given.pop("period"), 1), given.pop("kv")
    if kind not in kv.KINDS:
        raise ValueError(f"kvevict in vLLM: kv={kind!r} is unknown: give one of {', '.join(kv.KINDS)}")
    policy = policy_of(given, period, min(SLOTS, context))
    if depends(policy) and (its := tokenizer_of(tokenizer, revision, trusted)) is not None:
        policy = told(policy, its)
    return VllmOptions(policy, period, group, kind)


def policy_of(given: dict, period: int, slots: int = SLOTS) -> Policy:
    """Build a policy from `given`: its name and options as the text "policy", and further options such as "budget",
    which is `slots` if it is not given. Raises ValueError, with the reason and a policy to give in its place, if the
    policy needs more than a layer's slots and the last rows of a period."""
    given = dict(given)
    text = given.pop("policy")
    name, own = parse_policy(text)
    for option in {*own, *given} & {*OPTIONS, "chunk_size", "schedule", "decode", "interval"} - {"recall"}:
        raise ValueError(
            f"kvevict in vLLM: {option} is not an option here: slots are evicted every `period` tokens of a "
            "prompt and its answer, and stored as `kv` says; leave it out"
        )
    policy = build(name, **(dict(budget=slots) | own | given), chunk_size=period)
    if not isinstance(policy.budget, int) or policy.threshold is not None:
        raise ValueError(
            "kvevict in vLLM: a request has the same memory whatever its text: give budget as a number of slots "
            "of each head, as in 4096, and no threshold"
        )
    lacking, instead = _lacking(policy), INSTEAD
    if lacking:
        changes = dict(change.split("=") for _, change in lacking if change)
        options = {option: value for option, value in own.items() if option not in changes} | changes
        fixed = name + ":" + ",".join(f"{option}={value}" for option, value in options.items())
        with contextlib.suppress(ValueError):
            others = {option: value for option, value in given.items() if option not in changes}
            if not _lacking(build(fixed, **dict(budget=slots) | others, chunk_size=period)):
                instead = repr(fixed)
        reasons = "; ".join(reason for reason, _ in lacking)
        raise ValueError(f"kvevict in vLLM: policy {text!r} cannot work here, because {reasons}: give {instead}")
    if not sums_attention(policy) and (policy.rows.most or 0) > period:
        raise ValueError(f"kvevict in vLLM: period={period} is less than the {policy.rows.most} rows that observe")
    return policy


def _lacking(policy: Policy) -> list[tuple[str, str]]:
    return [(reason, change) for refused, reason, change in REFUSED if refused(policy)]


def tokenizer_of(name: str, revision: str | None, trusted: bool) -> Tokenizer | None:
    """The model's tokenizer; None if Transformers cannot load it, for example for a model in one of vLLM's own
    formats."""
    from transformers import AutoTokenizer

    found: Tokenizer | None = None
    with contextlib.suppress(Exception):
        found = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trusted)  # type: ignore
    return found


def check(config: "VllmConfig", policy: Policy, latents: bool = False) -> None:
    """Raise ValueError, with the reason, if kvevict cannot serve the model with this policy under this configuration of
    vLLM. latents: whether vLLM asks for a backend for latent attention (MLA)."""
    model, parallel = config.model_config, config.parallel_config
    for refused, reason in (
        (latents or model.use_mla, "the model stores latents (MLA), which heads share: serve it without kvevict"),
        (model.is_hybrid or model.is_attention_free, "the model has layers with a state: serve it without kvevict"),
        (model.is_encoder_decoder or model.runner_type != "generate", "only decoders that generate are served"),
        (config.speculative_config is not None,
         "tokens that are taken back may have passed a cut: leave --speculative-config out"),
        (copies_questions(config) and config.use_v2_model_runner,
         "requests' questions need vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0"),
        (copies_questions(config) and PROCESSOR not in (model.logits_processors or ()),
         f"--scheduler-cls {SCHEDULER} needs --logits-processors {PROCESSOR}"),
        (config.kv_transfer_config is not None, "a state has no pages to send: leave --kv-transfer-config out"),
        (parallel.use_ubatching,
         "a request in two parts of a batch would lose slots early: leave --enable-dbo and --ubatch-size out"),
        (parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
         "layers and slots were only tried in one process: leave these parallel sizes at 1"),
        (parallel.tensor_parallel_size > 1 and (policy.heads.ragged or policy.shared),
         "heads compete or share slots, which lie in several processes: leave --tensor-parallel-size at 1, or give a "
         "policy without, such as snapkv or take+edie"),
        (config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"),
         "slots are stored in the model's dtype: leave --kv-cache-dtype out"),
    ):  # fmt: skip
        if refused:
            raise ValueError(f"kvevict in vLLM: {reason}")
