"""Diagnostics against float64: eq. 24 as printed, brute-force removal, sets counted by hand; `kvevict.report` and
`kvevict diagnose` against the float64 oracle with every key and value."""

import json

import oracle
import pytest
import tiny
import torch
from helpers import FP32
from policy_cases import NEAR, POLICIES, model, options, tokens

import kvevict
from kvevict.cli import main
from kvevict.engine.watch import diagnostics
from kvevict.lab.analysis import compare
from kvevict.policy.building import build

MODEL = 1e-5  # relative, fp32's error over the layers of a tiny model; 3e-7 was measured


def attention64(q, k, sees, scale, softcap=0.0, sinks=None):
    """a [G, R, n] of q [G, R, d] in float64; a row that sees nothing has 0."""
    x = q.double() @ k.double().T * scale
    x = softcap * torch.tanh(x / softcap) if softcap else x
    e = x.exp() * sees
    total = e.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.double().exp()[:, None, None])
    return torch.where(total > 0, e / total, 0.0)


def eq24(a, v, lost):
    """CAOTE eq. 24 as printed, a [R, n], v [n, d], lost [n]: [R]."""
    o = a @ v
    moved = sum((a[:, i, None] * (o - v[i]) for i in lost.nonzero()[:, 0].tolist()), torch.zeros_like(o))
    return moved.norm(dim=-1) / (1 - a[:, lost].sum(-1))


def drawn(seed, G=2, R=5, n=23, d=16):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, generator=gen) for shape in ((G, R, d), (n, d), (n, d)))
    sees = torch.ones(R, n, dtype=torch.bool).tril(n - R)
    lost = torch.randperm(n, generator=gen) < n // 2
    lost[0] = False  # every row sees a slot that stays
    return 2 * q, k, v, sees, lost


def errors(q, k, v, sees, lost, **options):
    _, before = diagnostics.attention(q, k, v, sees, **options)
    _, after = diagnostics.attention(q, k, v, sees & ~lost, **options)
    return diagnostics.joint_error(before, after), diagnostics.output_error(before, after), before


