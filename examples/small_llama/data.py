"""Tokenizer, books and made-up facts as token sequences."""

import json
import lzma
import random
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvevict.lab.evaluate import haystack
from kvevict.lab.evaluate.tasks import recall

VOCABULARY = 5120
END = "<|end|>"
# Words with their leading space, up to three digits, runs of other signs, white space: never across a line's end.
PIECES = r"""[ ]?\p{L}+|\p{N}{1,3}|[ ]?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"""


def books(folder: Path):
    """Texts of the books in `*.jsonl.xz`, in a fixed order."""
    for path in sorted(folder.glob("*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]


def train_tokenizer(texts, path: Path) -> Tokenizer:
    """Byte-level BPE. All numbers of one to three digits are tokens, so a six-digit number is two."""
    numbers = [f"{n:0{digits}d}" for digits in (2, 3) for n in range(10**digits)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(numbers), special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((_without_digits(text) for text in texts), trainer)
    state = json.loads(tokenizer.to_str())
    for number in numbers:
        state["model"]["vocab"][number] = len(state["model"]["vocab"])
    state["model"]["ignore_merges"] = True  # a piece that is a token is never split: the numbers have no merges
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.save(str(path))
    return tokenizer


def _without_digits(text: str) -> str:
    return "".join(" " if c.isdigit() else c for c in text)


def sample(texts) -> list[str]:
    """Texts for the tokenizer's training: a piece of every book, and statements and questions."""
    rng = random.Random(0)
    said = [
        recall.statement(rng.choice(recall.RELATIONS), word, "") + recall.question(rng.choice(recall.RELATIONS), word)
        + recall.line(word, "") + recall.line_question(word)
        for word in (recall.name(rng) for _ in range(3000))
    ]  # fmt: skip
    return [text[len(text) // 3 :][:60_000] for text in texts] + [" ".join(said)]


def made_up(sentences: int) -> str:
    """Text of the default haystack."""
    return " ".join(islice(haystack.Haystack().sentences(random.Random(3)), sentences))


def encode(tokenizer, texts) -> np.ndarray:
    return np.array([i for e in tokenizer.encode_batch(list(texts)) for i in e.ids], dtype=np.int32)


def piece(book: str) -> str:
    """Up to 200,000 characters of a book, without its first tenth (title and preface)."""
    return " ".join(book[len(book) // 10 :][:200_000].split())


class Facts:
    """Pools of tokenized names, and statements and questions put together from tokenized parts."""

    def __init__(self, tokenizer: Tokenizer, rng, names: int = 60_000, held_out: bool = False):
        pool = set()
        while len(pool) < names:
            word = recall.name(rng)
            if recall.held_out(word) == held_out:
                pool.add(word)
        self.rng, self.pool = rng, rng.sample(sorted(pool), names)
        encode = lambda texts: [e.ids for e in tokenizer.encode_batch(texts)]  # noqa: E731
        self.inside = encode([" " + word for word in self.pool])  # after a space
        self.alone = encode(self.pool)
        self.one = lambda text: tokenizer.encode(text).ids
        self.relations = [self.one(" " + relation) for relation in recall.RELATIONS]
        self.plurals = [self.one(f" {relation}s") for relation in recall.RELATIONS]
        self.the, self.capital_the, self.of, self.is_ = map(self.one, (" the", " The", " of", " is"))
        self.ask_all, self.are, self.comma = map(self.one, ("\n\nQuestion: What are all", " are", ","))
        self.that_of, self.end = self.one(" that of"), self.one("\n\n")
        self.ask, self.answer, self.stop = map(self.one, ("\n\nQuestion: What is", "?\nAnswer: The", "."))
        self.ask_line, self.answer_line, self.colon, self.newline = map(
            self.one, ("\nQuestion: Which value has", "?\nAnswer: ", ":", "\n")
        )

    def numbers(self, count: int) -> list:
        """Different values, mostly of six digits, as tokens with the space before them."""
        digits = self.rng.choice((6, 6, 6, 3, 5, 7))
        return [self.one(f" {n}") for n in self.rng.sample(range(10 ** (digits - 1), 10**digits), count)]

    def draw(self, count: int) -> list:
        """`count` facts (name index, relation tokens, value tokens) with different names."""
        same = self.rng.choice(self.relations)
        mixed = self.rng.random() < 0.5
        names = self.rng.sample(range(len(self.pool)), count)
        return [
            (who, self.rng.choice(self.relations) if mixed else same, what)
            for who, what in zip(names, self.numbers(count))
        ]

    def statement(self, fact) -> list:
        who, relation, what = fact
        return [*self.capital_the, *relation, *self.of, *self.inside[who], *self.is_, *what, *self.stop]

    def question(self, fact) -> tuple[list, list]:
        who, relation, what = fact
        asked = [*relation, *self.of, *self.inside[who]]
        return [*self.ask, *self.the, *asked, *self.answer, *asked, *self.is_], what

    def question_all(self, facts) -> tuple[list, list]:
        """Facts about one name with one relation: all the values, in order."""
        who, relation, _ = facts[0]
        asked = [*self.plurals[self.relations.index(relation)], *self.of, *self.inside[who]]
        answer = [token for fact in facts for token in (*self.comma, *fact[2])][len(self.comma) :]
        return [*self.ask_all, *self.the, *asked, *self.answer, *asked, *self.are], [*answer, *self.stop]

    def chained(self, facts) -> list:
        """The facts with the first one's relation, all but the first with "that of" the name before as their value."""
        relation = facts[0][1]
        names = [who for who, _, _ in facts]
        values = [facts[0][2], *([*self.that_of, *self.inside[who]] for who in names)]
        return [(who, relation, what) for who, what in zip(names, values)]

    def question_chain(self, chain) -> tuple[list, list]:
        """The last name's value, through all that lie between: " that of Y. The code of Y is that of X. ... is 1"."""
        ask, answer = self.question(chain[-1])
        for fact in chain[-2::-1]:
            answer = [*answer, *self.stop, *self.statement(fact)[: -len(fact[2]) - len(self.stop)], *fact[2]]
        return ask, answer

    def line(self, fact) -> list:
        return [*self.alone[fact[0]], *self.colon, *fact[2], *self.newline]

    def line_question(self, fact, bare: bool) -> tuple[list, list]:
        who = fact[0]
        if bare:
            return [*self.alone[who], *self.colon], fact[2]
        return [*self.ask_line, *self.inside[who], *self.answer_line, *self.alone[who], *self.colon], fact[2]


def lines_sequence(facts: Facts, length: int, bare: float):
    """Key-value lines, then questions drawn with replacement; with probability `bare` only "name:" is asked.

    Ids and the mask of the answers, both `length` + 1 long.
    """
    rng = facts.rng
    drawn = facts.draw(rng.randint(2, length // 10))
    ids = [token for fact in drawn for token in facts.line(fact)]
    mask = [0] * len(ids)
    plain = rng.random() < bare
    while len(ids) <= length:
        ask, answer = facts.line_question(rng.choice(drawn), plain)
        ids += [*ask, *answer, *facts.newline]
        mask += [0] * len(ask) + [1] * (len(answer) + 1)
    return ids[: length + 1], mask[: length + 1]


def text_sequence(facts: Facts, text: np.ndarray, length: int, questions: int, several: float):
    """Facts hidden in text, then questions drawn with replacement; with probability `several` some facts belong
    together, values of one name or a chain of names, and the first question asks for all of them. Ids and the mask of
    the answers with the token that ends them, both `length` + 1 long."""
    rng = facts.rng
    drawn = facts.draw(rng.randint(1, min(length // 32, 32)))
    group = rng.randint(2, 4) if len(drawn) > 4 and rng.random() < several else 0
    asked = []
    if group and rng.random() < 0.5:
        drawn[:group] = [(*drawn[0][:2], what) for _, _, what in drawn[:group]]
        asked = [facts.question_all(drawn[:group])]
        order = sorted  # the answer lists the values in the text's order
    else:
        drawn[:group] = facts.chained(drawn[:group]) if group else []
        asked = [facts.question_chain(drawn[:group])] if group else []
        order = list
    asked += [facts.question(fact) for fact in rng.choices(drawn[group:], k=rng.randint(1, questions))]
    tail, mask = [], []
    for ask, answer in asked:
        if tail and len(tail) + len(ask) + len(answer) > length // 2:
            break
        tail += [*ask, *answer]
        mask += [int(bool(mask))] + [0] * (len(ask) - 1) + [1] * len(answer)
    tail, mask = [*tail, *facts.end], [*mask, *[1] * len(facts.end)]
    said = [facts.statement(fact) for fact in drawn]
    room = length + 1 - len(tail) - sum(map(len, said))
    start = rng.randrange(len(text) - room)
    places = [rng.randrange(room + 1) for _ in said]
    places[:group] = order(places[:group])
    ids, last = [], 0
    for place, words in sorted(zip(places, said), key=lambda pair: pair[0]):
        ids += [*text[start + last : start + place].tolist(), *words]
        last = place
    ids += [*text[start + last : start + room].tolist(), *tail]
    return ids, [0] * (len(ids) - len(mask)) + mask
