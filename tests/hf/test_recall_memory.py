"""What recall takes beside the slots of all tokens: a copy of one layer at a time, measured by the buffers made."""

import weakref
from unittest import mock

import pytest
import tiny
from recalling import SNAPKV, decoded, every
from tiny import prompt, relative

import kvevict
from kvevict.engine.hook import attention as hook
from kvevict.engine.memory.storage import Storage
from kvevict.models.compat import CACHE

pytestmark = pytest.mark.usefixtures("no_grad")
LAYERS, TURN = 8, 400
OPTIONS = SNAPKV | dict(budget=16, chunk_size=64)
ROW = 2 * 2 * 32 * 4  # bytes of a slot's key and value in both heads


class Words:
    """A tokenizer of texts of numbers."""

    chat_template = None

    def __call__(self, text, **options):
        return dict(input_ids=list(map(int, text.split())))


class Made:
    """Inside, the bytes of keys and values in buffers made since, that are alive now, and the most at once."""

    def __enter__(self):
        self.buffers, self.most, blank = [], 0, Storage._blank

        def made(storage, capacity):
            new = blank(storage, capacity)
            self.buffers += [(weakref.ref(x), x.nbytes) for x in (new.k, new.v)]
            self.most = max(self.most, self.alive())
            return new

        self.patch = mock.patch.object(Storage, "_blank", made)
        self.patch.start()
        return self

    def alive(self):
        return sum(size for buffer, size in self.buffers if buffer() is not None)

    def __exit__(self, *error):
        self.patch.stop()


def noted(made, attend):
    """Note in made.noted what is alive once a layer attends."""
    made.noted = []

    def noting(call):
        attend(call)
        made.noted.append(made.alive())

    return noting


def long_turn(model, cache):
    """A turn of many tokens, which come behind the slots that `cache` shares with others."""
    return model(prompt(1, TURN, seed=1)["input_ids"], **{CACHE: cache}, logits_to_keep=1)


@pytest.fixture(scope="module")
def model():
    return tiny.model(num_hidden_layers=LAYERS)


def test_a_turn_over_slots_in_parts(model):
    """Of a fork, whose own slots lie behind those of its text: a further turn attends to both, a layer at a time."""
    with kvevict.evicting(model, **OPTIONS):
        fork = model(prompt(1, 60)["input_ids"], logits_to_keep=1).past_key_values.fork()
        long_turn(model, fork)
        assert all(one.prefix.counts.any() and one.counts.any() for one in every(fork))
        with Made() as made, mock.patch.object(hook, "attend", noted(made, hook.attend)):
            model(prompt(1, 8, seed=2)["input_ids"], **{CACHE: fork}, logits_to_keep=1)
    layer = ROW * (60 + TURN)
    for before, held in enumerate(made.noted):  # of the layers before, the slots of all tokens with room for the turn's
        assert layer < held < (before + 1) * 1.3 * layer


@pytest.mark.parametrize("place", [True, "folder"])
def test_what_is_saved_moved_and_freed(model, place, tmp_path):
    place = str(tmp_path) if place == "folder" else place
    with kvevict.evicting(model, **OPTIONS | dict(recall=place)):
        fork = model(prompt(1, 60)["input_ids"], logits_to_keep=1).past_key_values.fork()
        long_turn(model, fork)
        decoded(model, fork)
        with Made() as made:
            kvevict.save_cache(fork, tmp_path / "file")
    assert made.most <= ROW * 3 * LAYERS  # no slot but those of decoded tokens
    with kvevict.evicting(model, **OPTIONS | dict(recall=False)):
        slots = [weakref.ref(one.k) for one in every(fork)]
        decoded(model, fork, (5,))
        assert all(one() is not None for one in slots)
        long_turn(model, fork)
        assert every(fork) == [] and all(one() is None for one in slots)


def test_a_fork_that_decodes_on(model, tmp_path):
    """What it decoded before and after lies in several buffers: these slots alone are copied to be saved."""
    with kvevict.evicting(model, **OPTIONS | dict(budget=TURN // 2)):
        cache = model(prompt(1, TURN)["input_ids"], logits_to_keep=1).past_key_values
        decoded(model, cache)
        fork = cache.fork()
        decoded(model, fork, (8, 9))
        with Made() as made:
            kvevict.save_cache(fork, tmp_path / "file")
        assert made.most == ROW * (3 + 2) * LAYERS
        loaded = kvevict.load_cache(tmp_path / "file", model)
        turn = prompt(1, 20, seed=2)["input_ids"]
        want, got = (model(turn, **{CACHE: each}, logits_to_keep=1).logits for each in (fork, loaded))
    assert relative(got, want) < 1e-5


def test_a_text_that_goes_on_after_its_parts(model, tmp_path):
    """`read(file=)` of a longer text: what it adds to the file's slots is not copied for all layers at its end."""
    words = prompt(1, 60 + TURN)["input_ids"][0].tolist()
    kvevict.read(model, Words(), " ".join(map(str, words[:60])), file=tmp_path / "text", **OPTIONS)
    with Made() as made:
        cache = kvevict.read(model, Words(), " ".join(map(str, words)), file=tmp_path / "text", **OPTIONS)
    assert all(one.prefix.counts.max() == 60 and one.counts.max() == TURN for one in every(cache))
    added, layer = LAYERS * ROW * TURN, ROW * (60 + TURN)
    assert added < made.most < 1.2 * added + 2 * 1.2 * layer < 2 * added
