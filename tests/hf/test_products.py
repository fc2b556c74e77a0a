"""Products of a decoded token's few rows in 16 bits: `_ops.linear` makes them on x86, and only them."""

import contextlib
import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import offload
import pytest
import tiny
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import kvevict
from kvevict.context import within
from kvevict.ops import _ops, few_rows

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(not few_rows.MEASURED, reason="other processors' products are left alone"),
]
TORCHS, FORWARD = torch.nn.functional.linear, torch.nn.Linear.forward
ALL = 4 * 7 + 1  # products of a token of tiny's Llama


@pytest.fixture
def taken(monkeypatch):
    """The weights that the op got, one entry a product."""
    weights, op = [], _ops.linear
    monkeypatch.setattr(_ops, "linear", lambda x, weight, bias=None: weights.append(weight) or op(x, weight, bias))
    return weights


def own(dtype=torch.bfloat16, **options):
    return kvevict.patch(tiny.model().to(dtype), "streaming", budget=16, **options)


def decoded(model, tokens=2, rows=1):
    return tiny.generate(model, tiny.prompt(rows, 40), tokens + 1)


@pytest.mark.parametrize(("dtype", "rows", "wanted"), [
    (torch.bfloat16, 1, True), (torch.float16, 32, True), (torch.bfloat16, 33, False), (torch.float32, 1, False),
])  # fmt: skip
def test_only_few_rows_in_16_bits(dtype, rows, wanted, taken):
    decoded(own(dtype), 2, rows)
    assert len(taken) == wanted * 2 * ALL


def test_embeddings_of_one_token(taken):
    model = own()
    out = model(**tiny.prompt(1, 40))
    model(inputs_embeds=model.get_input_embeddings()(torch.tensor([[7]])), past_key_values=out.past_key_values)
    assert len(taken) == ALL


def test_drafted_tokens(taken):
    kvevict.patch(model := tiny.model().bfloat16(), "laq", budget=16, window=4, n_d=3)
    model(**tiny.prompt(1, 40), logits_to_keep=1)
    assert len(taken) >= 3 * (ALL - 1)


def test_nothing_of_torch_is_replaced():
    """An unpatched model that is called while a token is decoded has PyTorch's bits and derivatives."""
    model, other, found = own(), torch.nn.Linear(512, 2000).bfloat16(), []
    x = torch.randn(1, 512).bfloat16()
    want = TORCHS(x, other.weight, other.bias)

    def note(*_):
        found.append(torch.equal(other(x), want) and torch.equal(TORCHS(x, other.weight, other.bias), want))
        tangent = torch.func.jvp(lambda x: torch.nn.functional.linear(x, other.weight), (x,), (x,))[1]
        assert torch.equal(tangent, TORCHS(x, other.weight))
        assert (torch.nn.functional.linear, torch.nn.Linear.forward) == (TORCHS, FORWARD)

    model.lm_head.register_forward_hook(note)
    decoded(model)
    assert found == [True] * 3


def test_modules_are_called_alone(taken):
    """A module of a patched model outside of its calls, and in a thread of someone else."""
    model, x = own(), torch.randn(1, 1, 64).bfloat16()
    want = TORCHS(x, model.lm_head.weight)
    assert torch.equal(model.lm_head(x), want) and torch.equal(model.lm_head(input=x), want)
    with within(few_rows=True), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(model.lm_head, x).result(), want)
    assert not taken


@pytest.mark.parametrize("place", ["function", "class", "module"])
@pytest.mark.parametrize("first", [True, False])
def test_a_function_of_another_library_is_called(place, first, monkeypatch, taken):
    """As that of a profiler that counts, or of an emulated number format."""
    model, shapes = own() if first else tiny.model().bfloat16(), []

    def function(x, *args):
        shapes.append(x.shape)
        return TORCHS(x, *args)

    if place == "function":
        monkeypatch.setattr(torch.nn.functional, "linear", function)
    elif place == "class":
        monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: function(x, self.weight, self.bias))
    else:
        for each in model.modules():
            if type(each) is torch.nn.Linear:
                each.forward = lambda x, each=each: function(x, each.weight, each.bias)
    decoded(kvevict.patch(model, "streaming", budget=16))
    assert sum(shape[1] == 1 for shape in shapes) >= 2 * ALL and not taken


class Seen(TorchFunctionMode):
    """Doubles the products that it sees."""

    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls += function is TORCHS
        return 2 * result if function is TORCHS else result


def test_modes_see_each_product(taken):
    """A function mode, and one that counts operators, as without kvevict; also one that comes inside of the call."""
    model, counts = tiny.model().bfloat16(), []
    for patch in (lambda: None, lambda: kvevict.patch(model, "snapkv", budget=64, tokenizer=False)):
        patch()
        cache = model(**tiny.prompt(1, 40)).past_key_values
        for mode in (Seen(), FlopCounterMode(display=False)):
            with mode:
                model(torch.tensor([[7]]), past_key_values=cache)
            counts.append(mode.calls if isinstance(mode, Seen) else mode.get_flop_counts()["Global"][torch.ops.aten.mm])
    assert counts[:2] == counts[2:] and counts[0] == ALL and not taken
    mlp = model.model.layers[-1].mlp

    def inside(x, run=mlp.forward):
        with mode:
            return run(x)

    mode, mlp.forward = Seen(), inside
    model(torch.tensor([[7]]), past_key_values=cache)
    assert mode.calls == 3 and len(taken) == ALL - 3


