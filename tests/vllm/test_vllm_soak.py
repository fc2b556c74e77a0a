"""Many short requests with aborts inside vLLM."""

import pytest
from in_vllm import needed, prompts, save, vllm

pytestmark = needed


@pytest.mark.parametrize("number", [150, pytest.param(1000, marks=pytest.mark.nightly)])
def test_no_block_is_lost_and_no_answer_is_anothers(tmp_path, number):
    """1,000 requests are nightly: 150 took 60 s on a shared core."""
    folder = save(tmp_path / "model", "llama")
    lengths = [1, 2, 15, 16, 17, 33, 48, 50, 64, 77, 90, 111, 128, 131, 160, 200]
    texts, new = prompts(lengths), 50
    runs = [
        *(dict(do="greedy", prompts=[text], new=new) for text in texts),
        dict(do="soak", prompts=texts, new=new, number=number),
    ]
    options = dict(budget=32, period=16, policy="edie", window=4)
    (results,) = vllm(tmp_path, [folder], runs, options, max_num_batched_tokens=48, max_num_seqs=6)
    alone, found = [result[0][0] for result in results[:-1]], results[-1]
    assert len({*map(tuple, alone)}) == len(alone)
    assert found["left"] == [0, 0, 0, 0]
    assert len(found["asked"]) == number
    assert 0.5 * number < sum(tokens is not None for *_, tokens in found["asked"]) < number
    assert all(tokens in (None, alone[which][:length]) for which, length, tokens in found["asked"])
