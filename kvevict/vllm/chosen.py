"""Chooses the attention backend of the model that vLLM builds. Each attribute of this module is a backend, named like a
member of vLLM's `AttentionBackendEnum`.

vLLM looks a registered backend up as an attribute of a module while a model's configuration is current. So
`__getattr__` can choose by the configuration: kvevict's backend for a model with options of kvevict, vLLM's own for any
other model.
"""

from vllm.config import get_current_vllm_config
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from .options import check, options_of


def __getattr__(name: str) -> type:
    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = get_current_vllm_config()
    options = options_of(config)
    if options is not None:
        check(config, options.policy, latents=name.endswith("MLA"))
        from .backend import backend_of

        return backend_of(options, config.model_config.max_model_len)
    if name == "CUSTOM":
        raise ValueError(
            "the attention backend CUSTOM is kvevict's, which has no options here: give --additional-config "
            '\'{"kvevict": {"budget": 4096}}\', or leave --attention-backend out'
        )
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
