"""Expected Attention against the oracle and by hand; its statistics on the cache, on disk, and from other text."""

import pytest
import tiny
import torch
from caches import kept
from choices import CHUNKED
from policy_cases import BUDGET, VOCAB, compare, model, tokens

import kvevict
from kvevict.engine.measure import moments
from kvevict.engine.memory.meter import allocated_bytes


def test_turns_and_decoding():
    """Queries of all prompts count, of decoded tokens none."""
    compare(model(), "expected", [[1, 1, 30, *[1] * 6, 25, 1, 1]], decode=True, interval=2, **CHUNKED)


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 29), (0, 30)])
def test_moments_of_parts_are_those_of_all(cuts):
    """However rows come, and however far from 0 their mean is."""
    generator = torch.Generator().manual_seed(len(cuts))
    x = torch.randn(2, 3, 30, 8, generator=generator) + 30
    counts = torch.rand(2, 30, generator=generator) < 0.7
    past = None
    for start, stop in zip((0, *cuts), (*cuts, 30)):
        past = moments.added(past, x[:, :, start:stop], counts[:, start:stop], x[:, :, start:stop].abs())
    mean, covariance, size = moments.summed(past)
    for b in range(2):
        mine = x[b][:, counts[b]].double()
        assert int(past[b, 0, 0, 0]) == mine.shape[1]
        want = torch.stack([head.T.cov(correction=0) for head in mine])
        torch.testing.assert_close(mean[b].double(), mine.mean(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(size[b].double(), mine.abs().mean(1), rtol=1e-6, atol=0)
        # A distance is off by the rounding of numbers near 30, 2^-19 each, and so is its product with one of size 1.
        torch.testing.assert_close(covariance[b].double(), want, rtol=1e-5, atol=8 * 2.0**-19)


def test_rows_that_do_not_count_may_hold_anything():
    x = torch.full((1, 1, 3, 8), torch.nan)
    x[:, :, 1] = 2.0
    mean, covariance, size = moments.summed(moments.added(None, x, torch.tensor([[False, True, False]]), x.abs()))
    assert (mean == 2).all() and (covariance == 0).all() and (size == 2).all()
    assert not moments.added(None, x, torch.zeros(1, 3, dtype=torch.bool)).any()


def second_turn(made, cache, ids):
    with torch.no_grad():
        return kept(made(ids, past_key_values=cache, use_cache=True).past_key_values)


def test_statistics_stay_with_a_cache(tmp_path):
    """In forks, of chosen rows, on disk."""
    made, (first, second) = model(), tokens([[40, 25]], 3)[0]
    with kvevict.evicting(made, "expected", **CHUNKED), torch.no_grad():
        ids = torch.stack([first, first.flip(0)])
        cache = made(ids, use_cache=True).past_key_values
        alone = made(ids[1:], use_cache=True).past_key_values
        kvevict.save_cache(cache, tmp_path / "cache")
        loaded, fork = kvevict.load_cache(tmp_path / "cache", made), cache.fork()
        chosen = cache.fork()
        chosen.batch_select_indices(torch.tensor([1]))
        want = second_turn(made, cache, torch.stack([second, second]))
        assert second_turn(made, fork, torch.stack([second, second])) == want
        assert second_turn(made, loaded, torch.stack([second, second])) == want
        assert second_turn(made, chosen, second[None]) == second_turn(made, alone, second[None])
    assert allocated_bytes(cache.layers[0]) > cache.layers[0].memory["moments"].numel() * 4


def written(path, made, seed=0, parts=2, length=30):
    ids = tokens([[parts * length]], seed)[0][0]
    kvevict.measure_queries(made, ids, path, length=length)
    return ids


def test_a_file_of_the_text_itself_chooses_the_same(tmp_path):
    made = model("qwen3")
    ids = written(tmp_path / "stats", made, parts=1, length=61)
    found = []
    for stats in (None, tmp_path / "stats"):
        with kvevict.evicting(made, "expected", budget=BUDGET, stats=stats), torch.no_grad():
            found.append(kept(made(ids[None], use_cache=True).past_key_values))
    assert found[0] == found[1]


def test_what_a_file_holds(tmp_path):
    """Parts are read apart; the first rows of each are left out."""
    made = model()
    ids = written(tmp_path / "stats", made)
    got = moments.load(tmp_path / "stats", made.model)
    layer, total = made.model.layers[0], []
    with torch.no_grad():
        for part in ids.split(30):
            hidden = layer.input_layernorm(made.model.embed_tokens(part[None]))
            total.append(layer.self_attn.q_proj(hidden).view(30, 4, -1)[4:].double())
    total = torch.cat(total).transpose(0, 1)
    mean, covariance, size = got[0]
    torch.testing.assert_close(mean.double(), total.mean(1), rtol=0, atol=1e-5 * total.abs().max().item())
    want = torch.stack([head.T.cov(correction=0) for head in total])
    torch.testing.assert_close(covariance.double(), want, rtol=0, atol=1e-5 * want.abs().max().item())
    pairs = torch.complex(*total.chunk(2, -1)).abs().mean(1).repeat(1, 2)  # rotation pairs i with i + d / 2
    torch.testing.assert_close(size.double(), pairs, rtol=0, atol=1e-5 * pairs.max().item())


def test_files_that_do_not_fit_are_refused(tmp_path):
    made = model()
    written(tmp_path / "stats", made)
    (tmp_path / "text").write_text("no tensors")
    rope = dict(rope_type="default", rope_theta=500.0)
    for other, path, text in (
        (model("qwen3"), "stats", "of another model: its model_type is 'llama', this model's 'qwen3'"),
        (model(num_key_value_heads=4), "stats", "of another model: its heads are"),
        (tiny.model(vocab_size=VOCAB, rope_parameters=rope), "stats", "of another model: its rope is"),
        (model(num_hidden_layers=3), "stats", "of another model: its layers are 4"),
        (model(seed=1), "stats", "of another model: its weights are"),
        (made, "nothing", "does not exist"),
        (made, "text", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=text):
            kvevict.patch(other, "expected", budget=16, stats=str(tmp_path / path))
    kvevict.patch(made, "expected", budget=16, stats=tmp_path / "stats")
    kvevict.unpatch(made)


def test_measuring_refuses_what_it_cannot_read(tmp_path):
    made, ids = model(), torch.arange(3, 40)
    for given, text in (
        (dict(ids=ids, length=4), "length must be at least 5"), (dict(ids=ids[:4]), "at least 5 tokens"),
        (dict(ids=ids + 400), "ids must be below"), (dict(ids=ids.float()), "token ids"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=text):
            kvevict.measure_queries(made, path=tmp_path / "stats", **given)
    with kvevict.evicting(made, "expected", budget=16), pytest.raises(ValueError, match="unpatch"):
        kvevict.measure_queries(made, ids, tmp_path / "stats")
    assert not list(tmp_path.iterdir())
