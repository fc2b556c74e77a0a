"""kvevict inside vLLM: a KV cache of constant size per request, without a fork and without a patched line.

A block of vLLM's cache is the whole state of a request: `budget` slots of each head and room for `period` more. After
every `period` tokens `kvevict.engine.cut` chooses the slots that stay (METHODS section 14). vLLM calls `register` in
each of its processes; a model is served by kvevict if its `additional_config` has the key "kvevict" (docs/vllm.md).
"""


def register() -> None:
    """Name kvevict's backends to vLLM (entry point `vllm.general_plugins`). Which backend a model gets is decided when
    vLLM builds it: without the key "kvevict" it gets vLLM's own."""
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        import logging

        logging.getLogger(__name__).warning("kvevict needs vLLM 0.29 or newer; this one runs without kvevict")
        return
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.chosen.CUSTOM")
    # On a CPU vLLM takes its own backend whatever --attention-backend says.
    for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA") if current_platform.is_cpu() else ():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], f"{__name__}.chosen.{name}")
