"""Writes the pages that the code already says: policies.md, options.md, commands.md, models.md; and serve.md's table.

    python docs/generate.py

tests/docs/test_pages.py compares them with this script's output.
"""

import argparse
import dataclasses
import inspect
import json
import re
import textwrap
from pathlib import Path

from kvevict.cli import COMMANDS
from kvevict.engine.measure import quantities
from kvevict.models import known
from kvevict.policy.building import build
from kvevict.policy.parts import PARTS
from kvevict.policy.policy import Policy
from kvevict.policy.presets import PRESETS, describe
from kvevict.policy.run import OPTIONS, Run
from kvevict.serve import fields

NOTE = "<!-- Made by docs/generate.py from the code; change that, then run it. -->\n"

KINDS = {
    "rows": ("Rows", "The queries that observe: scores are computed from their attention."),
    "score": ("Scores", "The value of each slot."),
    "refine": ("Refinements", "A change of the score before slots are ranked."),
    "layers": ("Layer budgets", "The split of the budget over layers."),
    "heads": ("Head budgets", "The split of a layer's slots over its heads."),
    "select": ("Selections", "The choice of slots by their scores."),
}


class Declared(Exception):
    """A command has declared its arguments."""


class Parser(argparse.ArgumentParser):
    """Stops a command where it would parse its arguments."""

    def parse_args(self, *args, **kwargs):
        raise Declared


def parser_of(name: str) -> argparse.ArgumentParser:
    """The arguments of a command."""
    parser = Parser(f"kvevict {name}", add_help=False)
    try:
        COMMANDS[name](parser, [])
    except Declared:
        return parser
    raise AssertionError(f"{name} does not parse its arguments")


# -- policies.md ------------------------------------------------------------------------------------------------------


def policies_page() -> str:
    text = f"""{NOTE}
# Policies

`kvevict.patch(model, NAME, budget=512)` takes each of these names. A policy is a combination of the choices in
[options.md](options.md); any option can be changed by keyword or in a text, `NAME:OPTION=VALUE,...`, and `kvevict
policies` lists each policy's. [methods.md](methods.md) defines the methods, [results.md](results.md) compares them.

**To choose:** For a known question: `take+edie`, the default of `patch` and of the commands, in chunks or in one pass.
For later questions: `take+edie` with `recall=True`, if all tokens can be stored; else `gate` for a model with gates,
`read-twice` or, at 1/4 of the slots and more, `read-once`. For none (the model continues a text): `paasvn`, read in one
pass. Compare with `kvevict eval --mode known` and `--mode later`.

- **question**: `known`: the prompt ends with it, and its tokens decide what is kept; `later`: it is asked after the
  text was read, so what is kept does not depend on it; `none`: the model continues the text.
- **evicts**: after the prompt, or after every chunk of so many tokens; some policies also while decoding.

| policy | question | method | evicts |
|---|---|---|---|
"""
    for name in PRESETS:
        policy = build(name, budget=0.5)
        asked = policy.question + ", none" * (name == "paasvn")  # it is the best for both
        text += f"| `{name}` | {asked} | {cell(describe(name))} | {when(policy)} |\n"
    return text


def when(policy) -> str:
    reading = "after the prompt" if policy.schedule == "prompt" else f"each {policy.chunk_size} tokens"
    if not policy.decode:
        return reading
    return f"{reading}, each " + ("decoded token" if policy.interval == 1 else f"{policy.interval} decoded tokens")


# -- options.md -------------------------------------------------------------------------------------------------------


RUN = """
## How a policy is run

These options are given like a policy's, but say how a machine runs it. A `kvevict.Policy` and its JSON do not hold
them: `kvevict.patch(model, policy, kv="int8", compiled=True)`.

| option | default | meaning |
|---|---|---|
"""


