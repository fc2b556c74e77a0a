"""The verdict on a model type: its line of `kvevict/known.tsv`, by a tiny model, patched and unpatched."""

import contextlib
import importlib

import tiny
import torch
import zoo
from transformers.cache_utils import DynamicCache

import kvevict
from kvevict.engine.hook import installed
from kvevict.models import families, known, refusals, rotary, trial

LENGTH, NEW, PADS = 70, 6, (0, 9)
CLOSE = 3e-4  # of the largest logit; wrong models are off by 1e-2 and more
ALL = dict(budget=4096)
READS = (  # nothing is evicted before the prompt's end
    ("snapkv", ALL | dict(chunk_size=7)),
    ("snapkv", ALL | dict(chunk_size=33)),
    ("take", dict(budget=LENGTH - 1, chunk_size=7, probe=4, ema_alpha=0.0)),
    ("take", dict(budget=LENGTH - 1, chunk_size=33, probe=4, ema_alpha=0.0)),
)
TIGHT = (
    ("h2o", dict(budget=10, chunk_size=16)), ("snapkv", dict(budget=10, window=4)),
    ("adakv", dict(budget=12, window=4, chunk_size=16)),
    ("take", dict(budget=12, probe=4, chunk_size=16, ema_alpha=0.0)),
)  # fmt: skip
DRAFTED = (("laq", dict(budget=12, window=4)),)
TURNED = (("take", dict(budget=12, probe=4, chunk_size=16)),)
RESIDUAL = (("edie+tada", dict(budget=16, window=4, chunk_size=16)),)


patching = importlib.import_module("kvevict.patch")  # the module, not the function


def judge(name, kind) -> known.Type:
    """The verdict on a type. Only a refusal by kvevict and a difference count as refused; other errors are not ours."""
    decoder = ""
    try:
        model = zoo.make(name, kind)
        inputs = prompt(model)
        with torch.no_grad():
            want = rows(model(**inputs))
    except Exception as error:
        return known.Type(name, decoder, known.UNTRIED, brief(error))
    try:
        found = families.find_decoder(model)
        decoder = found.config.model_type
        refusals.check_model(model)
    except ValueError as error:
        return known.Type(name, decoder, known.REFUSED, str(error).split("cannot be patched: ")[-1])
    try:
        tokens = {beams: generate(model, inputs, num_beams=beams) for beams in (1, 2)}
    except Exception as error:
        return known.Type(name, decoder, known.UNTRIED, brief(error))
    wrong = differs(model, inputs, want, tokens)
    if wrong:
        return known.Type(name, decoder, known.REFUSED, wrong)
    notes = [drafts(model, inputs, want), *(of(model, found, inputs, want) for of in (layers_that_turn, residual))]
    wrong = next((note for note in notes if note.startswith("wrong")), None)
    if wrong:
        return known.Type(name, decoder, known.REFUSED, wrong)
    limits = [note for note in notes if note]
    return known.Type(name, decoder, known.LIMITED if limits else known.EQUAL, "; ".join(limits))


@contextlib.contextmanager
def trusted():
    """Inside, no type is looked up or tried."""
    check, patching.check_type = patching.check_type, lambda model, decoder: None
    try:
        yield
    finally:
        patching.check_type = check


def prompt(model):
    """ids and mask [2, LENGTH], none of the ids special, the second row left-padded."""
    ids = trial.plain_ids(model.config, len(PADS), LENGTH)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(PADS):
        ids[row, :pad] = mask[row, :pad] = 0
    return dict(input_ids=ids, attention_mask=mask)


def rows(out):
    return out.logits if getattr(out, "logits", None) is not None else out[0]


def generate(model, inputs, **options):
    return model.generate(**inputs, **dict(max_new_tokens=NEW, do_sample=False) | options)[:, LENGTH:]


def brief(error) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def off(got, want) -> float:
    return ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()


def differs(model, inputs, want, tokens) -> str | None:
    """The difference to the unpatched model without or with evictions; None: no difference."""
    valid = inputs["attention_mask"].bool()
    for policy, options in READS:
        try:
            with trusted(), torch.no_grad(), kvevict.evicting(model, policy, **options):
                error = off(rows(model(**inputs))[valid], want[valid])
                if kvevict.report(model)["seen"] != valid.sum(1).tolist():
                    return "its text decoder is not what reads the prompt"
                if not error < CLOSE:
                    wrong = f"{policy} in chunks of {options['chunk_size']}: logits off by {error:.0e}"
                    break
                if options["budget"] == 4096:
                    for beams, reference in tokens.items():
                        if not torch.equal(generate(model, inputs, num_beams=beams), reference):
                            return f"other tokens with {beams} beams"
        except Exception as error:
            return brief(error)
    else:
        return evicts(model, inputs, want, TIGHT) or masked(model)
    return trial.itself(model, **inputs, want=want[valid], limit=CLOSE) or wrong


