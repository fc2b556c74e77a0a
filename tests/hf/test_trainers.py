"""Trainers, processes and adapters over a patched model: training equals the unpatched model's bit by bit, and
generation equals each row's alone."""

import copy
import multiprocessing
from datetime import timedelta

import pytest
import tiny
import torch
import transformers

import kvevict
from kvevict.models.compat import CACHE

POLICY = ("take", dict(budget=18, probe=6, chunk_size=16))
INPUTS = tiny.prompt(4, 50, pad=(0, 9))
ROWS = [dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        for ids, mask in zip(INPUTS["input_ids"], INPUTS["attention_mask"], strict=True)]  # fmt: skip


def alone(net, row):
    """A row's continuation, without its padding."""
    with kvevict.evicting(net, POLICY[0], **POLICY[1]):
        return tiny.generate(net, dict(input_ids=row["input_ids"][row["attention_mask"].bool()][None]))[0].tolist()


def test_trainer(tmp_path):
    """Steps and the loss on held-out rows equal the unpatched model's; generation follows the policy."""
    pytest.importorskip("accelerate")
    options = dict(output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=4,
                   report_to=[], use_cpu=True, save_strategy="no", learning_rate=1e-2, seed=3,
                   gradient_checkpointing=True)  # fmt: skip
    trained = []
    for patched in (False, True):
        net = tiny.model()
        if patched:
            kvevict.patch(net, POLICY[0], **POLICY[1])
        trainer = transformers.Seq2SeqTrainer(net, transformers.Seq2SeqTrainingArguments(**options), train_dataset=ROWS)
        trainer.train()
        trained.append((net.eval(), trainer.evaluate(ROWS[:1])["eval_loss"]))
    (plain, loss), (net, same) = trained
    assert not torch.equal(plain.lm_head.weight, tiny.model().lm_head.weight)
    assert all(map(torch.equal, plain.parameters(), net.parameters())) and same == pytest.approx(loss, rel=1e-5)
    net.config.use_cache = True
    trainer.args.predict_with_generate = True
    found = trainer.predict([{name: row[name] for name in ("input_ids", "attention_mask")} for row in ROWS],
                            max_new_tokens=8, do_sample=False)  # fmt: skip
    assert found.predictions[:, 50:].tolist() == [alone(plain, row) for row in ROWS]


