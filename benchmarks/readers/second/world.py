"""A second synthetic world, written independently of the first: registers, tables and code, cut by a splitter.

A document is a register of vessels, stations, modules or herbs: sections of prose, headings, lists, tables and code,
with idle sentences between them. A splitter cuts it into chunks, with or without overlap, wherever a chunk is full; a
context is a stretch of chunks of each of several documents. So the name that a statement is about stands first in its
chunk, in the middle, in a heading, in a table's head, or chunks before it.

Every statement is a fact (entity, attribute, value). A document states each fact once. Facts whose name is outside the
stretch are never asked about. Entities are pairs of words ("Corvane" + "Ridge"), and so are near-duplicates of them. A
fifth of all pairs and of all numbers is reserved for the split "test" and never occurs in "train".
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvrag.errors import KvragError

SPLITS = ("train", "test")
PLACES = ("first", "middle", "heading", "list", "table", "matrix", "code", "back")
"""Place of a fact's name: in the chunk of the fact, or in one before it (`back`)."""
KINDS = (*PLACES, "inverse", "inverse back", "two-hop", "unanswerable", "not retrieved")
"""Kinds of question: the place of a direct question's fact, or what else is asked.

The last two have no answer: nothing states it, or a chunk of the document that is not in the context does.
"""
NOT_STATED = "not stated"
"""Answer to what the context does not state."""

_ONSETS = ("Cor", "Dell", "Hart", "Min", "Osk", "Pell", "Rav", "Sel", "Tarn", "Umb", "Vel", "Wex", "Bran", "Ghal",
           "Lor", "Nim")  # fmt: skip
_CODAS = ("vane", "mar", "lund", "wick", "ora", "eth", "ison", "by", "dune", "grave", "ley", "mond", "ric", "shaw",
          "ton", "zell")  # fmt: skip
LEFT = tuple(onset + coda for onset in _ONSETS for coda in _CODAS)
PEOPLE = tuple(a + b for a in ("A", "Be", "Ca", "Do", "Fi", "Gre", "Ju", "Ka") for b in ("nna", "dric", "sten", "vio",
               "rell", "thas", "mira", "lek"))  # fmt: skip
GOODS = ("salt", "tin", "hemp", "wool", "cork", "rice", "coal", "amber", "sugar", "paper", "glass", "timber", "honey",
         "barley", "copper", "cotton", "marble", "pepper", "resin", "silk", "slate", "tar", "wax", "zinc")  # fmt: skip
PLACES_OF_GROWTH = ("bog", "cliff", "dune", "meadow", "forest", "quarry", "marsh", "hedge", "canal", "heath", "orchard",
                    "ravine", "pasture", "shore", "swamp", "valley")  # fmt: skip
COLOURS = ("white", "black", "green", "ochre", "violet", "crimson", "silver", "ivory", "purple", "orange", "brown",
           "pink", "golden", "turquoise", "scarlet", "olive")  # fmt: skip
TONGUES = ("Basic", "Cobol", "Fortran", "Haskell", "Pascal", "Perl", "Prolog", "Python", "Ruby", "Rust", "Scala",
           "Scheme", "Swift", "Julia", "Erlang", "Lua")  # fmt: skip
TOOLS = ("barometer", "beacon", "bell", "camera", "compass", "lamp", "radar", "sextant", "siren", "telescope", "mast",
         "antenna", "gauge", "seismograph", "crane", "winch")  # fmt: skip

