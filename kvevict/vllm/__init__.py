"""kvevict as an attention backend of vLLM: a KV cache of constant size per request, without changes to vLLM's code.

One block of vLLM's cache holds all that is stored for a request, its state: `budget` slots per head and room for
`period` more. After every `period` tokens `kvevict.engine.cut` chooses the slots that stay (METHODS section 14). vLLM
calls `register` in each of its processes. kvevict serves a model whose `additional_config` has the key "kvevict"
(docs/vllm.md).
"""


def register() -> None:
    """Register kvevict's attention backends with vLLM (entry point `vllm.general_plugins`). The backend of a model is
    decided when vLLM builds the model: without the key "kvevict" in its `additional_config` it gets vLLM's own."""
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        import logging

        logging.getLogger(__name__).warning("kvevict needs vLLM 0.29 or newer; this one runs without kvevict")
        return
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.chosen.CUSTOM")
    # On a CPU vLLM uses one of these backends whatever --attention-backend says.
    for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA") if current_platform.is_cpu() else ():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], f"{__name__}.chosen.{name}")
