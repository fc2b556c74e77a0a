"""Installs eviction into a loaded model, and removes it again."""

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from .asking import prompts
from .asking.question import Finder, LastTurn, Unasked
from .engine.hook import installed
from .engine.measure import quantities
from .engine.memory import mapped, ranks
from .engine.read.plan import Plan
from .models import families, known, rotary, trial
from .models.families import base_model, find_decoder
from .models.refusals import check_model
from .policy import reach
from .policy.building import Chosen, build, choose
from .policy.policy import Policy
from .policy.run import Run
from .policy.text import DEFAULT
from .policy.tokenizer import depends, of_model, told, untokenized


def patch(
    model: Any, policy: str | Policy | Chosen = DEFAULT, *, budget: int | float | str | None = None,
    chunk_size: int | None = None, tokenizer: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Make a loaded Transformers model read long prompts in chunks and keep a bounded KV cache; returns the model.

    policy      a preset's name (`kvevict.policies()` lists them), a text NAME:OPTION=VALUE,... or a `kvevict.Policy`;
                default "take+edie"
    budget      int: slots kept per kv head and layer, window and sinks included; float in (0, 1): the fraction of the
                slots that is kept; 1.0: all, nothing is evicted and tokens are the unpatched model's up to rounding;
                text ("64MiB"): bytes of a sequence's slots in all layers. None: 4,096 slots, which hold all of a
                shorter prompt, or no limit if there is a threshold
    chunk_size  tokens per chunk; slots are evicted after every chunk. None: the preset's own schedule
    tokenizer   the model's tokenizer. With rows="probe" (take, take+edie, ...) it serves to find the question in the
                last user's turn, by the chat template: attention from the question scores the slots, if the prompt's
                last tokens do not contain the question anyway. With kernel="digits" (take+edie) it serves to count the
                tokens of a number. None: the tokenizer in the folder that the model was loaded from, if any; False: no
                tokenizer, and the prompt's last tokens are the observation window
    options     any option of the policy (window=16, decode=True, ...) and of how it is run (kv="int8", compiled=True,
                progress=True, ...): docs/options.md lists them

    `model` may also be a pipeline, or a model wrapped by PEFT, DistributedDataParallel or DataParallel.
    `model.generate(...)`, `model(ids)` and pipelines work as before, in every thread. Patching again replaces the
    policy. A running `generate` keeps the policy that it began with; one that began on an unpatched model stores its
    remaining tokens under the new policy. Raises ValueError or TypeError, and leaves the model unchanged, for an
    unknown name, an option out of range, or a model that cannot be patched.
    """
    made = _made(model, policy, dict(options, budget=budget, chunk_size=chunk_size, tokenizer=tokenizer))
    installed.set_own(base_model(model), find_decoder(model), made)
    _warn_of_learned_tokens(model, made, 3)
    return model


def _made(model: torch.nn.Module, policy: str | Policy | Chosen, options: dict) -> Plan:
    """Make the `Plan` of a policy for a model. Raises ValueError or TypeError if the two cannot be combined."""
    tokenizer = options.pop("tokenizer", None)
    chosen, run = choose(policy, **options)
    if tokenizer is not None and tokenizer is not False:
        prompts.check(tokenizer, ", or False")
    decoder = find_decoder(model)
    check_model(model)
    if tokenizer is None and depends(chosen):
        tokenizer = of_model(model)
    question: Finder = Unasked("" if tokenizer is False else untokenized(model))
    if callable(tokenizer):
        chosen, question = told(chosen, tokenizer), LastTurn(tokenizer)
    split = ranks.of(base_model(model))
    if split.size > 1 and not chosen.rows.supports_tensor_parallel:
        raise ValueError(
            "lookahead's adapter is for unsplit projections, and each rank has a part of them (tensor parallel): load "
            "the model in one process, or choose another policy"
        )
    chosen.rows.ready(decoder)
    chosen = in_slots(chosen, run, model)
    name, packed = ("kv", run.kv) if run.archive_kv is None else ("recall_kv", run.archive_kv)
    if packed != "model" and families.is_latent(decoder.config):
        raise ValueError(
            f"{name}={packed!r} and {type(decoder).__name__}: its heads share latents (MLA), which are "
            f"stored in the model's dtype only; give {name}='model'"
        )
    mapped.check(run.archive)
    made = Plan(chosen, run, decoder, split, question)
    rotates = quantities.rotates(chosen, rotary.rope_depends_on_length(decoder))
    modules = families.attentions(decoder, made.order)
    for each in made.needed:
        each.ready(decoder, modules)
    if not is_patched(decoder):
        check_type(model, decoder)
    top = base_model(model)
    if chosen.rows.rotates or rotates:
        made.rotates = dict(trial.rotating(top, decoder))
        made.rotates |= {reader: made.rotates[producer] for reader, producer in made.readers.items()}
    if chosen.layers.residual == "attention":
        made.after_attention = trial.after_attention(top, decoder)
    return made


def in_slots(policy: Policy, run: Run, model: Any) -> Policy:
    """Return the policy, with a budget in bytes converted to slots per kv head of this model."""
    return policy.in_slots(slot_bytes(model, run.kv)) if isinstance(policy.budget, str) else policy


def slot_bytes(model: Any, kind: str = "model", beside: int = 0) -> int:
    """Return the bytes of one slot of a model (`kvevict.policy.reach.slot_bytes`)."""
    return reach.slot_bytes(find_decoder(model), base_model(model).dtype, kind, beside)


def unpatch(model: Any) -> Any:
    """Remove a model's policy, if it has one. The model is exactly as before `patch` once all running calls, and all
    blocks of `evicting` in other threads, have ended."""
    try:
        decoder = find_decoder(model)
    except ValueError:  # `patch` accepts no model without a decoder, so this one has no policy
        return model
    if installed.of(decoder) is not None:
        installed.set_own(base_model(model), decoder, None)
    return model


@contextlib.contextmanager
def evicting(model: Any, policy: str | Policy | Chosen = DEFAULT, **options: Any) -> Iterator[Any]:
    """Use a policy, in place of the one that `patch` set, for this thread's (or asyncio task's) model calls in a block:

    with kvevict.evicting(model, "take", budget=512): ...

    Other threads and asyncio tasks are not affected. A thread that is started in the block is not affected either,
    unless it runs in a copy of the context (`contextvars.copy_context().run`, `asyncio.to_thread`). model, policy and
    options are as `patch` takes them.
    """
    made = _made(model, policy, options)
    _warn_of_learned_tokens(model, made, 4)
    with installed.using(base_model(model), find_decoder(model), made):
        yield model


def _warn_of_learned_tokens(model: torch.nn.Module, made: Plan, stacklevel: int) -> None:
    config = getattr(model, "active_peft_config", None) if hasattr(model, "get_base_model") else None
    learned, policy = getattr(config, "num_virtual_tokens", None) or 0, made.policy  # tokens before every prompt
    most = families.context_of(find_decoder(model).config)
    holds_all = most is not None and policy.threshold is None and policy.slots(most) >= most
    if learned > policy.keep_first and not holds_all:
        warnings.warn(
            f"a PEFT adapter puts {learned} learned tokens before every prompt, which may be evicted; "
            f"keep_first={learned} keeps them",
            stacklevel=stacklevel,
        )


def is_patched(decoder: torch.nn.Module) -> bool:
    """Return whether calls of this decoder, in the running thread and context, have a policy."""
    return installed.plan_of(decoder) is not None


def check_type(model: Any, decoder: Any) -> None:
    """Raise ValueError for a model type that is known to give wrong output under eviction, and for an unknown type
    whose output changes when a prompt is read in chunks."""
    top = base_model(model)
    names = top.config.model_type, decoder.config.model_type
    listed = families.is_transformers(decoder)  # false for remote code, which may use a known type's name
    if listed and known.is_verified(*names):
        return

    def patched(policy: str, options: dict) -> AbstractContextManager:
        return installed.using(top, decoder, Plan(build(policy, **options), Run(), decoder, ranks.of(top)))

    reason = (known.refused(*names) if listed else None) or trial.difference(top, patched)
    if reason:
        raise ValueError(f"{type(top).__name__} (model_type {names[0]!r}) cannot be patched: {reason}")