def evicts(model, inputs, want, policies) -> str | None:
    valid = inputs["attention_mask"].bool()
    for policy, options in policies:
        try:
            with trusted(), torch.no_grad(), kvevict.evicting(model, policy, **options):
                got = rows(model(**inputs))[valid]
                generate(model, inputs)
                kept = [layer for layer in kvevict.report(model)["kept"] if layer is not None]
        except Exception as error:
            return f"{policy}: {brief(error)}"
        if not got.isfinite().all():
            return f"{policy}: logits that are not finite"
        if any(sum(row) > options["budget"] * len(row) * len(kept) for layer in kept for row in layer):
            return f"{policy}: more slots than the budget"
        if options["budget"] == 4096 and not off(got, want[valid]) < CLOSE:
            return f"{policy}: logits off by {off(got, want[valid]):.0e}"
    return None


def masked(model) -> str | None:
    """Streaming's kept slots follow from positions alone: the unpatched decoder under a 4D mask must agree, where it
    takes one for every kind of layer."""
    decoder, length, new, size, sink, budget = families.find_decoder(model), 50, 6, 16, 4, 12
    ids = trial.plain_ids(decoder.config, 1, length + new)
    mask = tiny.streaming_sees(length, new, size, sink, budget)
    hide = _masks(decoder.config, mask)
    try:
        with torch.no_grad():
            want = decoder(input_ids=ids, attention_mask=hide, use_cache=False)[0]
    except Exception:  # its masks are of another form
        return None
    with trusted(), torch.no_grad(), kvevict.evicting(model, "streaming", budget=budget, sink=sink, chunk_size=size):
        cache = DynamicCache(config=decoder.config)
        got = [decoder(input_ids=ids[:, :length], past_key_values=cache, use_cache=True)[0]]
        for token in range(length, length + new):
            got.append(decoder(input_ids=ids[:, token : token + 1], past_key_values=cache, use_cache=True)[0])
    error = off(torch.cat(got, 1), want)
    return None if error < CLOSE else f"evicted slots are seen all the same: off by {error:.0e}"


def _masks(config, mask):
    """A float mask, or where there are several kinds of layers one for each."""
    at = torch.arange(len(mask))
    near = (at <= at[:, None]) & (at > at[:, None] - (getattr(config, "sliding_window", None) or len(mask)))
    size = getattr(config, "attention_chunk_size", None) or len(mask)
    masks = {"full_attention": mask, "sliding_attention": near,
             "chunked_attention": (at <= at[:, None]) & (at // size == at[:, None] // size)}  # fmt: skip
    floats = {kind: torch.zeros(m.shape).masked_fill(~m, torch.finfo(torch.float32).min)[None, None]
              for kind, m in masks.items()}  # fmt: skip
    kinds = set(getattr(config, "layer_types", None) or ())
    return {kind: floats.get(kind) for kind in kinds} if len(kinds) > 1 else floats["full_attention"]


def layers_that_turn(model, decoder, inputs, want) -> str:
    """The type's limits under policies that rotate queries, by `rotary.rotate` at other positions than `trial`'s."""
    try:
        turns = trial.rotating(model, decoder)
    except ValueError as error:
        return "no rotation: " + str(error).split(";")[0]
    modules = dict(zip(turns, families.attentions(decoder, turns), strict=True))
    first, then, seen = torch.tensor([2]), torch.tensor([37]), {}

    def alike(module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        x = x[:, :1].expand_as(x)
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | dict(hidden_states=x))

    hooks = [m.register_forward_pre_hook(alike, with_kwargs=True) for m in modules.values()]
    with torch.no_grad(), installed.overheard(model, decoder, lambda m, q, k: seen.update({m.layer_idx: q})):
        decoder(input_ids=trial.plain_ids(decoder.config, 1, 40), use_cache=False)
    for hook in hooks:
        hook.remove()
    for index, module in modules.items():
        q = seen[index][:, :, first]
        turned = rotary.rotate(decoder, module, q, first, then) if turns[index] else q
        if not off(turned, seen[index][:, :, then]) < CLOSE:
            return f"wrong: layer {index} rotates queries in another way"
    wrong = evicts(model, inputs, want, TURNED)
    return f"wrong: {wrong}" if wrong else ""


def drafts(model, inputs, want) -> str:
    """The type's limits under policies with drafts by the model."""
    reason = evicts(model, inputs, want, DRAFTED) or ""
    return reason if not reason or reason.startswith("laq: ValueError") else f"wrong: {reason}"


def residual(model, decoder, inputs, want) -> str:
    """The type's limits under policies that measure the residual stream."""
    try:
        trial.after_attention(model, decoder)
    except ValueError as error:
        return str(error).replace(": give the layer budget", ": tada needs")
    kvevict.history().reset()
    wrong = evicts(model, inputs, want, RESIDUAL)
    kvevict.history().reset()
    return f"wrong: {wrong}" if wrong else ""