def options_page() -> str:
    text = f"""{NOTE}
# Options

Every option of a policy is a keyword, whichever part of the policy it belongs to: `kvevict.patch(model, "snapkv",
budget=512, window=16, heads="ada", f=0.1)`. On the command line: `--policy snapkv:window=16,heads=ada,f=0.1`. Options
that exclude each other are refused with the reason.

| option | default | meaning |
|---|---|---|
"""
    remarks, fields = explained(Policy)
    text += "".join(f"| `{f.name}` | {default(f)} | {cell(meaning)} |\n" for f, meaning in fields)
    text += RUN
    named = {field: option for option, field in OPTIONS.items()}
    for f, meaning in explained(Run)[1]:
        text += f"| `{named[f.name]}` | {default(f) if f.name != 'archive' else ''} | {cell(meaning)} |\n"
    for kind, (registry, _) in PARTS.items():
        title, about = KINDS[kind]
        text += f"\n## {title}: `{kind}=`\n\n{about}\n\n| `{kind}` | | options and their defaults |\n|---|---|---|\n"
        of: dict = {}  # (option, meaning): the parts that have it
        for name, part in registry.items():
            remarks, fields = explained(part)
            defaults = ", ".join(f"`{f.name}={f.default!r}`" for f, _ in fields)
            text += f"| `{name}` | {cell(' '.join(remarks))} | {defaults} |\n"
            for field, meaning in fields:
                of.setdefault((field.name, meaning), []).append(name)
        text += "\n| option | of | meaning |\n|---|---|---|\n" * bool(of)
        for (option, meaning), names in sorted(of.items()):
            text += f"| `{option}` | {quoted(names)} | {cell(meaning)} |\n"
    return text


def explained(cls) -> tuple:
    """A docstring's remarks, and (field, meaning) of the fields by the docstrings."""
    fields = [f for f in dataclasses.fields(cls) if f.init]
    remarks, meanings = parsed(inspect.getdoc(cls), [f.name for f in fields])
    for base in cls.__mro__[1:]:
        if dataclasses.is_dataclass(base) and base.__doc__:
            meanings = parsed(inspect.getdoc(base), [f.name for f in fields])[1] | meanings
    missing = [f.name for f in fields if f.name not in meanings and f.name not in SHARED]
    if missing:
        raise SystemExit(f"{cls.__module__}.{cls.__name__}: the docstring has no line for {', '.join(missing)}")
    return remarks, [(f, meanings.get(f.name) or SHARED[f.name]) for f in fields]


# Options of many parts, explained by their base class or here.
SHARED = {
    "pool": 'the largest of them ("max"), their mean ("avg"), or "none"',
    "reduce": 'over the observing rows: "sum", "mean" or "max"',
    "sink": "first slots that are always kept",
    "recent": "last slots that are always kept; None: half the budget",
    "seed": "of the hash",
    "per_head": "True: every kv head chooses for itself",
    "window": "number of last rows that observe",
}


def default(field) -> str:
    return f"`{field.default!r}`" if field.default is not dataclasses.MISSING else ""


def parsed(doc: str, names: list) -> tuple:
    """(paragraphs, {option: meaning}) of a docstring: a line that starts with names of options and two spaces is about
    those, and so are the indented lines that follow."""
    remarks, meanings, current = [[]], {}, ()
    for line in doc.splitlines():
        head = re.match(r"(\w+(?:, \w+)*) {2,}(\S.*)", line)
        if head and set(head[1].split(", ")) <= set(names):
            current = head[1].split(", ")
            meanings |= dict.fromkeys(current, head[2])
        elif current and line.startswith(" "):
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in current}
        else:
            current = ()
            remarks.append([]) if not line.strip() else remarks[-1].append(line)
    return ["\n".join(paragraph) for paragraph in remarks if paragraph], meanings


# -- commands.md ------------------------------------------------------------------------------------------------------