LOGITS = {"plain": {}, "softcap": dict(softcap=1.5), "sinks": dict(sinks=torch.tensor([0.7, -0.4]))}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("seed", range(5))
def test_joint_error_is_eq24_and_removal(seed, kind):
    q, k, v, sees, lost = drawn(seed)
    options = dict(scale=0.25, **LOGITS[kind])
    joint, relative, before = errors(q, k, v, sees, lost, **options)
    a = attention64(q, k, sees, **options)
    printed = sum(eq24(head, v.double(), lost) ** 2 for head in a).sqrt()
    o = a @ v.double()
    removed = attention64(q, k[~lost], sees[:, ~lost], **options) @ v[~lost].double()
    moved = (o - removed).pow(2).sum((0, 2)).sqrt()
    torch.testing.assert_close(printed, moved, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(before.double(), o, rtol=FP32, atol=FP32)
    torch.testing.assert_close(joint.double(), moved, rtol=FP32, atol=FP32)
    torch.testing.assert_close(relative.double(), moved / o.pow(2).sum((0, 2)).sqrt(), rtol=FP32, atol=FP32)


@pytest.mark.parametrize("seed", range(5))
def test_one_slot_is_eq6(seed):
    q, k, v, sees, _ = drawn(seed, G=1)
    a = attention64(q, k, sees, 0.25)[0]
    for slot in range(1, len(k)):
        joint = errors(q, k, v, sees, torch.arange(len(k)) == slot, scale=0.25)[0]
        eq6 = a[:, slot] / (1 - a[:, slot]) * (v[slot].double() - a @ v.double()).norm(dim=-1)
        torch.testing.assert_close(joint.double(), eq6, rtol=FP32, atol=FP32)


def test_what_holds_nearly_everything_goes():
    """1 - a is 1e-20 here, and eq. 24 as printed divides by it; the outputs are far apart, not NaN."""
    q, k = torch.full((1, 1, 8), 1.0), torch.zeros(3, 8)
    k[1] = 48 / 8
    v = torch.eye(3, 8)
    lost = torch.tensor([False, True, False])
    joint, relative, _ = errors(q, k, v, torch.ones(1, 3, dtype=torch.bool), lost, scale=1)
    want = (torch.tensor([0.0, 1, 0]) - torch.tensor([0.5, 0, 0.5])).norm()
    torch.testing.assert_close(joint, want[None])
    torch.testing.assert_close(relative, want[None])


def test_a_row_that_loses_all_it_sees():
    q, k, v, sees, _ = drawn(0)
    joint, relative, before = errors(q, k, v, sees, torch.ones(len(k), dtype=torch.bool), scale=0.25)
    torch.testing.assert_close(joint, before.pow(2).sum((0, 2)).sqrt())
    torch.testing.assert_close(relative, torch.ones(5))


def test_sets_by_hand():
    """Of heads {1, 2}, {3} and {2}, {4, 5} in one layer, then of an equal and of two empty ones in another."""
    one, other = [{1, 2}, {3}], [{2}, {4, 5}]
    assert compare.overlap([one], [other]) == (1 / 2 + 0) / 2
    assert compare.overlap([one, [{7, 9}, set()]], [other, [{9, 7}, set()]]) == (1 / 2 + 0 + 1 + 1) / 4


class Row(oracle.Row):
    """The oracle; it also records, per evicting layer and eviction, the numbers of `report`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.before, self.logits, self.noted = {}, {}, {index: [] for index in self.own}

    def observing(self, rows):
        """How many of the last rows of a call the policy scores by, at most 64."""
        score = self.o["score"]
        if self.o["rows"] == "probe":
            return self.p
        if score in ("snapkv", "edie", "edie-exact", "cake", "paasvn"):
            return min(self.o["window"], rows)
        if score == "oracle":
            return len(self.o["ids"])
        return self.p if score == "take" else 1 if score == "tova" else min(64, rows)

    def attend(self, module, q, k, v, scale, softcap, sinks):
        layer, new = self.layers[module.layer_idx], q.shape[1] - self.extra
        alive = [[*head, *range(self.seen, self.seen + new)] for head in layer.alive]
        R = self.observing(q.shape[1])
        rows = range(self.seen + q.shape[1] - R, self.seen + q.shape[1])
        self.before[module.layer_idx] = alive, q[:, -R:], rows
        self.logits[module.layer_idx] = scale, softcap or 0.0, sinks
        out = super().attend(module, q, k, v, scale, softcap, sinks)
        for index, (alive, q, rows) in self.before.items():
            if index in self.own and alive != self.layers[index].alive:
                self.noted[index].append(self.errors_of(self.layers[index], alive, q, rows))
                self.before[index] = self.layers[index].alive, None, None
        return out

    def errors_of(self, layer, alive, q, rows):
        """Means over the rows q [H, R, d] of an eviction that leaves layer.alive of the slots `alive`."""
        moved = length = kept_mass = mass = 0.0
        for g, slots in enumerate(alive):
            kept = torch.tensor([slot in layer.alive[g] for slot in slots])
            seen_by = rows, layer.k[g, slots], slots, None, (0, len(slots))  # a question before the text is not seen
            a, values = self._weights(g, q, *seen_by), layer.v[g, slots]
            for head in a:
                o = head @ values
                error = torch.where(head[:, kept].sum(1) > 0, eq24(head, values, ~kept), o.norm(dim=1))
                moved, length = moved + error**2, length + o.pow(2).sum(1)
                kept_mass, mass = kept_mass + head[:, kept].sum(), mass + head.sum()
        return [moved.sqrt().mean(), (moved / length).sqrt().mean(), kept_mass / mass]

    def diagnostics(self):
        """Per layer (evictions, joint_error, output_error, recall), means over evictions; None for sliding layers."""
        mean = lambda x: torch.tensor(x, dtype=torch.double).mean(0).tolist() if x else [0.0, 0.0, 1.0]  # noqa: E731
        means = {i: mean(x) for i, x in self.noted.items()}
        return [(len(self.noted[i]), *means[i]) if i in means else None for i in range(len(self.layers))]


def agree(preset, given, lengths, made, **known):
    """The report of a padded batch against the oracle's rows, one by one; `known`: further options of the oracle."""
    for seed in range(60):
        data = [call[0] for call in tokens([[n] for n in lengths], seed)]
        rows = [Row(made, preset, near=NEAR, **given | known) for _ in data]
        try:
            for row, ids in zip(rows, data):
                row.read(ids.tolist())
            break
        except oracle.NearTie:
            continue
    longest = max(lengths)
    ids = torch.stack([torch.cat([torch.zeros(longest - len(x), dtype=torch.long), x]) for x in data])
    mask = (torch.arange(longest) >= torch.tensor([[longest - len(x)] for x in data])).long()
    with kvevict.evicting(made, preset, diagnose=True, **given):
        made(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
        got = kvevict.report(made)["diagnostics"]
    for b, row in enumerate(rows):
        for index, want in enumerate(row.diagnostics()):
            ours = [got[name][index] for name in diagnostics.NAMES]
            if want is None:
                assert ours == [None] * 4
            else:
                assert [x[b] for x in ours] == pytest.approx(want, rel=MODEL)
    return got


CHUNKS = dict(budget=16, chunk_size=12)
OTHERS = {"gemma2": dict(attn_logit_softcapping=2.0), "gpt_oss": {}}
MORE = {
    "adakv": dict(window=4),
    "edie": dict(window=4),
    "chunkkv": dict(window=4, c=4, n_reuse=2),
    "pyramidkv": dict(window=4),
    "take": dict(probe=5, heads="flat"),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.drawn(10)
def test_report(name):
    preset, given = options(name)
    got = agree(preset, given | CHUNKS, [61, 40], model())
    assert min(map(min, got["evictions"])) > 0


@pytest.mark.parametrize("preset", MORE)
def test_report_of_other_budgets(preset):
    agree(preset, MORE[preset] | CHUNKS, [61, 37], model())
    agree(preset, MORE[preset] | dict(budget=16), [61, 37], model())


@pytest.mark.parametrize("family", OTHERS)
def test_report_of_other_models(family):
    """A softcap, attention sinks; sliding-window layers have no diagnostics."""
    made = model(family, **OTHERS[family])
    agree("snapkv", dict(window=4) | CHUNKS, [53, 40], made)
    agree("take", dict(probe=5) | CHUNKS, [53, 40], made)


def test_report_of_a_question_before_the_text():
    """The rows that observe are its copies, and do not see it."""
    with kvevict.observing((5, 10)):
        told = dict(probe=((5, 10),), ending=11, before=(5, 10, True))
        agree("take", dict(probe=11) | CHUNKS, [61, 45], model(), **told)


@pytest.mark.parametrize("lengths", [[1], [16], [17], [33, 1]])
def test_report_of_short_prompts(lengths):
    """A row that fits the budget has lost nothing: no evictions, errors 0, recall 1."""
    got = agree("h2o", CHUNKS, lengths, model())
    if max(lengths) <= 16:
        assert got == dict(evictions=[[0]] * 4, joint_error=[[0.0]] * 4, output_error=[[0.0]] * 4, recall=[[1.0]] * 4)


def test_only_when_asked_for():
    made, inputs = model(), tiny.prompt(length=40)
    with kvevict.evicting(made, "snapkv", window=4, **CHUNKS):
        want = made(**inputs)
        assert "diagnostics" not in kvevict.report(made)
    with kvevict.evicting(made, "snapkv", window=4, diagnose=True, **CHUNKS):
        got = made(**inputs)
        seen = kvevict.report(made)
    assert torch.equal(got.logits, want.logits)
    assert json.loads(json.dumps(seen)) == seen
    assert seen["seconds"]["diagnose"] > 0
    with pytest.raises(TypeError, match="diagnose must be True or False"):
        kvevict.patch(made, "snapkv", budget=64, diagnose="yes")


def layer64(N, q, logit, cache, left, alive):
    """`compare.compare` of one layer in float64: q [H, R, d], cache and left (k, v) [Hkv, N + R or N, d] of the full
    read and of the policy's, alive [Hkv] the tokens that the policy kept."""
    moved = wrong = length = mass = kept_mass = 0.0
    tops, (scale, softcap, sinks), n = [], logit, cache[0].shape[1]
    for g, slots in enumerate(alive):
        group = slice(g * len(q) // len(alive), (g + 1) * len(q) // len(alive))
        common = dict(scale=scale, softcap=softcap, sinks=None if sinks is None else sinks[group])
        sees = torch.arange(n) <= torch.arange(N, n)[:, None]
        kept = torch.tensor([t in slots or t >= N for t in range(n)])
        (k, v), stored = (x[g] for x in cache), [x[g].clone() for x in cache]
        for x, mine in zip(stored, left):
            x[slots] = mine[g, slots]
        a, b = attention64(q[group], k, sees, **common), attention64(q[group], stored[0], sees & kept, **common)
        moved = moved + sum(eq24(head, v, ~kept) ** 2 for head in a)
        wrong = wrong + (a @ v - b @ stored[1]).pow(2).sum((0, 2))
        length = length + (a @ v).pow(2).sum((0, 2))
        far = ((a @ v)[:, :, None] - v[:N]).abs().sum(-1)  # [G, R, N]
        a = a[..., :N]
        best = (a / (1 - a) * far).sum((0, 1)).tolist()
        tops.append(sum(i in slots for i in sorted(range(N), key=lambda i: -best[i])[:16]) / 16)
        mass, kept_mass = mass + a.sum(), kept_mass + a[..., kept[:N]].sum()
    return [moved.sqrt().mean(), (wrong / length).sqrt().mean(), kept_mass / mass, sum(tops) / len(tops)]


@torch.no_grad()
def compare64(made, prompt, response, preset, given):
    """`compare.compare` in float64, [layer] of the four numbers, and the kept positions."""
    full, row = Row(made, "streaming", budget=10**6), Row(made, preset, near=NEAR, **given)
    full.read([*prompt, *response])
    row.read(list(prompt))
    return [
        layer64(len(prompt), full.before[i][1][:, -len(response) :], full.logits[i],
                (full.layers[i].k, full.layers[i].v), (row.layers[i].k, row.layers[i].v), row.layers[i].alive)
        for i in full.own
    ], row.positions  # fmt: skip


COMPARED = {
    "snapkv": dict(window=4, budget=16), "take": dict(probe=5, **CHUNKS), "adakv": dict(window=4, **CHUNKS),
    "h2o": CHUNKS, "streaming": dict(budget=16), "oracle": dict(budget=9),
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", *OTHERS])
@pytest.mark.parametrize("preset", COMPARED)
def test_compare(preset, family):
    made, given = model(family, **OTHERS.get(family, {})), dict(COMPARED[preset])
    for seed in range(60):
        prompt = tokens([[57]], seed)[0][0]
        full = compare.full_cache(made, prompt[None], max_new_tokens=5)
        assert torch.equal(torch.tensor(full.response), tiny.generate(made, dict(input_ids=prompt[None]), new=5)[0])
        if preset == "oracle":
            given["ids"] = tuple(full.response)
        try:
            want, positions = compare64(made, prompt.tolist(), full.response, preset, given)
            break
        except oracle.NearTie:
            continue
    left = compare.left(made, prompt[None], build(preset, **given))
    assert compare.positions(left) == [[set(head) for head in layer] for layer in positions if layer]
    for got, numbers in zip(compare.compare(full, left), want, strict=True):
        assert list(got.values()) == pytest.approx([float(x) for x in numbers], rel=MODEL)
        assert list(got) == list(compare.NAMES)


def test_figure_3():
    """The errors are brute-force removals by the last rows, and the shares are counted by hand, in float64."""
    made, prompt = model(), tokens([[57]], 3)[0][0]
    row = oracle.Row(made, "edie", 100, window=28)
    row.read(prompt.tolist())
    exact = compare.errors(made, prompt[None])
    guess = compare.scores(made, prompt[None], build("snapkv", window=28, budget=40))
    for index, (errors, scores, share) in enumerate(zip(exact, guess, compare.found(exact, guess), strict=True)):
        shares, seen = [], row.calls[index]
        for g, a in enumerate(seen.attention):
            a, v = a[:, -28:], seen.layer.v[g]
            o, moved = a @ v, torch.zeros(57, dtype=torch.double)
            for m in range(29):
                rest = a.clone()
                rest[..., m] = 0
                moved[m] = (o - rest / rest.sum(-1, keepdim=True) @ v).abs().sum()
            torch.testing.assert_close(errors[g, :29].double(), moved[:29], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(scores[g].double(), a.sum(1).mean(0), rtol=1e-4, atol=1e-6)
            best, guessed = (set(x[:29].argsort(descending=True)[:16].tolist()) for x in (moved, a.sum((0, 1))))
            shares.append(len(best & guessed) / 16)
        assert share == pytest.approx(sum(shares) / len(shares)) and share < 1
    with pytest.raises(ValueError, match="a prompt of 5 tokens is too short to be scored"):
        compare.scores(made, prompt[None, :5], build("snapkv", window=4, budget=40))


@pytest.mark.parametrize("budget", [57, 200])
def test_compare_when_nothing_goes(budget):
    made, prompt = model(), tokens([[57]], 0)[0][0]
    full = compare.full_cache(made, prompt[None], max_new_tokens=70)
    assert len(full.response) == 70
    assert full.layers[0][0].shape[1] == diagnostics.ROWS
    left = compare.left(made, prompt[None], build("h2o", budget=budget, chunk_size=12))
    for got in compare.compare(full, left):
        want = dict(joint_error=0.0, output_error=0.0, recall=1.0, top16=1.0)
        assert got == pytest.approx(want, abs=MODEL)


@pytest.mark.quick
def test_command(tmp_path, capsys):
    name, made = tiny.save(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(120)))
    policies = ["snapkv:window=4", "take:probe=4,chunk_size=40", "oracle"]
    argv = ["diagnose", "who?", "--file", str(text), "--model", name, "--budget", "24", "--policies", *policies]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["command"] == "diagnose"
    ids = torch.tensor([tiny.byte_tokenizer()(text.read_text() + "\n\nwho?")["input_ids"]])
    assert result["tokens"] == ids.shape[1] == 126
    full = compare.full_cache(made, ids, 32)
    made_of = dict(snapkv=dict(window=4), take=dict(probe=4, chunk_size=40), oracle=dict(ids=tuple(full.response)))
    left = [compare.left(made, ids, build(p, budget=24, **given)) for p, given in made_of.items()]
    kept = [compare.positions(one) for one in left]
    for a, name in enumerate(policies):
        run = result["runs"][name]
        assert [{n: layer[n] for n in compare.NAMES} for layer in run["layers"]] == compare.compare(full, left[a])
        for metric in (*compare.NAMES, compare.FOUND):
            assert run[metric] == pytest.approx(sum(layer[metric] for layer in run["layers"]) / 4)
        assert run["slots"] == [24, 24]
        lines = [line.split() for line in printed.splitlines() if line.startswith(name)]
        overlaps = [compare.overlap(kept[a], other) for other in kept]
        assert list(result["overlap"][name].values()) == overlaps
        assert lines[0][1:] == ["24", *(f"{run[metric]:.3f}" for metric in (*compare.NAMES, compare.FOUND))]
        assert lines[1][1:] == [f"{x:.2f}" for x in overlaps]


def test_several_cases(capsys):
    """Means and standard errors of what each prints alone; a fact's answer ends with its line."""
    argv = ["diagnose", "--limit", "300", "--policies", "snapkv", "--budget", "64", "--cases"]
    assert main([*argv, "1"]) == main([*argv, "2"]) == 0
    printed = capsys.readouterr().out
    alone, both = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    assert both["cases"] == len(both["answers"]) == 2 and both["answers"][:1] == alone["answers"]
    assert all(answer.isdigit() for answer in both["answers"])
    first, mean, apart = (x["snapkv"] for x in (alone["runs"], both["runs"], both["standard_errors"]))
    for name in ("recall", "top16"):
        assert apart[name] == pytest.approx(abs(mean[name] - first[name]))  # half of how far the two are apart
        assert alone["standard_errors"]["snapkv"][name] is None
    assert f"{mean['recall']:.3f} ±{apart['recall']:.3f}" in printed
    assert sum(layer["recall"] for layer in mean["layers"]) / 4 == pytest.approx(mean["recall"])
    assert main([*argv, "0"]) == 2 and "--cases" in capsys.readouterr().err
    assert main(["diagnose", "who?", "--file", "text.txt", "--cases", "2"]) == 2
    assert "--cases 2: a file is one text" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["who?"], ["--file", "text.txt"]])
def test_half_a_prompt(argv, capsys):
    assert main(["diagnose", *argv]) == 2
    assert "a question, before --policies, and --file, or neither" in capsys.readouterr().err