VALUES: dict[str, tuple[str, ...]] = {
    "person": PEOPLE, "goods": GOODS, "growth": PLACES_OF_GROWTH, "colour": COLOURS, "tongue": TONGUES, "tool": TOOLS,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of entity: second words of names, attributes with the type of their values, the attribute that links."""

    plural: str
    right: tuple[str, ...]
    attributes: dict[str, str]
    link: str


_KINDS = (
    Kind("vessels", ("Star", "Wave", "Heron", "Lass", "Gull", "Pearl", "Swan", "Comet", "Spray",
                     "Rover", "Queen", "Tide"),
         {"master": "person", "cargo": "goods", "hull": "colour", "berth": "number", "tonnage": "number",
          "figurehead": "tool", "tender": "entity"}, "tender"),
    Kind("stations", ("Ridge", "Gate", "Point", "Moor", "Peak", "Cape", "Hill", "Island", "Bay",
                     "Field", "Rock", "Tower"),
         {"keeper": "person", "fuel": "goods", "roof": "colour", "altitude": "number", "device": "tool",
          "postcode": "number", "relay": "entity"}, "relay"),
    Kind("modules", ("Kit", "Core", "Hub", "Stack", "Shell", "Box", "Link", "Forge", "Mill", "Vault", "Lens", "Pipe"),
         {"author": "person", "language": "tongue", "theme": "colour", "timeout": "number", "port": "number",
          "codename": "goods", "fallback": "entity"}, "fallback"),
    Kind("herbs", ("Moss", "Fern", "Thistle", "Lily", "Sage", "Reed", "Clover", "Nettle", "Mint",
                     "Poppy", "Sorrel", "Yarrow"),
         {"finder": "person", "habitat": "growth", "blossom": "colour", "height": "number", "dose": "number",
          "dye": "goods", "rival": "entity"}, "rival"),
)  # fmt: skip

_NAMED = (
    "{e} lists {v} as its {a}.",
    "The {a} of {e} is {v}.",
    "As {a}, {e} has {v}.",
    "In the register, {v} is the {a} of {e}.",
)
_PRONOUN = ("It lists {v} as its {a}.", "Its {a} is {v}.", "As {a}, it has {v}.", "There, {v} is its {a}.")
_DIRECT = ("What is the {a} of {e}?", "Which {a} does {e} have?", "{a} of {e}?")
_INVERSE = ("What has {v} as its {a}?", "Whose {a} is {v}?")
_TWO_HOP = ("What is the {a} of the {l} of {e}?", "Which {a} does the {l} of {e} have?")
_IDLE = (
    ("Visitors", "Old letters", "The neighbours", "Two surveys", "Later editions", "Some readers", "The clerks",
     "Experts", "Most guides", "A few notes"),
    ("rarely mention", "often praise", "describe at length", "seldom agree on", "no longer doubt", "never questioned",
     "quietly ignore", "repeat"),
    ("the long winter", "this entry", "the weather there", "the early years", "such details", "the usual delays",
     "the new rules", "what came before", "the view", "the costs"),
)  # fmt: skip
_TITLES = ("Register of {k}", "Notes on {k}", "Handbook of {k}", "All {k} in brief")

_TRIES = 100_000
_TOKEN = re.compile(r"\d|[^\W\d]+|[^\w\s]+|\n+")


def count(text: str) -> int:
    """Return about how many tokens the reader's tokenizer makes of a text."""
    return len(_TOKEN.findall(text))


@dataclass(frozen=True)
class Fact:
    """A stated value, and where: indices of the document's units that hold it and the names it hangs on."""

    entity: str
    attribute: str
    value: str
    style: str  # "named", "pronoun" or a member of `PLACES`
    unit: int
    anchor: int  # the earliest unit needed; the names between it and `unit` are about the same entities

    @property
    def key(self) -> tuple[str, str]:
        """The pair that has one value in a context."""
        return self.entity, self.attribute


@dataclass(frozen=True)
class Question:
    """A question with its only correct answer; `support`: passages that answer it, all of them needed."""

    text: str
    answer: str
    kind: str
    support: tuple[int, ...]

    @property
    def across(self) -> bool:
        """True if it depends on more than one passage."""
        return len(self.support) > 1


@dataclass(frozen=True)
class Sample:
    """Passages in reading order, the title of each one's document, and all questions with the answers.

    A document's passages follow each other in the document too. `library` has all chunks of every document.
    """

    passages: tuple[str, ...]
    documents: tuple[str, ...]
    questions: tuple[Question, ...]
    library: dict[str, tuple[str, ...]]


_FORMS = {"prose": 5, "headed": 3, "listed": 2, "code": 2, "table": 2, "matrix": 1.5}


@dataclass(frozen=True)
class Scale:
    """Sizes of a context, and how hard it is to read.

    Attributes:
        context, chunk: Tokens, as of `count`.
        chunks: Chunks of a document.
        documents: Documents of a context.
        near: Share of entities that nearly duplicate another's name.
        idle: Share of sentences with an idle one after them.
    """

    context: tuple[int, int] = (2000, 6000)
    chunk: tuple[int, int] = (64, 256)
    chunks: tuple[int, int] = (10, 40)
    documents: tuple[int, int] = (2, 5)
    near: float = 0.4
    idle: float = 0.5


FULL = Scale()


def reserved(*parts: str) -> bool:
    """Return True for the fifth of all pairs that only the split "test" uses."""
    return blake2b(" ".join(parts).encode(), digest_size=2).digest()[0] % 5 == 0


class _Names:
    """Draws entities and values of one split; no two entities of a sample are the same.

    Args:
        taken: Entities of other samples: no entity is the same as one of them.
    """

    def __init__(self, rng: random.Random, split: str, near: float, taken: list[str]) -> None:
        self.rng, self.test, self.near = rng, split == "test", near
        self.taken = taken

    def entity(self, kind: Kind) -> str:
        for _ in range(_TRIES):
            left, right = self.rng.choice(LEFT), self.rng.choice(kind.right)
            if self.taken and self.rng.random() < self.near:
                left = self.rng.choice(self.taken).split()[0]
            name = f"{left} {right}"
            if name not in self.taken and reserved(left, right) == self.test:
                self.taken.append(name)
                return name
        raise KvragError(f"no name of {kind.plural} is left that the other contexts do not use: draw fewer contexts")

    def value(self, type_: str) -> str:
        if type_ != "number":
            return self.rng.choice(VALUES[type_])
        while True:
            number = str(self.rng.randint(100, 999))
            if reserved(number) == self.test:
                return number


class _Document:
    """Text in units (sentences, rows, lines), each with the separator before it, and the facts they state."""

    def __init__(self, rng: random.Random, names: _Names, scale: Scale, kind: Kind, tokens: int) -> None:
        self.rng, self.names, self.scale, self.kind = rng, names, scale, kind
        self.units: list[str] = []
        self.facts: list[Fact] = []
        self.naming: set[int] = set()  # units that name an entity, so that "it" and rows change their meaning
        self.size = 0
        self.title = rng.choice(_TITLES).format(k=kind.plural)
        self.entities = [names.entity(kind) for _ in range(2)]
        self.add(f"# {self.title}", "")
        while self.size < tokens:
            self.section()

    def add(self, text: str, before: str = " ", naming: bool = False) -> int:
        self.size += count(before + text)
        self.units.append(before + text)
        if naming:
            self.naming.add(len(self.units) - 1)
        return len(self.units) - 1

    def idle(self) -> str:
        return " ".join(self.rng.choice(parts) for parts in _IDLE) + "."

    def pause(self, before: str = " ") -> bool:
        """Maybe add an idle sentence."""
        if self.rng.random() >= self.scale.idle:
            return False
        self.add(self.idle(), before)
        return True

    def next_entity(self) -> str:
        """Return an entity without a section; one more is always known, to be linked to before it appears."""
        self.entities.append(self.names.entity(self.kind))
        return self.entities[-2]

    def value(self, entity: str, attribute: str) -> str:
        if (type_ := self.kind.attributes[attribute]) != "entity":
            return self.names.value(type_)
        return self.rng.choice([other for other in self.entities[1:] if other != entity])

    def attributes(self, low: int, high: int) -> list[str]:
        return self.rng.sample(list(self.kind.attributes), self.rng.randint(low, high))

    def subject(self, low: int, high: int) -> tuple[str, list[str]]:
        """Return an entity and attributes to state of it; sometimes the rest of an entity that had a section before."""
        if self.facts and self.rng.random() < 0.15:
            entity = self.rng.choice(self.facts).entity
            stated = {fact.attribute for fact in self.facts if fact.entity == entity}
            if len(stated) + low <= len(self.kind.attributes):
                rest = [attribute for attribute in self.kind.attributes if attribute not in stated]
                return entity, self.rng.sample(rest, min(len(rest), self.rng.randint(low, high)))
        return self.next_entity(), self.attributes(low, high)

    def state(self, entity: str, attribute: str, style: str, unit: int, anchor: int, value: str) -> None:
        self.facts.append(Fact(entity, attribute, value, style, unit, anchor))

    def section(self) -> None:
        getattr(self, self.rng.choices(list(_FORMS), list(_FORMS.values()))[0])()

    def prose(self) -> None:
        """A paragraph that names its entity once, after idle sentences or at once, then says "it"."""
        (entity, attributes), anchor = self.subject(3, 6), -1
        long_winded = self.rng.random() < self.scale.idle / 2
        opened = self.pause("\n\n")
        for number, attribute in enumerate(attributes):
            value = self.value(entity, attribute)
            form = self.rng.choice(_NAMED if anchor < 0 else _PRONOUN)
            text = form.format(e=entity, v=value, a=attribute)
            unit = self.add(text, " " if opened or number else "\n\n", naming=anchor < 0)
            self.state(entity, attribute, "pronoun" if number else "named", unit, unit if anchor < 0 else anchor, value)
            anchor = unit if anchor < 0 else anchor
            for _ in range(self.rng.randint(2, 6) if long_winded else 1):
                self.pause()

    def headed(self) -> None:
        entity, attributes = self.subject(3, 6)
        anchor = self.add(f"## {entity}", "\n\n", naming=True)
        started = self.pause("\n\n")
        for attribute in attributes:
            value = self.value(entity, attribute)
            text = self.rng.choice(_PRONOUN).format(v=value, a=attribute)
            unit = self.add(text, " " if started else "\n\n")
            started = True
            self.state(entity, attribute, "heading", unit, anchor, value)
            self.pause()

    def listed(self) -> None:
        entity, attributes = self.subject(3, 7)
        anchor = self.add(self.rng.choice((f"Entries for {entity}:", f"{entity}:")), "\n\n", naming=True)
        for attribute in attributes:
            value = self.value(entity, attribute)
            unit = self.add(f"- {attribute}: {value}", "\n")
            self.state(entity, attribute, "list", unit, anchor, value)

    def code(self) -> None:
        entity, attributes = self.subject(3, 6)
        anchor = self.add(f"```\nopen( {entity} )", "\n\n", naming=True)
        for attribute in attributes:
            value = self.value(entity, attribute)
            unit = self.add(f"set {attribute} = {value};", "\n")
            self.state(entity, attribute, "code", unit, anchor, value)
        self.add("```", "\n")

    def table(self) -> None:
        """A row for each entity; the attributes are in the head."""
        attributes = self.attributes(2, 4)
        anchor = self.add(_row("name", *attributes), "\n\n", naming=True)
        self.add(_row(*["---"] * (len(attributes) + 1)), "\n")
        for _ in range(self.rng.randint(2, 5)):
            entity = self.next_entity()
            values = [self.value(entity, attribute) for attribute in attributes]
            unit = self.add(_row(entity, *values), "\n")
            for attribute, value in zip(attributes, values, strict=True):
                self.state(entity, attribute, "table", unit, anchor, value)

    def matrix(self) -> None:
        """A row for each attribute; the entities are in the head."""
        entities = [self.next_entity() for _ in range(self.rng.randint(2, 3))]
        anchor = self.add(_row("entry", *entities), "\n\n", naming=True)
        self.add(_row(*["---"] * (len(entities) + 1)), "\n")
        for attribute in self.attributes(3, 5):
            values = [self.value(entity, attribute) for entity in entities]
            unit = self.add(_row(attribute, *values), "\n")
            for entity, value in zip(entities, values, strict=True):
                self.state(entity, attribute, "matrix", unit, anchor, value)

    def split(self, size: int, overlap: int, by_section: bool = False) -> list[range]:
        """Cut the units into chunks of about `size` tokens; `by_section`: at a blank line where half of it is filled.

        A chunk repeats up to `overlap` tokens of the one before it, but nothing before the last name: after another
        name, "it" would mean something else.
        """
        chunks: list[range] = []
        start = stop = 0
        while stop < len(self.units):
            filled = sum(count(unit) for unit in self.units[start:stop])
            first = stop
            while stop < len(self.units) and (stop == first or filled + count(self.units[stop]) <= size):
                if by_section and stop > first and filled > size // 2 and self.units[stop].startswith("\n\n"):
                    break
                filled += count(self.units[stop])
                stop += 1
            chunks.append(range(start, stop))
            start, repeated = stop, 0
            while start - 1 > chunks[-1].start and repeated + count(self.units[start - 1]) <= overlap:
                start -= 1
                repeated += count(self.units[start])
                if start in self.naming:
                    break
        return chunks

    def text(self, chunk: range) -> str:
        return "".join(self.units[chunk.start : chunk.stop]).strip()


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def sample(rng: random.Random, split: str, scale: Scale = FULL, names: list[str] | None = None) -> Sample:
    """Draw one context and its questions.

    Args:
        names: Entities that other contexts use: this one uses none of them, and adds its own.
    """
    drawer = _Names(rng, split, scale.near, [] if names is None else names)
    budget = rng.randint(*scale.context)
    num_documents = rng.randint(*scale.documents)
    passages: list[str] = []
    titles: list[str] = []
    library: dict[str, tuple[str, ...]] = {}
    shown: list[tuple[_Document, list[range], int]] = []  # with the number of the first passage
    kinds = rng.sample(_KINDS, len(_KINDS))
    for number in range(num_documents):
        size = rng.randint(*scale.chunk)
        tokens = size * rng.randint(*scale.chunks)
        document = _Document(rng, drawer, scale, kinds[number % len(kinds)], tokens)
        chunks = document.split(size, rng.choice((0, 0, size // 8, size // 4)), rng.random() < 0.5)
        wanted = max(1, (budget - sum(map(count, passages))) // (num_documents - number) // size)
        first = rng.randint(0, max(0, len(chunks) - wanted))
        window = chunks[first : first + wanted]
        shown.append((document, window, len(passages)))
        passages += [document.text(chunk) for chunk in window]
        title = f"{document.title}, part {number + 1}"
        titles += [title] * len(window)
        library[title] = tuple(map(document.text, chunks))
    return Sample(tuple(passages), tuple(titles), tuple(_ask(rng, shown)), library)


def _ask(rng: random.Random, shown: Sequence[tuple[_Document, list[range], int]]) -> list[Question]:
    known: dict[tuple[str, str], tuple[Fact, Kind, list[tuple[int, ...]], str]] = {}
    orphans: list[Fact] = []
    hidden: list[Fact] = []
    for document, window, offset in shown:
        start, stop = window[0].start, window[-1].stop
        for fact in document.facts:
            if not start <= fact.unit < stop:
                hidden.append(fact)
            elif fact.anchor < start:
                orphans.append(fact)
            else:
                supports = _supports(fact, window)
                place = _place(document, fact, window, supports[0])
                moved = [tuple(number + offset for number in support) for support in supports]
                known[fact.key] = fact, document.kind, moved, place
    values = Counter((fact.attribute, fact.value) for fact in [*orphans, *(fact for fact, *_ in known.values())])
    questions: list[Question] = []
    for fact, kind, supports, place in known.values():
        text = _say(rng, _DIRECT, a=fact.attribute, e=fact.entity)
        questions.append(Question(text, fact.value, place, supports[0]))
        if values[fact.attribute, fact.value] == 1:
            text = _say(rng, _INVERSE, a=fact.attribute, v=fact.value)
            questions.append(Question(text, fact.entity, "inverse" + " back" * (place == "back"), supports[0]))
        if fact.attribute == kind.link:
            for attribute in kind.attributes:
                if attribute != kind.link and (other := known.get((fact.value, attribute))):
                    text = _say(rng, _TWO_HOP, a=attribute, e=fact.entity, l=kind.link)
                    unions = [tuple(sorted({*one, *two})) for one in supports for two in other[2]]
                    questions.append(Question(text, other[0].value, "two-hop", min(unions, key=len)))
    # not stated at all: no other statement of the same attribute either, which could be mistaken for it
    loose = {fact.attribute for fact in orphans}
    missing = {fact.key for fact in hidden}
    for entity, (kind, supports) in {
        fact.entity: (kind, supports) for fact, kind, supports, _ in known.values()
    }.items():
        for attribute in kind.attributes:
            if (entity, attribute) not in known and attribute not in loose:
                what = "not retrieved" if (entity, attribute) in missing else "unanswerable"
                text = _say(rng, _DIRECT, a=attribute, e=entity)
                questions.append(Question(text, NOT_STATED, what, supports[0][:1]))
    return questions


def _say(rng: random.Random, forms: Sequence[str], **parts: str) -> str:
    text = rng.choice(forms).format(**parts)
    return text[0].upper() + text[1:]


def _supports(fact: Fact, window: Sequence[range]) -> list[tuple[int, ...]]:
    """Return the chunks needed: each that holds anchor and fact, or else those from the one to the other."""
    anchors, facts = (
        [number for number, chunk in enumerate(window) if unit in chunk] for unit in (fact.anchor, fact.unit)
    )
    both: list[tuple[int, ...]] = [(number,) for number in anchors if number in facts]
    return both or [tuple(range(max(anchors), min(facts) + 1))]


def _place(document: _Document, fact: Fact, window: Sequence[range], support: tuple[int, ...]) -> str:
    if len(support) > 1:
        return "back"
    if fact.style in PLACES:
        return fact.style
    opens = window[support[0]].start == fact.anchor and document.units[fact.anchor].strip().startswith(fact.entity)
    return "first" if opens else "middle"


_WEIGHTS = {"inverse back": 2, "two-hop": 2, "back": 2, "unanswerable": 0.5, "not retrieved": 0.5}


def draw(rng: random.Random, questions: Iterable[Question], num: int) -> list[Question]:
    """Choose up to `num` questions of all kinds, with weights."""
    by_kind: dict[str, list[Question]] = {}
    for question in questions:
        by_kind.setdefault(question.kind, []).append(question)
    for group in by_kind.values():
        rng.shuffle(group)
    drawn: list[Question] = []
    while by_kind and len(drawn) < num:
        kinds = sorted(by_kind)
        kind = rng.choices(kinds, [_WEIGHTS.get(kind, 1) for kind in kinds])[0]
        drawn.append(by_kind[kind].pop())
        if not by_kind[kind]:
            del by_kind[kind]
    return drawn