EXAMPLES = {
    "calibrate": "kvevict calibrate MODEL --prompts prompts.jsonl --agree 0.9",
    "bench": "kvevict bench --model MODEL --policies take+edie snapkv --budget 512 --lengths 4096",
    "convert": "kvevict convert --model Qwen/Qwen3-8B --source nvidia/KVzap-mlp-Qwen3-8B --out GATES",
    "demo": "kvevict demo --budget 64 --policies take+edie streaming",
    "diagnose": "kvevict diagnose --budget 64 --cases 8 --policies edie adakv",
    "eval": "kvevict eval --model MODEL --tasks facts many --policies take+edie read-twice --budgets 1/4 --out r.jsonl",
    "generate": "kvevict generate --model MODEL --file BOOK.txt --policy take+edie:recall=true --compare 'Who is she?'",
    "inspect": "kvevict inspect --model MODEL --file BOOK.txt --policy take+edie:recall=true 'Who is she?' 'And he?'",
    "models": "kvevict models gemma",
    "papers": "kvevict papers chunkkv --quick --only table2 table7 --out chunkkv-tables",
    "plan": "kvevict plan --model MODEL --policy take+edie:recall=true --tokens 100000 --memory 24GiB",
    "plot": "kvevict plot r.jsonl --tasks facts --out facts.png",
    "policies": "kvevict policies",
    "serve": "kvevict serve MODEL --budget 1024 --store TEXTS",
    "statistics": "kvevict statistics --model MODEL --data BOOK.txt --out STATS",
    "train": "kvevict train --kind gates --model MODEL --data BOOKS.txt --out GATES",
}
MORE = {
    "diagnose": """Of the full cache's response *recall* is the share of its attention to the prompt that lies on kept
slots, and *top 16* the share of its 16 most attended slots that are kept. *output error* is how far attention outputs
are from the full cache's, relative to these; *joint error* is CAOTE's eq. 24 ([methods.md](methods.md)).""",
    "plan": """Everything counts that is on the model's device at once: weights, slots with their positions, a chunk's
new keys and values and its activations, free room and copies of slots that move, and an archive; left out are what the
policy drafts, and what the driver takes. If the policy does not fit, settings that do are listed, the best answers
first: all slots, where nothing is lost; recall, where a question chooses from all tokens, with an archive of ever fewer
bits, on the device before elsewhere (`recall=memory`), where an answer attends to chosen slots alone and a recall takes
longer; then ever fewer slots. If it fits, those with better answers are listed. The largest batch that fits is named,
too.

With `--costs` a table has the unpatched model, the policy, and the policy as a share of it:

- *linear layers*, *attention*: matrix products of the prompt's tokens. *Appended rows*: both for rows that observe and
  are not stored, such as a probe. *Scoring*: the observing rows' products with keys (and with values, for errors of the
  output), and a refinement's. Moving slots and scoring while decoding are left out.
- *weights read*: from the device's memory, once a chunk. *KV read*: slots, once a chunk and layer.
- *peak KV*, *KV after*: bytes of slots at most, and after the prompt; *KV at the end*, after the answer.
- *activations*: the widest chunk's, in one layer. *Peak memory*: weights, slots and these.
- *archive*: of a policy with recall, all tokens' slots, the answer's too, beside the peak memory.
- *first token*: each chunk's products or its reading of memory, the slower one, at `--efficiency` of the peak.
- *per new token*, *tokens/s*: of a decoded token; where slots accumulate, the first and the last one differ.
  *Moved per new token*: weights and slots that are read for it from the device's memory.""",
}
COMMON = "model", "dtype", "device", "kv"  # options that are told once


def commands_page() -> str:
    text = f"""{NOTE}
# Commands

A command is `kvevict COMMAND` or `python -m kvevict COMMAND`. Each prints a table; where standard output is not a
terminal one line of JSON follows, and with `--json` nothing else is printed. Arguments, files and folders are checked
before a model is loaded. Policies are written `NAME` or `NAME:OPTION=VALUE,...`, for instance
`take:ema_alpha=0.32,probe=64`: names are in [policies.md](policies.md), options in [options.md](options.md). Exit code
2 means a mistake in the arguments, 130 that Ctrl-C stopped the command.

Many commands have these:

| argument | |
|---|---|
{"".join(row(action) for action in parser_of("generate")._actions if action.dest in COMMON)}"""
    for name in sorted(COMMANDS):
        parser = parser_of(name)
        actions = parser._actions
        text += f"\n## `kvevict {name}`\n\n{inspect.getdoc(COMMANDS[name])} For instance: `{EXAMPLES[name]}`\n"
        common = [f"`{action.option_strings[-1]}`" for action in actions if common_one(action)]
        groups = {action: group.title for group in parser._action_groups[2:] for action in group._group_actions}
        own: dict = {}  # title of the command's own group, or None: rows
        for action in actions:
            if not common_one(action):
                own.setdefault(groups.get(action), []).append(row(action))
        if own:
            text += "\n| argument | |\n|---|---|\n"
        for title, rows in own.items():
            text += f"| **{title}:** | |\n" * bool(title) + "".join(rows)
        if common:
            text += f"\nAlso {', '.join(common)}.\n"
        if name in MORE:
            text += f"\n{MORE[name]}\n"
    return text


