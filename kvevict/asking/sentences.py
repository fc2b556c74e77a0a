"""Finds the sentences of a text that ask, by their marks and words."""

import re

NEAR = 1024  # characters at either end of a user's turn in which its question is looked for
LINK = 4  # words, at most, between two questions that are asked together
PARAGRAPH = "\n\n"
OPENING = re.compile(r"\n\s*\S+(?: \S+)?\s*:$")  # a last line such as "Answer:", which the answer continues
GREEK = r"[\u0386-\u03ff\u1f00-\u1fff]{2}"
THAI = r"อะไร|ใคร|ไหน|ใด(?!\s?ๆ)|เมื่อไ|เท่าไ|กี่|อย่างไร|ทำไม|หรือไม่"  # question words; Thai has no question mark
# A sentence asks if it ends with a question mark (a Greek one with a semicolon), or if it is a short Thai line with a
# question word.
ASKS = re.compile(rf"[?\uff1f\u061f\u037e]$|{GREEK}.*;$|^(?=.{{1,200}}$).*(?:{THAI})")
# The gap between two sentences: a line's end, or white space after a sentence's last mark (not an abbreviation's, an
# initial's but "I", or a number's before a small letter), or after a colon that four words follow, the first with a
# capital letter.
BETWEEN = re.compile(
    r"\n|(?<=:)\s+(?=[A-Z](?:\S*\s+){3})"
    r"|(?<=[.!?\u061f\u0964\u06d4\u037e])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[^\W\d_I]\.)"
    r"\s+(?!(?<=[\dA-Z]\.\s)[a-z\u00df-\u00ff])"
    rf"|(?<=[\u3002\uff01\uff1f])|(?<={GREEK};)\s+|(?<=;)\s+(?={GREEK})"
)


def question_of(turn: str) -> str:
    """Find the question of a user's turn; "" if there is none. In a long turn, whole paragraphs near the end and then
    near the start are looked at first. If none of them asks, and the turn's start is a single paragraph, the last
    paragraph is the question: question marks before it are the text's."""
    turn = OPENING.sub("", turn.strip())
    if len(turn) <= NEAR:
        return (questions(turn) or [turn])[-1]
    first, last = turn[:NEAR], turn[-NEAR:]
    for found in (questions(last.partition(PARAGRAPH)[2])[-1:], questions(first.rpartition(PARAGRAPH)[0])[:1]):
        if found:
            return found[0]
    if PARAGRAPH in last:
        return "" if PARAGRAPH in first else last.rpartition(PARAGRAPH)[2]
    for found in (questions(last)[-1:], questions(first)[:1]):
        if found:
            return found[0]
    return ""


def question_before(turn: str) -> str:
    """Find the first question in whole paragraphs near a long turn's start; "" if there is none."""
    found = questions(turn.strip()[:NEAR].rpartition(PARAGRAPH)[0]) if len(turn.strip()) > NEAR else []
    return found[0] if found else ""


def same(asked: str, opens: str) -> bool:
    """Whether one question has all of the other's words in order."""
    a, b = (" ".join(text.split()).casefold() for text in (asked, opens))
    return a in b or b in a


def questions(text: str) -> list:
    """List the sentences of a text that ask. Questions at most LINK words apart are joined. A question mark before a
    closing quotation mark does not count."""
    found, between = [], None  # sentences since the last question
    for sentence in filter(None, map(str.strip, BETWEEN.split(text))):
        asks = bool(ASKS.search(sentence))
        if asks and between is not None and len(" ".join(between).split()) <= LINK:
            found[-1] = " ".join([found[-1], *between, sentence])
        elif asks:
            found.append(sentence)
        if asks:
            between = []
        elif between is not None:
            between.append(sentence)
    return found
