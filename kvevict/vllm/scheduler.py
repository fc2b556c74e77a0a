"""A scheduler of vLLM that writes copies of a request's question into its prompt: `--scheduler-cls
kvevict.vllm.scheduler.create`. All else is vLLM's own scheduler.

The scheduler is the first object behind vLLM's frontend that gets a request, and the last before tokens are counted in
steps. So the client's lengths, usage, stop strings and prompt stay those that it sent.
"""

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from .options import VllmOptions, options_of, tokenizer_name
from .questions import COPIES, QUESTION, Asking, with_copies


def create(vllm_config: VllmConfig, **others: object) -> Scheduler:
    """Make vLLM's scheduler with questions; its own if the model has no options of kvevict."""
    waits = not vllm_config.scheduler_config.async_scheduling
    options = options_of(vllm_config)
    if options is None:
        return (Scheduler if waits else AsyncScheduler)(vllm_config=vllm_config, **others)
    made = (QuestionScheduler if waits else AsyncQuestionScheduler)(vllm_config=vllm_config, **others)
    made.options, made.asking = options, Asking.of(options, *tokenizer_name(vllm_config))
    return made


class Questions:
    """The part of both schedulers that writes copies into the prompt of a new request."""

    options: VllmOptions
    asking: Asking
    requests: dict[str, Request]
    max_model_len: int

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            self._write(request)
        super().add_request(request)

    def _write(self, request: Request) -> None:
        """Copy the question into a prompt of tokens. A request that wants its prompt's logprobs gets no copies, which
        would be among them."""
        params, ids = request.sampling_params, request.prompt_token_ids
        plain = params is not None and params.prompt_logprobs is None and ids is not None
        if not plain or request.mm_features or request.prompt_embeds is not None:
            return
        given = params.extra_args or {}
        question, period = self.asking.question(ids, given.get(QUESTION)), self.options.period
        # An answer of up to a period keeps its room before `max_model_len`.
        room = self.max_model_len - len(ids) - min(request.max_tokens, period)
        ids, copies = with_copies(ids, question, period, room // len(question) if question else 0)
        if copies.number:
            request.prompt_token_ids, request.num_prompt_tokens = ids, len(ids)
            request._all_token_ids[:] = ids
            params.extra_args = given | {COPIES: list(copies)}


class QuestionScheduler(Questions, Scheduler):
    pass


class AsyncQuestionScheduler(Questions, AsyncScheduler):
    pass
