"""Products of a decoded token's one row: oneDNN is off for them in bf16 on x86, and only for them."""

import threading

import pytest
import tiny
import torch

import kvevict
from kvevict import products

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(not products.X86, reason="other processors' products are left alone"),
]


@pytest.fixture(autouse=True)
def enabled():
    """oneDNN is on before a test, and as the test found it after."""
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, True
    yield
    assert torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = before


def settings_in(model, then=lambda: None):
    """A list that gets oneDNN's setting in each call of the model's head."""
    seen = []

    def note(*_):
        seen.append(torch.backends.mkldnn.enabled)
        then()

    model.lm_head.register_forward_hook(note)
    return seen


def own(dtype=torch.bfloat16):
    return kvevict.patch(tiny.model().to(dtype), "streaming", budget=16)


@pytest.mark.parametrize(("dtype", "rows", "wanted"), [
    (torch.bfloat16, 1, [True, False, False]), (torch.bfloat16, 2, [True] * 3), (torch.float32, 1, [True] * 3),
])  # fmt: skip
def test_only_one_row_in_bf16(dtype, rows, wanted):
    model = own(dtype)
    seen = settings_in(model)
    model.generate(tiny.prompt(rows, 40)["input_ids"], max_new_tokens=3, min_new_tokens=3)
    assert seen == wanted


def test_embeddings_of_one_token():
    model = own()
    seen = settings_in(model)
    out = model(**tiny.prompt(1, 20))
    model(inputs_embeds=model.get_input_embeddings()(torch.tensor([[7]])), past_key_values=out.past_key_values)
    assert seen == [True, False]


def test_a_setting_of_the_user_stays():
    model = own()
    torch.backends.mkldnn.enabled = False
    seen = settings_in(model)
    model.generate(**tiny.prompt(1, 40), max_new_tokens=3, min_new_tokens=3)
    assert seen == [False] * 3
    assert not torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True


def test_it_is_restored_after_an_error():
    model = own()

    def fail():
        if not torch.backends.mkldnn.enabled:
            raise RuntimeError("in a decoded token")

    settings_in(model, fail)
    with pytest.raises(RuntimeError, match="in a decoded token"):
        model.generate(**tiny.prompt(1, 40), max_new_tokens=3, min_new_tokens=3)
    assert torch.backends.mkldnn.enabled


def test_two_threads_that_overlap():
    """The first one in is the first one out, which leaves the setting to the second."""
    first, second, inside = own(), own(), threading.Barrier(2, timeout=60)
    ended = threading.Event()

    def wait_of_first():
        if not torch.backends.mkldnn.enabled:
            inside.wait()

    def wait_of_second():
        if not torch.backends.mkldnn.enabled:
            inside.wait()
            assert ended.wait(60)
            assert not torch.backends.mkldnn.enabled

    seen = [settings_in(first, wait_of_first), settings_in(second, wait_of_second)]
    caches = [model(**tiny.prompt(1, 20)).past_key_values for model in (first, second)]

    def decode(model, cache, end):
        with torch.no_grad():
            model(torch.tensor([[7]]), past_key_values=cache)
        end()

    other = threading.Thread(target=decode, args=(second, caches[1], lambda: None))
    other.start()
    decode(first, caches[0], ended.set)
    other.join()
    assert seen == [[True, False]] * 2


def test_logits_are_the_same_but_for_rounding():
    """Each product's sum is in float32 in either order, rounded to bf16 once."""
    model = tiny.model().bfloat16()
    ids = tiny.prompt(1, 20)["input_ids"]
    wanted = model(ids).logits[:, -1]
    kvevict.patch(model, "snapkv", budget=64)
    found = model(ids[:, -1:], past_key_values=model(ids[:, :-1]).past_key_values).logits[:, -1]
    torch.testing.assert_close(found, wanted, rtol=2**-5, atol=2**-5 * wanted.abs().max().item())
