"""An attention backend of vLLM in which one block of the cache holds the whole state of a request.

`customize_spec` makes a block as long as the longest request, so every request has exactly one block, whatever its
length; vLLM's scheduler, admission, block tables and preemption work unchanged. Slots are evicted at fixed token
positions. So a state depends on the request's tokens alone, not on how the scheduler splits them into steps: nothing
but the state is kept from step to step, and a request that lost its block is recomputed with the same result.
"""

import functools
import re
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout, KVCacheSpec, SlidingWindowSpec

from .copies import OF_CONFIG
from .layers import Layers
from .options import VllmOptions, copies_questions, options_of
from .questions import NONE, Copies
from .shape import StateShape
from .state import Singles, States


@dataclass(frozen=True, kw_only=True)
class StateSpec(FullAttentionSpec):
    """vLLM's description of a layer's cache in which a block is one request's state. As a `FullAttentionSpec` it is
    managed like the cache of full attention."""

    @property
    def prefix_cacheable(self) -> bool:
        return False


class Backend(AttentionBackend):
    """kvevict's attention backend. `backend_of` makes a subclass with the options of a model."""

    options: ClassVar[VllmOptions]
    max_tokens: ClassVar[int]
    impl: ClassVar[type]
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # a member of vLLM's `AttentionBackendEnum`

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple:
        return (KVCacheLayout.LHBNC,)  # `States` needs each plane of all blocks to be dense

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        full = type(spec) is FullAttentionSpec
        if not full and (type(spec) is not SlidingWindowSpec or spec.sliding_window < cls.max_tokens):
            raise ValueError("kvevict in vLLM: the model has layers with a sliding window: serve it without kvevict")
        shape = StateShape(spec.num_kv_heads, spec.head_size, spec.dtype, cls.options)
        own = {name: getattr(spec, name) for name in ("num_kv_heads", "head_size", "head_size_v", "dtype")}
        return StateSpec(
            block_size=cls.max_tokens, tokens_per_state=cls.max_tokens, num_head_slots=2,
            state_content_bytes=shape.plane_bytes, max_tp_shards=spec.max_tp_shards, **own,
        )  # fmt: skip


@functools.cache
def backend_of(options: VllmOptions, max_tokens: int) -> type[Backend]:
    """The backend class of a model with these options, whose requests have at most `max_tokens` tokens. Options are
    attributes of the class, since vLLM calls a backend's methods without naming the model."""
    impl = type("Impl", (Impl,), dict(options=options, max_tokens=max_tokens))
    return type("Backend", (Backend,), dict(options=options, max_tokens=max_tokens, impl=impl, __module__=__name__))


@dataclass
class Metadata(AttentionMetadata):
    """The rows of a step: first those of requests with one row each (decoded tokens), then those of requests with any
    number of rows (parts of a prompt)."""

    singles: Singles | None  # the first n requests; None: there are none
    # of each other request: rows in the step, block, tokens read before this step, copies of its question
    spans: list[tuple[slice, int, int, Copies]]


class Builder(AttentionMetadataBuilder):
    reorder_batch_threshold: int | None = 1  # vLLM puts requests with one row first

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        options = options_of(vllm_config)
        assert options is not None, "a model without kvevict has another backend"
        self.options = options
        self.copies = OF_CONFIG[vllm_config.instance_id] if copies_questions(vllm_config) else {}
        self.made: tuple[Tensor, Layers] | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """A graph of decoded tokens is possible unless requests are decoded one by one, in blocks that the host must
        know."""
        options = options_of(vllm_config)
        alike = options is not None and options.alike
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if alike else AttentionCGSupport.NEVER

    @property
    def layers(self) -> Layers:
        """The states, in the caches that vLLM has bound to the layers after it made this object."""
        of_name = self.vllm_config.compilation_config.static_forward_context
        cache = of_name[self.layer_names[0]].kv_cache
        if self.made is None or self.made[0] is not cache:
            states = [of_name[name].impl.bind(name, of_name[name].kv_cache) for name in self.layer_names]
            self.made = cache, Layers(states, self.vllm_config.scheduler_config.max_num_seqs)
        return self.made[1]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """Describe a step, and evict slots of those requests with one row that begin a period. No number is read from
        the device if every request has one row and none begins a period, unless they are decoded one by one."""
        common, count, of = common_attn_metadata, common_attn_metadata.num_reqs, self.copies
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound
        ends = (common.seq_lens.cpu() if lengths is None else lengths).tolist()
        rows = [starts[r + 1] - starts[r] for r in range(count)]  # 0: the request only pads the step
        before = [ends[r] - rows[r] for r in range(count)]
        n = next((r for r in range(count) if rows[r] > 1), count)
        begins = [r for r in range(n) if rows[r] and self.options.ends(before[r])]
        table, layers = common.block_table_tensor[:count, 0], self.layers
        blocks = table.tolist() if begins or n < count or not self.options.alike else []
        for r in begins:
            layers.begin(blocks[r], before[r], of.get(r, NONE))
        spans = [
            (slice(starts[r], starts[r + 1]), blocks[r], before[r], of.get(r, NONE)) for r in range(n, count) if rows[r]
        ]
        return Metadata(layers.singles(table[:n], common.seq_lens[:n], blocks[:n]) if n else None, spans)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Metadata:
        """Describe a step of which every row only pads it."""
        nothing = torch.zeros(common_attn_metadata.num_reqs, dtype=torch.int32, device=self.device)
        return Metadata(self.layers.singles(nothing, nothing, []), [])


class Impl(AttentionImpl):
    options: ClassVar[VllmOptions]
    max_tokens: ClassVar[int]
    states: States

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.head_size = head_size
        if options_of(get_current_vllm_config()) != self.options:
            raise RuntimeError(
                "kvevict in vLLM: this process has built a model with other options of kvevict, whose backend vLLM "
                "remembers: give each model a process of its own"
            )
        for refused, what in (
            (sliding_window is not None and sliding_window < self.max_tokens, "a sliding window"),
            (alibi_slopes is not None, "ALiBi"),
            (attn_type != "decoder", f"attention of the type {attn_type}"),
            (kv_sharing_target_layer_name is not None, "the keys of another layer"),
            (num_heads != self.kv_heads * self.options.group, "another number of heads than others"),
            (head_size % 8 or head_size > 512, f"a head dimension of {head_size}"),
        ):
            if refused:
                raise ValueError(f"kvevict in vLLM: the model has layers with {what}: serve it without kvevict")
        self.attention = dict(scale=float(scale), softcap=float(logits_soft_cap or 0), sinks=sinks)

    def forward(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Metadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is None or kv_cache.numel() == 0:  # vLLM runs the model without a cache to measure memory
            return output.zero_()
        singles = attn_metadata.singles
        if singles is not None:
            n = len(singles.blocks)
            output[:n] = self.states.decode(query[:n], key[:n], value[:n], singles)
        for rows, block, tokens, copies in attn_metadata.spans:
            output[rows] = self.states.read(query[rows], key[rows], value[rows], block, tokens, copies)
        return output

    def bind(self, name: str, cache: Tensor) -> States:
        """Make the states of the layer `name` in its cache."""
        shape = StateShape(self.kv_heads, self.head_size, cache.dtype, self.options)
        self.states = States(cache, shape, int(re.findall(r"(?:^|\.)(\d+)\.", name)[0]), self.attention)
        return self.states
