"""Products of a decoded token's few rows in 16 bits: `_ops.linear` makes them on x86, and only them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch

import kvevict
from kvevict.ops import few_rows

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(not few_rows.MEASURED, reason="other processors' products are left alone"),
]
TORCHS = torch.nn.functional.linear


@pytest.fixture(autouse=True)
def restored():
    """After a test the function is torch's again."""
    yield
    assert torch.nn.functional.linear is TORCHS


def is_own():
    return torch.nn.functional.linear is few_rows.linear


def settings_in(model, then=lambda: None):
    """A list that gets whether the products are ours in each call of the model's head."""
    seen = []

    def note(*_):
        seen.append(is_own())
        then()

    model.lm_head.register_forward_hook(note)
    return seen


def own(dtype=torch.bfloat16):
    return kvevict.patch(tiny.model().to(dtype), "streaming", budget=16)


@pytest.mark.parametrize(("dtype", "rows", "wanted"), [
    (torch.bfloat16, 1, True), (torch.float16, 32, True), (torch.bfloat16, 33, False), (torch.float32, 1, False),
])  # fmt: skip
def test_only_few_rows_in_16_bits(dtype, rows, wanted):
    model = own(dtype)
    seen = settings_in(model)
    model.generate(tiny.prompt(rows, 40)["input_ids"], max_new_tokens=3, min_new_tokens=3)
    assert seen == [False, wanted, wanted]


def test_embeddings_of_one_token():
    model = own()
    seen = settings_in(model)
    out = model(**tiny.prompt(1, 40))
    model(inputs_embeds=model.get_input_embeddings()(torch.tensor([[7]])), past_key_values=out.past_key_values)
    assert seen == [False, True]


def test_a_function_of_another_library_is_called(monkeypatch):
    """As that of a profiler that counts, or of an emulated number format."""
    shapes = []

    def function(x, *args):
        shapes.append(x.shape)
        return TORCHS(x, *args)

    monkeypatch.setattr(torch.nn.functional, "linear", function)
    model = own()
    seen = settings_in(model)
    model.generate(**tiny.prompt(1, 40), max_new_tokens=3, min_new_tokens=3)
    assert torch.nn.functional.linear is function and seen == [False] * 3
    monkeypatch.undo()
    assert sum(shape[1] == 1 for shape in shapes) > 2 * len(model.model.layers)


def test_a_function_that_comes_while_a_token_is_decoded_stays():
    """And ours, where that library puts it back when nothing is decoded, calls torch's."""
    x, weight = torch.randn(1, 64).bfloat16(), torch.randn(80, 64).bfloat16()
    with few_rows._own():
        found, torch.nn.functional.linear = torch.nn.functional.linear, len
    assert torch.nn.functional.linear is len
    torch.nn.functional.linear = found
    assert torch.equal(found(x, weight), TORCHS(x, weight))
    with few_rows._own():
        assert found(x, weight).shape == (1, 80)


def test_another_thread_has_torchs_products():
    """So that a model which is not patched has the same bits whatever other threads do, and derivatives."""
    x, weight = torch.randn(1, 512).bfloat16(), torch.randn(2000, 512).bfloat16()
    with few_rows._own(), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(torch.nn.functional.linear, x, weight).result(), TORCHS(x, weight))
        of = pool.submit(torch.func.jvp, lambda x: torch.nn.functional.linear(x, weight), (x,), (x,)).result()
        assert torch.equal(of[1], TORCHS(x, weight))
        pool.submit(torch.fx.symbolic_trace, torch.nn.Linear(64, 80)).result()