def common_one(action) -> bool:
    return action.dest in COMMON and bool(action.option_strings)


def row(action) -> str:
    """An argument's row of a table."""
    needed = action.required and (bool(action.option_strings) or action.nargs in (None, "+"))
    return f"| `{cell(written(action))}` | {'**required**; ' if needed else ''}{cell(action.help or '')} |\n"


def written(action) -> str:
    """An argument as one writes it."""
    if not action.option_strings:
        return (action.metavar or action.dest.upper()) + (" ..." if action.nargs == "+" else "")
    if action.nargs == 0:
        return action.option_strings[-1]
    choice = "|".join(map(str, action.choices)) if action.choices else None
    value = choice or action.metavar or action.dest.upper()
    return f"{', '.join(action.option_strings)} {value}{' ...' if action.nargs in ('+', '*') else ''}"


def cell(text: str) -> str:
    """Text as one cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


# -- models.md --------------------------------------------------------------------------------------------------------

REASONS = {  # a word of the reason: what it means
    "no text decoder": "no text decoder of layers: encoders, and models of another kind",
    "attention interface": "attention is not computed by Transformers' attention interface",
    "cannot be evicted from": "a cache of its own kind",
    "uses cache of its own": "a cache of its own kind",
    "caches for": "a cache of its own kind",
    "changed keys or values": "attention changes keys or values after they were stored",
    "no layer has full attention": "no layer has full attention: nothing grows with the prompt",
    "in two calls differs": "a prompt in two calls gives another output than in one, unpatched too",
    "ALiBi": "ALiBi: attention depends on the distance between slots",
    "encoder-decoder": "an encoder-decoder",
    "bidirectional": "attention is bidirectional",
    "pictures": "layers that attend to pictures",
}


SERVED = Path(__file__).parents[1] / "tests/serve/types.tsv"
VERDICTS, SINCE = (known.EQUAL, known.LIMITED, known.REFUSED, known.UNTRIED), "5.23"


def models_page() -> str:
    """Types by what they do under kvevict; `kvevict models NAME` prints the error of one."""
    some = {verdict: [each for each in known.table() if each.verdict == verdict] for verdict in VERDICTS}
    counts = {verdict: len(types) for verdict, types in some.items()}
    return f"""{NOTE}
# Model types

The models that can be patched. `kvevict models NAME` prints the same of one type, with the error of a refused one. A
type that is not listed, remote code, and a type under an older Transformers than here are compared with the unpatched
model on a few tokens when they are patched, and refused if they differ.

`tests/hf/test_types.py` makes a tiny random model of every type in Transformers from its config alone. It runs each in
chunks, with appended rows, left padding and beams, at tight budgets and under several policies, and compares it with
the unpatched model. Outputs are equal with Transformers {SINCE} and newer, or since the version after the type.

## Equal to the unpatched model with every policy: {counts[known.EQUAL]}

{filled(labels(some[known.EQUAL]))}

## Equal, but some policies need an option or are refused: {counts[known.LIMITED]}

{limits(some[known.LIMITED])}

## Refused: {counts[known.REFUSED]}

{refusals(some[known.REFUSED])}

## Not compared: {counts[known.UNTRIED]}

{filled(f"No tiny model that reads text alone can be made of them: {labels(some[known.UNTRIED])}")}

## Served

`tests/serve/test_serve_types.py` asks a server of a tiny model of each type that has a state, a sliding window, latents
or layers that share keys and values: one request, two at once, `n=2`, a beginning again, a stored text, later turns, a
cancelled request. Each token's logits are the unpatched model's, and with few slots or slots of 8 bits those of the
request alone. Answers of types with a state or a window are written one beside the other, without a common step.

