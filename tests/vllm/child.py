"""python child.py JOB.json: runs vLLM in this process, which has one configuration of kvevict, and writes RESULT.json.

A job: {"model" or "models": folders, "llm": options of LLM, "runs": [{"prompts": lists of ids, "do": what}, ..]}. A
result: per model and run what the function of that name returns.
"""

import json
import os
import sys

os.environ |= dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
)  # fmt: skip


def layers(llm):
    """kvevict's `States` of each layer."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    found = worker.model_runner.compilation_config.static_forward_context.values()
    return sorted((layer.impl.states for layer in found), key=lambda states: states.layer)


def greedy(llm, prompts, new=20, **more):
    from vllm import SamplingParams

    params = SamplingParams(**dict(temperature=0, max_tokens=new, ignore_eos=True) | more)
    outputs = llm.generate([dict(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def run(llm, prompts, new, each_step=lambda step, scheduler: None, **more):
    """The `CompletionOutput` of every request, None of one that was aborted."""
    from vllm import SamplingParams

    engine, done, step = llm.llm_engine, {}, 0
    params = SamplingParams(**dict(temperature=0, max_tokens=new, ignore_eos=True) | more)
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), dict(prompt_token_ids=ids), params)
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
        step += 1
        each_step(step, engine.engine_core.engine_core.scheduler)
    return [done.get(str(i)) for i in range(len(prompts))]


def kept(llm, prompts, new):
    """One request after the other: its tokens, their logprobs, and the slots that its state has in the end."""
    found = []
    for ids in prompts:
        blocks = set()

        def note(step, scheduler, blocks=blocks):
            for request in scheduler.running:
                blocks.update(scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])

        (answer,) = run(llm, [ids], new, note, logprobs=1)
        (block,) = blocks
        slots = []
        for states in layers(llm):
            stored = states.stored(block, len(ids) + new - 1)
            slots.append([stored.pos[rows].tolist() for _, _, rows in stored.segments()])
        logprobs = [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        found.append(dict(tokens=list(answer.token_ids), logprobs=logprobs, slots=slots))
    return found


def asked(llm, prompts, new, question, **more):
    """Each request's prompt as its output has it, its tokens, and the number of its prompt logprobs."""
    from vllm import SamplingParams

    given = {} if question is None else dict(extra_args=dict(kvevict_question=question))
    params = SamplingParams(**dict(temperature=0, max_tokens=new, ignore_eos=True) | given | more)
    outputs = llm.generate([dict(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
    return [
        [list(output.prompt_token_ids), list(output.outputs[0].token_ids), len(output.prompt_logprobs or ())]
        for output in outputs
    ]


def refused(llm, prompts, **more):
    """What vLLM says of the first prompt."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        llm.generate([dict(prompt_token_ids=prompts[0])], SamplingParams(**more), use_tqdm=False)
    except VLLMValidationError as error:
        return str(error)


def preempted(llm, prompts, new, after, **more):
    """All requests at once; after each of these steps every one loses its state and is computed again."""
    lost = []

    def lose(step, scheduler):
        if step in after:
            assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
            lost.append(len(scheduler.waiting))

    return dict(tokens=[list(each.token_ids) for each in run(llm, prompts, new, lose, **more)], lost=lost)


def aborted(llm, prompts, new):
    """Every second request is aborted after some steps; the blocks that are not free in the end, of those before."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()

    def abort(step, scheduler):
        if step == 5:
            llm.llm_engine.abort_request([str(i) for i in range(0, len(prompts), 2)])

    answers = run(llm, prompts, new, abort)
    tokens = [each and list(each.token_ids) for each in answers]
    return dict(tokens=tokens, lost=free - pool.get_num_free_blocks())


def main(job, result):
    with open(job, encoding="utf-8") as file:
        asked = json.load(file)
    from vllm import LLM

    results, alive = [], []  # vLLM ends what models share with the first one that ends
    for model in asked.get("models") or [asked["model"]]:
        options = dict(dtype="float32", enforce_eager=True, seed=0, max_num_seqs=8, kv_cache_memory_bytes=64 << 20)
        llm = LLM(model=model, **options | asked["llm"])
        alive.append(llm)
        results.append([globals()[run.pop("do")](llm, **run) for run in [dict(each) for each in asked["runs"]]])
    with open(result, "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
