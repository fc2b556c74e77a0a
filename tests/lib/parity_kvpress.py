"""What kvpress keeps: run by the Python of an environment that has it, beside ours (see test_kvpress.py).

    python parity_kvpress.py FOLDER

FOLDER holds a saved model, asks.json, a list of [press, compression ratio, token ids], and sketch.pt, which stands in
for the random numbers of Compactor's sketch; kept.json is written: for each ask the kept positions as
[layer][kv head]. Its folders kvzap-linear and kvzap-mlp hold KVzap's gates of the model.
"""

import json
import pathlib
import sys

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

PART = 90  # as in test_kvpress.py


class Tokenizer:
    """Stands in for KVzip's, without a request to repeat the context."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, name):
        return cls()

    def encode(self, text, **options):
        return torch.empty(1, 0, dtype=torch.long)


class InParts(kvpress.KVzipPress):
    """KVzipPress itself puts the part before's last tokens into the request to repeat a part, except the first."""

    def prepare(self, *args):
        return [(part, part) for part, _ in super().prepare(*args)]


class Zap(kvpress.KVzapPress):
    """KVzapPress itself has its gates from the hub."""

    def post_init_from_model(self, model):
        folder = f"{model.config.name_or_path}/kvzap-{self.model_type}"
        self.kvzap_model = kvpress.presses.kvzap_press.KVzapModel.from_pretrained(folder)


def kvzip(press, **options):
    return lambda ratio: press(ratio, **options)


PRESSES = {
    "snapkv": kvpress.SnapKVPress,
    "chunkkv": lambda ratio: kvpress.ChunkKVPress(kvpress.SnapKVPress(ratio)),
    "adakv": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "streaming": kvpress.StreamingLLMPress,
    "expected": lambda ratio: kvpress.ExpectedAttentionPress(ratio, epsilon=0.01),
    "expected, ada": lambda ratio: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio, epsilon=0.01)),
    "critical": lambda ratio: kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio)),
    "criticalada": lambda ratio: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(ratio)),
    "lagkv": kvpress.LagKVPress,
    "compactor": lambda ratio: kvpress.CompactorPress(ratio, blending=0.35),
    "kvzip": kvzip(kvpress.KVzipPress),
    "kvzip, layers": kvzip(kvpress.KVzipPress, layerwise=True),
    "kvzip+": kvzip(kvpress.KVzipPress, kvzip_plus_normalization=True),
    "kvzap-linear": lambda ratio: Zap(ratio, model_type="linear"),
    "kvzap-mlp": lambda ratio: Zap(ratio, model_type="mlp"),
    "kvzap-mlp, ada": lambda ratio: kvpress.AdaKVPress(Zap(ratio, model_type="mlp"), alpha_safeguard=0.0),
    "kvzip, parts": kvzip(InParts, chunk_size=PART),
    "kvzip+, parts": kvzip(InParts, chunk_size=PART, kvzip_plus_normalization=True),
}  # fmt: skip
MASKING = kvpress.AdaKVPress, kvpress.CriticalAdaKVPress, kvpress.KVzipPress  # nothing is removed, decoding masks it


def read(model, ids):
    """Keys [Hkv, slots, d] of every layer after the prompt."""
    read = model.model(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())
    return [layer.keys[0] for layer in read.past_key_values.layers]


def kept(model, press, ids):
    full = read(model, ids)
    with press(model):
        pressed = read(model, ids)
    if isinstance(press, MASKING):
        return [lost_apart(layer.self_attn.masked_key_indices, keys) for layer, keys in zip(model.model.layers, full)]
    return [[places(*pair) for pair in zip(*layers)] for layers in zip(pressed, full)]


def places(some, all_):
    """Where the rows of `some` [n, d] are in `all_` [N, d], ascending."""
    found = (some[:, None] == all_).all(-1).nonzero()
    assert found[:, 0].tolist() == list(range(len(some)))
    return sorted(found[:, 1].tolist())


def lost_apart(lost, keys):
    alive = torch.ones(keys.shape[:2], dtype=torch.bool)
    alive[lost[1], lost[2]] = False
    return [head.nonzero()[:, 0].tolist() for head in alive]


@torch.no_grad()
def main(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    asks = json.loads((folder / "asks.json").read_text())
    sketch = torch.load(folder / "sketch.pt")
    kvpress.presses.kvzip_press.AutoTokenizer = Tokenizer
    # LeveragePress scales its random numbers; nothing else here draws any.
    torch.randn = lambda *shape, **options: (sketch * shape[-1] ** 0.5).expand(shape).to(**options)
    answers = [kept(model, PRESSES[name](ratio), ids) for name, ratio, ids in asks]
    (folder / "kept.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
