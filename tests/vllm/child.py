"""Runs vLLM, each job in a process of its own, which has one configuration of kvevict.

A line of the input has the names of three files, [job, result, log]; after each job its exit code is printed. A job:
{"models": folders, "llm": options of LLM, "runs": [{"prompts": lists of ids, "do": what}, ..]}. A result: per model and
run what the function of that name returns.
"""

import gc
import json
import os
import random
import signal
import sys

os.environ |= dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
)  # fmt: skip


def runner(llm):
    """vLLM's model runner."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def layers(llm):
    """kvevict's `States` of each layer."""
    found = runner(llm).compilation_config.static_forward_context.values()
    return sorted((layer.impl.states for layer in found), key=lambda states: states.layer)


def greedy(llm, prompts, new=20, adapter=None, **more):
    """The tokens of each answer to each prompt. adapter: the folder of a LoRA adapter."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(**dict(temperature=0, max_tokens=new, ignore_eos=True) | more)
    request = None if adapter is None else LoRARequest("adapter", 1, adapter)
    prompts = [dict(prompt_token_ids=ids) for ids in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=request)
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
    import torch

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
            with torch.inference_mode():  # like the step that made the state
                stored = states.stored(block, len(ids) + new - 1)
            slots.append([stored.pos[rows].tolist() for _, _, rows in stored.segments()])
        logprobs = [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        found.append(dict(tokens=list(answer.token_ids), logprobs=logprobs, slots=slots))
    return found


def captured(llm, prompts, new):
    """The tokens of all requests at once. Between their steps vLLM runs those that it captures as graphs on a GPU, and
    each step is described with rows that only pad it, as before a graph."""
    from torch.nn.functional import pad
    from vllm.config import CUDAGraphMode

    (group,) = runner(llm)._attn_group_iterator()
    builder, build = group.get_metadata_builder(), group.get_metadata_builder().build

    def padded(common_prefix_len, common):
        n, most = common.num_reqs, 6
        more = (0, most - n)
        described = build(common_prefix_len, common.replace(
            num_reqs=most, query_start_loc_cpu=pad(common.query_start_loc_cpu, more, value=common.num_actual_tokens),
            seq_lens=pad(common.seq_lens, more), block_table_tensor=pad(common.block_table_tensor, (0, 0, *more)),
            seq_lens_cpu_upper_bound=pad(common.seq_lens_cpu_upper_bound, more),
        ))  # fmt: skip
        if not described.spans:
            *rows, offset, length, numbers = described.singles
            assert {len(each) for each in rows} == {most}
            rows = (each[:n] for each in rows)
            described.singles = type(described.singles)(*rows, offset[:, :n], length[:, :n], numbers)
        return described

    def capture(step, scheduler):
        for rows in (1, 4) if step % 3 == 0 else ():
            runner(llm)._dummy_run(
                rows, CUDAGraphMode.NONE, force_attention=True, uniform_decode=True, is_graph_capturing=True
            )

    builder.build = padded
    tokens = [list(each.token_ids) for each in run(llm, prompts, new, capture)]
    builder.build = build
    return tokens


def scored(llm, prompts):
    """The logprob of each token of the prompts after the first one, the bytes of a request in vLLM's cache, and which
    steps may be CUDA graphs."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([dict(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
    found = [
        [each[token].logprob for each, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        for output, ids in zip(outputs, prompts, strict=True)
    ]
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    size = sum(states.k.nbytes + states.v.nbytes for states in layers(llm)) // blocks
    (group,) = runner(llm)._attn_group_iterator()
    graphs = group.get_metadata_builder().get_cudagraph_support(llm.llm_engine.vllm_config, group.kv_cache_spec)
    return dict(logprobs=found, bytes=size, graphs=graphs.name)


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


def ranked(llm, prompts, new, priorities):
    """All requests at once with these priorities: their tokens, and the order in which they end."""
    from vllm import SamplingParams

    engine, found = llm.llm_engine, {}
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for i, (ids, priority) in enumerate(zip(prompts, priorities, strict=True)):
        engine.add_request(str(i), dict(prompt_token_ids=ids), params, priority=priority)
    while engine.has_unfinished_requests():
        found |= {int(each.request_id): list(each.outputs[0].token_ids) for each in engine.step() if each.finished}
    return dict(tokens=[found[i] for i in range(len(prompts))], order=[*found])


def soak(llm, prompts, new, number):
    """So many requests for one of the prompts and up to `new` tokens, of which ten are there at a time. A step in ten
    aborts one of them, and one in a hundred takes all states. Returns each request's [prompt, length, tokens or None if
    it was aborted], and what vLLM counts in the end: blocks that are not free but were, requests that it still has."""
    from vllm import SamplingParams

    engine, drawn = llm.llm_engine, random.Random(0)
    scheduler = engine.engine_core.engine_core.scheduler
    pool, asked, there = scheduler.kv_cache_manager.block_pool, [], set()
    free = pool.get_num_free_blocks()
    while there or len(asked) < number:
        while len(there) < 10 and len(asked) < number:
            name, which, length = str(len(asked)), drawn.randrange(len(prompts)), drawn.randint(1, new)
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            engine.add_request(name, dict(prompt_token_ids=prompts[which]), params)
            there.add(name)
            asked.append([which, length, None])
        for output in engine.step():
            if output.finished and output.request_id in there:
                there.remove(output.request_id)
                asked[int(output.request_id)][2] = list(output.outputs[0].token_ids)
        if there and drawn.random() < 0.1:
            gone = drawn.choice(sorted(there))
            there.remove(gone)
            engine.abort_request([gone])
        if drawn.random() < 0.01:
            assert engine.reset_prefix_cache(reset_running_requests=True)
    left = [free - pool.get_num_free_blocks(), *scheduler.get_request_counts(), len(scheduler.requests)]
    return dict(asked=asked, left=left)


def do(job, result):
    with open(job, encoding="utf-8") as file:
        asked = json.load(file)
    from vllm import LLM

    results, alive = [], []  # vLLM ends what models share with the first one that ends
    for model in asked["models"]:
        options = dict(dtype="float32", enforce_eager=True, seed=0, max_num_seqs=8, kv_cache_memory_bytes=64 << 20)
        llm = LLM(model=model, **options | asked["llm"])
        alive.append(llm)
        results.append([globals()[run.pop("do")](llm, **run) for run in [dict(each) for each in asked["runs"]]])
    with open(result, "w", encoding="utf-8") as file:
        json.dump(results, file)


def main():
    """Do each job in a fork of this process, which has imported vLLM: imports and vLLM's garbage collections take ten
    times as long as a small job."""
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    gc.freeze()
    for line in sys.stdin:
        job, result, log = json.loads(line)
        if not (pid := os.fork()):
            signal.alarm(600)  # ends a job that hangs, after so many seconds
            with open(log, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            do(job, result)
            os._exit(0)  # without vLLM's clean-up
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