def _rank(rank, store, net, queue):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )
    wrapped = kvevict.patch(torch.nn.parallel.DistributedDataParallel(net), POLICY[0], **POLICY[1])
    mine = {name: torch.stack([row[name] for row in ROWS[2 * rank : 2 * rank + 2]]) for name in ROWS[0]}
    wrapped.train()(**mine).loss.backward()
    grads = [weight.grad.numpy().copy() for weight in net.parameters()]
    mine.pop("labels")
    tokens, logits = tiny.generate(wrapped.eval().module, mine).tolist(), wrapped(**mine, logits_to_keep=1).logits
    queue.put((rank, grads, tokens, logits.detach().numpy().copy()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    """DistributedDataParallel: gradients are the mean of both processes' of an unpatched model."""
    context, net = multiprocessing.get_context("spawn"), tiny.model()
    queue, store = context.Queue(), str(tmp_path / "store")
    other = context.Process(target=_rank, args=(1, store, tiny.model(), queue))
    other.start()
    _rank(0, store, tiny.model(), queue)
    found = sorted((queue.get(timeout=120) for _ in range(2)), key=lambda each: each[0])
    other.join()
    batches = [{name: torch.stack([row[name] for row in ROWS[i : i + 2]]) for name in ROWS[0]} for i in (0, 2)]
    sum(net.train()(**batch).loss / 2 for batch in batches).backward()
    for weight, *theirs in zip(net.parameters(), *(grads for _, grads, _, _ in found), strict=True):
        for grad in theirs:
            torch.testing.assert_close(torch.from_numpy(grad), weight.grad, rtol=1e-4, atol=1e-6)
    net.eval()
    assert [tokens for each in found for tokens in each[2]] == [alone(net, row) for row in ROWS]
    assert any(tiny.generate(net, dict(input_ids=row["input_ids"][None]))[0].tolist() != alone(net, row)
               for row in ROWS if row["attention_mask"].all())  # fmt: skip
    with kvevict.evicting(net, POLICY[0], **POLICY[1]):
        for batch, (*_, logits) in zip(batches, found, strict=True):
            batch.pop("labels")
            assert tiny.relative(torch.from_numpy(logits), net(**batch, logits_to_keep=1).logits) < 1e-5


def adapted(*seeds):
    """A model of PEFT adapters a, b, .."""
    peft, net = pytest.importorskip("peft"), tiny.model()
    for name, seed in zip("ab", seeds):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        if name == "a":
            net = peft.get_peft_model(net, config, adapter_name=name)
        else:
            net.add_adapter(name, config)
    return net.eval()


def test_an_adapter_per_row():
    """A batch of rows with different adapters, or none."""
    net = kvevict.patch(adapted(5, 6), POLICY[0], **POLICY[1])
    inputs = tiny.prompt(3, 50, pad=(0, 9))
    got = tiny.generate(net, inputs, adapter_names=["b", "__base__", "a"])
    want = []
    for row, name in enumerate("b a"):
        one = {key: value[row : row + 1] for key, value in inputs.items()}
        if name == " ":
            with net.disable_adapter():
                want.append(tiny.generate(net, one)[0])
        else:
            net.set_adapter(name)
            want.append(tiny.generate(net, one)[0])
    assert torch.equal(got, torch.stack(want))
    assert len({tuple(row.tolist()) for row in want}) == 3


@pytest.mark.parametrize("policy", ["snapkv", "take"])
@torch.no_grad()
def test_a_cache_belongs_to_the_adapters_that_were_on(policy, tmp_path):
    """Under others it is refused, as its file is, and stays as it was; under the same again it is used."""
    net = adapted(5, 6)
    kvevict.patch(net, policy, budget=18, **dict(window=4) if policy == "snapkv" else dict(probe=4))
    ids, token, turn = tiny.prompt(1, 50)["input_ids"], torch.tensor([[5]]), tiny.prompt(1, 9, seed=2)["input_ids"]

    def refused(cache, said):
        before = copy.deepcopy(cache)
        for more in (token, turn):
            with pytest.raises(ValueError, match="filled by another model, whose PEFT adapters on were") as error:
                net(more, past_key_values=cache)
            assert said in str(error.value) and "with the same PEFT adapters on" in str(error.value)
        for one, other in zip(cache.layers, before.layers, strict=True):
            assert torch.equal(one.keys, other.keys) and one.get_seq_length() == other.get_seq_length()

    net.set_adapter("a")
    cache = net(ids, logits_to_keep=1).past_key_values
    want = net(turn, past_key_values=copy.deepcopy(cache)).logits
    net.set_adapter("b")
    for each in (cache, cache.fork(), copy.deepcopy(cache)):
        refused(each, "were a, this one's are b")
    with net.disable_adapter():
        refused(cache, "were a, this one's are none")
        base = net(ids, logits_to_keep=1).past_key_values
    refused(base, "were none, this one's are b")
    net.base_model.set_adapter(["a", "b"])
    refused(cache, "were a, this one's are a, b")
    both = net(ids, logits_to_keep=1).past_key_values
    net(turn, past_key_values=both.fork())
    net.set_adapter("a")
    net.merge_adapter()
    refused(cache, "were a, this one's are none")
    net.unmerge_adapter()
    assert tiny.relative(net(turn, past_key_values=cache.fork()).logits, want) < 1e-4
    kvevict.save_cache(cache, tmp_path / "cache")
    loaded = kvevict.load_cache(tmp_path / "cache", net)
    net(token, past_key_values=loaded)
    net.set_adapter("b")
    refused(loaded, "were a, this one's are b")
    with pytest.raises(ValueError, match="with the same PEFT adapters on"):
        kvevict.load_cache(tmp_path / "cache", net)
    cache.reset()
    net(ids, past_key_values=cache)  # an empty cache belongs to no model


@torch.no_grad()
def test_a_cache_belongs_to_the_weights_that_were_not_written_to():
    net = adapted(5, 6)
    kvevict.patch(net, "snapkv", budget=18, window=4)
    net.set_adapter("a")
    cache = net(tiny.prompt(1, 50)["input_ids"], logits_to_keep=1).past_key_values
    turn, weights = tiny.prompt(1, 9, seed=2)["input_ids"], dict(net.named_parameters())
    next(weight for name, weight in weights.items() if name.endswith("lora_A.b.weight")).mul_(2)  # is off
    net(turn, past_key_values=cache.fork())
    next(weight for name, weight in weights.items() if name.endswith("lora_A.a.weight")).mul_(2)
    with pytest.raises(ValueError, match="weights were written to since: give the one that read it"):
        net(turn, past_key_values=cache)


@pytest.mark.skipif(CACHE == "cache", reason="PEFT 0.21 generates other tokens, unpatched too")
@pytest.mark.parametrize("budget", [4096, 18])
def test_prefix_tuning(budget):
    """PEFT's learned keys and values come before the prompt: unpatched if all is kept, else each row as alone."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)
    net, inputs = peft.get_peft_model(tiny.model(), config).eval(), tiny.prompt(2, 50, pad=(0, 9))
    plain = tiny.generate(net, inputs)
    kvevict.patch(net, "snapkv", budget=budget, window=4, keep_first=6)
    got = tiny.generate(net, inputs)
    if budget > 50:
        assert torch.equal(got, plain)
    else:
        assert kvevict.report(net)["kept"][0] == [[budget] * 2] * 2
        for row, pad in enumerate((0, 9)):
            one = {name: value[row : row + 1, pad:] for name, value in inputs.items()}
            assert torch.equal(tiny.generate(net, one)[0], got[row])
