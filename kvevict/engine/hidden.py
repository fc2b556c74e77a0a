"""The input of a layer's attention block, noted where a quantity of the policy needs it."""

from .. import families
from ..context import context


def install(decoder, state) -> list:
    """Hooks that put it into `Step.hidden`, from where the layer's call takes it."""
    if not state.wants_hidden:
        return []
    layers = families.layers_of(decoder)
    modules = [families.attention_of(layers[index], index) for index in state.order]
    return [module.register_forward_pre_hook(_note, with_kwargs=True) for module in modules]


def _note(module, args, kwargs):
    now = context()
    if now.step is None:
        return
    now.step.hidden[module.layer_idx] = x = args[0] if args else kwargs["hidden_states"]
    if now.tap is not None:
        now.tap.attention_input = x