def test_a_default_device_is_no_mode(taken):
    with torch.device("cpu"):
        decoded(own())
    assert len(taken) == 2 * ALL


def linear(x, weight, bias=None):
    """The product by a module of a patched model, in its call."""
    module = torch.nn.Linear(1, 1)
    module.weight = weight if isinstance(weight, torch.nn.Parameter) else torch.nn.Parameter(weight, False)
    module.bias = None if bias is None else torch.nn.Parameter(bias, False)
    with within(few_rows=True):
        return few_rows.forward(module, module.forward, x)


def test_what_is_left_to_torch(taken):
    """Whatever has a gradient, is a subclass or has sizes that the op does not take, and autocast, which chooses the
    dtype; the results are torch's, bit by bit."""
    x, weight = torch.randn(2, 3, 64).bfloat16(), torch.nn.Parameter(torch.randn(80, 64).bfloat16())
    x.requires_grad_()
    narrow, wide = torch.randn(1, 24).half(), torch.randn(33, 32).half()
    of_narrow, of_wide = torch.randn(8, 24).half(), torch.randn(8, 32).half()
    assert torch.equal(linear(narrow, of_narrow), TORCHS(narrow, of_narrow))
    assert torch.equal(linear(wide, of_wide), TORCHS(wide, of_wide))
    assert torch.equal(linear(wide[:1], of_wide.mT.contiguous().mT), TORCHS(wide[:1], of_wide))
    for bias in (torch.ones(1).half(), torch.ones(1, 8).half(), torch.ones(16).half()[::2]):
        assert torch.equal(linear(wide[:2], of_wide, bias), TORCHS(wide[:2], of_wide, bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(wide[:2], of_wide).dtype == torch.bfloat16
    with torch.enable_grad():
        assert linear(x, weight).grad_fn is not None
    assert not taken
    assert linear(x, weight).grad_fn is None and taken


def test_rows_of_two_dimensions(taken):
    """As a module that flattens its rows has them."""
    x, weight, bias = torch.randn(3, 64).bfloat16(), torch.randn(80, 64).bfloat16(), torch.randn(80).bfloat16()
    torch.testing.assert_close(linear(x, weight, bias), TORCHS(x, weight, bias), rtol=2**-7, atol=2**-6)
    assert taken


def test_modules_are_as_before_after_unpatch():
    model = tiny.model().bfloat16()
    keys, before = list(model.state_dict()), [each.__dict__.keys() for each in map(copy.copy, model.modules())]
    kvevict.patch(model, "streaming", budget=16)
    assert list(model.state_dict()) == keys
    kvevict.unpatch(model)
    assert [each.__dict__.keys() for each in model.modules()] == before


@pytest.mark.parametrize("sent", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_has_its_own_weights(sent, taken):
    there = sent(model := own())
    there.lm_head.weight.zero_()
    cache = there(**tiny.prompt(1, 40)).past_key_values
    assert there(torch.tensor([[7]]), past_key_values=cache).logits.count_nonzero() == 0
    assert {id(each) for each in taken} == {id(m.weight) for m in there.modules() if type(m) is torch.nn.Linear}
    kvevict.unpatch(there)
    assert not any("forward" in each.__dict__ for each in there.modules())
    taken.clear()
    decoded(there)
    assert not taken
    decoded(model)
    assert taken


def test_saved_weights_fit_an_unpatched_model():
    torch.save(own().state_dict(), file := io.BytesIO())
    file.seek(0)
    tiny.model().load_state_dict(torch.load(file))


def test_torch_compile_takes_a_module_whole():
    """Its products are PyTorch's then."""
    mlp, x = own().model.layers[0].mlp, torch.randn(1, 1, 64).bfloat16()
    want = mlp(x)
    mlp.compile(backend="eager", fullgraph=True)
    with within(few_rows=True):
        assert torch.equal(mlp(x), want)
    torch.compiler.reset()


@pytest.mark.parametrize("before", [True, False])
def test_lora(before, taken):
    """An adapter's base layers, injected before or after `patch`, and its merged weights."""
    peft = pytest.importorskip("peft")
    model = tiny.model().bfloat16() if before else own()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules=["q_proj"], init_lora_weights=False))
    if before:
        kvevict.patch(wrapped, "streaming", budget=16)
    for change in (lambda: None, wrapped.merge_adapter):
        change()
        taken.clear()
        decoded(wrapped)
        assert len(taken) == 2 * ALL  # the adapter's own are in fp32
    kvevict.unpatch(wrapped)
    assert not any("forward" in each.__dict__ for each in wrapped.modules())


@pytest.mark.parametrize("first", [True, False])
def test_offloaded_weights(first, tmp_path, taken):
    """Which accelerate fetches around the forward that it finds: PyTorch's, or ours."""
    want = decoded(own())
    model = tiny.model().bfloat16()
    with contextlib.nullcontext() if first else kvevict.evicting(model, "streaming", budget=16):
        offload.cpu(model, tmp_path / "weights")
        taken.clear()
        assert torch.equal(decoded(kvevict.patch(model, "streaming", budget=16)), want)
    assert len(taken) == 2 * ALL
    kvevict.unpatch(model)
    taken.clear()
    decoded(model)
    assert not taken


def test_logits_are_the_same_but_for_rounding():
    """Each product's sum is in float32 in either order, rounded to bf16 once."""
    model, ids = tiny.model().bfloat16(), tiny.prompt(1, 20)["input_ids"]
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
