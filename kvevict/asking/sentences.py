"""Finds the sentences of a text that ask a question, by their punctuation and question words."""

import re

NEAR = 1024  # number of characters at either end of a long user's turn that are searched for the question
LINK = 4  # most words between two questions that count as one
PARAGRAPH = "\n\n"
OPENING = re.compile(r"\n\s*\S+(?: \S+)?\s*:$")  # a last line such as "Answer:", which the answer continues
GREEK = r"[\u0386-\u03ff\u1f00-\u1fff]{2}"
THAI = r"อะไร|ใคร|ไหน|ใด(?!\s?ๆ)|เมื่อไ|เท่าไ|กี่|อย่างไร|ทำไม|หรือไม่"  # question words; Thai has no question mark
# A sentence asks if it ends with a question mark (in Greek: a semicolon), or if it has a Thai question word and at most
# 200 characters.
ASKS = re.compile(rf"[?\uff1f\u061f\u037e]$|{GREEK}.*;$|^(?=.{{1,200}}$).*(?:{THAI})")
# Matches the gap between two sentences: a line break; white space after a sentence's last punctuation mark, but not
# after "Mr.", "Dr." and the like, after an initial other than "I.", or after "1." or "A." before a small letter; white
# space after a colon that four words follow, the first with a capital letter. Chinese and Japanese marks need no white
# space.
BETWEEN = re.compile(
    r"\n|(?<=:)\s+(?=[A-Z](?:\S*\s+){3})"
    r"|(?<=[.!?\u061f\u0964\u06d4\u037e])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[^\W\d_I]\.)"
    r"\s+(?!(?<=[\dA-Z]\.\s)[a-z\u00df-\u00ff])"
    rf"|(?<=[\u3002\uff01\uff1f])|(?<={GREEK};)\s+|(?<=;)\s+(?={GREEK})"
)


def question_of(turn: str) -> str:
    """Find the question of a user's turn; "" if there is none. A long turn is searched near its end, then near its
    start, in whole paragraphs first. If no whole paragraph asks, and the turn's start is a single paragraph, the last
    paragraph is the question: question marks before it belong to the text."""
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
    """Find the first question in the whole paragraphs near a long turn's start; "" if there is none."""
    found = questions(turn.strip()[:NEAR].rpartition(PARAGRAPH)[0]) if len(turn.strip()) > NEAR else []
    return found[0] if found else ""


def same(asked: str, opens: str) -> bool:
    """Return whether one of two questions contains the other, white space and capitals aside."""
    a, b = (" ".join(text.split()).casefold() for text in (asked, opens))
    return a in b or b in a


def questions(text: str) -> list:
    """List the sentences of a text that ask. Questions with at most `LINK` words between them are joined into one. A
    question mark before a closing quotation mark does not count."""
    found, between = [], None  # between: sentences since the last question; None before the first
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