def test_what_is_left_to_torch():
    """Whatever has a gradient, is a subclass or has sizes that the op does not take, and autocast, which chooses the
    dtype; the results are torch's, bit by bit."""
    x, weight = torch.randn(2, 3, 64).bfloat16(), torch.nn.Parameter(torch.randn(80, 64).bfloat16())
    x.requires_grad_()
    narrow, wide = torch.randn(1, 24).half(), torch.randn(33, 32).half()
    of_narrow, of_wide = torch.randn(8, 24).half(), torch.randn(8, 32).half()
    with few_rows._own():
        assert torch.equal(torch.nn.functional.linear(narrow, of_narrow), TORCHS(narrow, of_narrow))
        assert torch.equal(torch.nn.functional.linear(wide, of_wide), TORCHS(wide, of_wide))
        assert torch.equal(torch.nn.functional.linear(wide[:1], of_wide.mT.contiguous().mT), TORCHS(wide[:1], of_wide))
        for bias in (torch.ones(1).half(), torch.ones(1, 8).half(), torch.ones(16).half()[::2]):
            assert torch.equal(torch.nn.functional.linear(wide[:2], of_wide, bias), TORCHS(wide[:2], of_wide, bias))
        assert torch.equal(torch.nn.functional.linear(wide[:2], of_wide[0]), TORCHS(wide[:2], of_wide[0]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.nn.functional.linear(wide[:2], of_wide).dtype == torch.bfloat16
        with torch.enable_grad():
            assert torch.nn.functional.linear(x, weight).grad_fn is not None
        assert torch.nn.functional.linear(x, weight).grad_fn is None


def test_rows_of_two_dimensions():
    """As a mixture's experts have them."""
    x, weight, bias = torch.randn(3, 64).bfloat16(), torch.randn(80, 64).bfloat16(), torch.randn(80).bfloat16()
    with few_rows._own():
        found = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(found, TORCHS(x, weight, bias), rtol=2**-7, atol=2**-6)


def test_it_is_restored_after_an_error():
    model = own()

    def fail():
        if is_own():
            raise RuntimeError("in a decoded token")

    settings_in(model, fail)
    with pytest.raises(RuntimeError, match="in a decoded token"):
        model.generate(**tiny.prompt(1, 40), max_new_tokens=3, min_new_tokens=3)
    assert not is_own()


def test_two_threads_that_overlap():
    """The first one in is the first one out, which leaves the setting to the second."""
    first, second, inside = own(), own(), threading.Barrier(2, timeout=60)
    ended = threading.Event()

    def wait_of_first():
        if is_own():
            inside.wait()

    def wait_of_second():
        if is_own():
            inside.wait()
            assert ended.wait(60)
            assert is_own()

    seen = [settings_in(first, wait_of_first), settings_in(second, wait_of_second)]
    caches = [model(**tiny.prompt(1, 40)).past_key_values for model in (first, second)]

    def decode(model, cache, end):
        with torch.no_grad():
            model(torch.tensor([[7]]), past_key_values=cache)
        end()

    other = threading.Thread(target=decode, args=(second, caches[1], lambda: None))
    other.start()
    decode(first, caches[0], ended.set)
    other.join()
    assert seen == [[False, True]] * 2


def test_logits_are_the_same_but_for_rounding():
    """Each product's sum is in float32 in either order, rounded to bf16 once."""
    model = tiny.model().bfloat16()
    ids = tiny.prompt(1, 20)["input_ids"]
    wanted = model(ids).logits[:, -1]
    kvevict.patch(model, "snapkv", budget=64)
    found = model(ids[:, -1:], past_key_values=model(ids[:, :-1]).past_key_values).logits[:, -1]
    torch.testing.assert_close(found, wanted, rtol=2**-5, atol=2**-5 * wanted.abs().max().item())


@pytest.mark.parametrize("rows", [1, 3])
def test_recorded_tokens_have_the_same_bits(rows):
    """A recorded token calls the op itself; a row's logits do not depend on the other rows of its batch."""
    ids, model, logits = tiny.prompt(1, 60)["input_ids"], tiny.model().bfloat16(), []
    for compiled, count in ((False, 1), (False, rows), (True, rows)):
        kvevict.patch(model, "snapkv", budget=40, compiled=compiled)
        cache = model(ids.expand(count, -1), logits_to_keep=1).past_key_values
        each = [model(torch.full((count, 1), 5 + token), past_key_values=cache).logits for token in range(40)]
        logits.append(torch.cat(each, 1))
    assert kvevict.report(cache)["replayed"] > 0
    assert torch.equal(logits[1], logits[2])
    assert rows == 1 or torch.equal(logits[0].expand_as(logits[1]), logits[1])
