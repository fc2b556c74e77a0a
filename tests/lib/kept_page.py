"""What the page of `kvevict inspect` holds, as its script reads it."""

import json
from html.parser import HTMLParser


def opened(positions):
    """The positions that the page's script makes from `gaps`."""
    at, out = 0, []
    for gap, length in zip(positions[::2], positions[1::2]):
        out += range(at + gap, at + gap + length)
        at += gap + length
    return out


class Scripts(HTMLParser):
    """The contents of the page's <script> elements, and every address that it names."""

    def __init__(self, html):
        super().__init__()
        self.scripts, self.inside, self.addresses = [], False, []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.inside = tag == "script"
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def data_of(html):
    return json.loads(Scripts(html).scripts[0])