{served()}
"""


def served() -> str:
    """The types of tests/serve/types.tsv by what they hold, and what is refused of them, with the reason."""
    head, *types = (line.split("\t") for line in SERVED.read_text(encoding="utf-8").splitlines())
    groups: dict = {}
    for name, holds, *cells in types:
        refused = [f"{case} refused: {cell}" for case, cell in zip(head[2:], cells, strict=True) if cell != "="]
        reason = re.sub(r"\w+Model", "the model", "; ".join(refused))
        groups.setdefault(f"**{holds}**{f' ({reason})' * bool(reason)}", []).append(name)
    return "\n".join(filled(f"- {held}: {quoted(names)}") for held, names in groups.items())


def labels(types) -> str:
    return ", ".join(f"`{each.label}`" + (f" {each.since}" if each.since not in ("", SINCE) else "") for each in types)


def filled(text: str) -> str:
    """A paragraph, or an item of a list, in lines of 120 columns."""
    indent = "  " * text.startswith("- ")
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def limits(types) -> str:
    """The policies that a type's limits concern, and the types."""
    policies = {name: build(name, budget=0.5) for name in PRESETS}
    probes = [name for name, policy in policies.items() if policy.rows.rotates]
    keys = [name for name, policy in policies.items() if quantities.rotates(policy, False)]
    residual = [name for name, policy in policies.items() if policy.layers.residual == "attention"]
    told = {
        "no rotation": f"{quoted(probes)} need `ema_alpha=0.0`, and {quoted(keys)} are refused",
        "residual stream": f'{quoted(residual)} needs `cd="layer"` or `cd="off"`',
        "output embeddings": "policies that draft tokens need the causal language model, not its decoder",
    }
    groups = {meaning: [each for each in types if word in each.note] for word, meaning in told.items()}
    assert {each for group in groups.values() for each in group} == set(types)
    return grouped(groups)


def quoted(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def refusals(types) -> str:
    """Types by the meaning of their reasons."""
    groups: dict = {}
    for each in types:
        meaning = next(meaning for word, meaning in REASONS.items() if word in each.note)
        groups.setdefault(meaning, []).append(each)
    return grouped(groups)


def grouped(groups) -> str:
    return "\n".join(filled(f"- **{meaning}:** {labels(types)}") for meaning, types in groups.items())


# -- serve.md ---------------------------------------------------------------------------------------------------------

START, END = "<!-- fields, made by docs/generate.py from kvevict/serve/fields.py -->\n", "<!-- end -->\n"


def serve_page() -> str:
    """The page as it is, with the table of fields anew."""
    before, _, rest = (Path(__file__).parent / "serve.md").read_text(encoding="utf-8").partition(START)
    return f"{before}{START}{fields_table()}{END}{rest.partition(END)[2]}"


def fields_table() -> str:
    """The obeyed fields of OpenAI's endpoints as a table, and the names of the others."""
    short = {fields.CHAT: "chat", fields.COMPLETIONS: "completions"}
    found: dict = {}
    for path, column in short.items():
        for name, field in fields.TABLE[path].items():
            found.setdefault((field.kind, name, field.about, json.dumps(field.usual)), []).append(column)
    rows: dict = {}
    others: dict = {fields.HARMLESS: {}, fields.REFUSED: {}}
    for (kind, name, about, usual), paths in found.items():
        if kind == fields.OBEYED:
            at = "all" if len(paths) == len(short) else ", ".join(paths)
            rows.setdefault(about, {}).setdefault(f"`{name}`", at)
        else:
            values = ", ".join(f"`{json.dumps(value)}`" for value in json.loads(usual))
            others[kind][f"`{name}`" + (f" ({values})" if values else "")] = None
    text = "| field | endpoints | |\n|---|---|---|\n"
    for about, names in rows.items():
        text += f"| {', '.join(names)} | {'; '.join(dict.fromkeys(names.values()))} | {cell(about)} |\n"
    taken = f"Taken, and without effect on an answer: {', '.join(others[fields.HARMLESS])}."
    refused = f"Refused, but for values that ask for nothing: {', '.join(others[fields.REFUSED])}."
    return text + "".join(f"\n{textwrap.fill(each, 120, break_on_hyphens=False)}\n" for each in (taken, refused))


PAGES = {
    "policies.md": policies_page,
    "options.md": options_page,
    "commands.md": commands_page,
    "models.md": models_page,
    "serve.md": serve_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")
