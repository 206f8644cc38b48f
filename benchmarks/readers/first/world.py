"""A synthetic world: articles that depend on each other, and questions about them.

A passage alone is of little use: entities of one context have the same attributes; all passages of an article except
the first say only "she", "the company" or "the town"; definitions and table headers are in other passages than their
use; and *inverse* questions ("Who was born in ...?") need the name at the attribute, which only a prefill of the
earlier passages provides.

Every name, value, statement and question is a pair of known parts ("Mi" + "ra", "grey" + "horse", a frame + a phrase).
A fifth of all pairs is reserved for the split "test" and never occurs in "train".
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

from kvrag.errors import KvragError

SPLITS = ("train", "test")
KINDS = ("direct", "anaphora", "inverse", "inverse across", "two-hop", "reference", "definition", "table", "comparison")
"""Kinds of question. All except `direct` and `inverse` depend on another passage than the one with the fact."""


@dataclass(frozen=True)
class Question:
    """A question with its only correct answer, and the required facts in order: values, each with its sentence."""

    text: str
    answer: str
    kind: str
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def across(self) -> bool:
        """True if it depends on more than one passage."""
        return self.kind not in ("direct", "inverse")


@dataclass(frozen=True)
class Sample:
    """Passages in reading order, their subjects ("" for several), and all questions that they answer.

    `defined` are the sentences of passages about several subjects, with the name or word that each is about. `articles`
    names the article of each passage.
    """

    passages: tuple[str, ...]
    subjects: tuple[str, ...]
    questions: tuple[Question, ...]
    defined: tuple[tuple[str, str], ...]
    articles: tuple[str, ...]


# ------------------------------------------------------------------------------------------------------ the parts

ONSETS = [
    "Mi",
    "Tor",
    "Bra",
    "Kel",
    "Sa",
    "Lun",
    "Dor",
    "Fen",
    "Gal",
    "Har",
    "Jo",
    "Ka",
    "Lem",
    "Mar",
    "Nor",
    "Os",
    "Pel",
    "Quin",
    "Ros",
    "Sten",
    "Tal",
    "Ul",
    "Ven",
    "Wil",
    "Yor",
    "Zan",
    "Al",
    "Ber",
    "Cor",
    "Dan",
    "El",
    "Fal",
    "Gor",
    "Hel",
    "Il",
    "Jas",
    "Kor",
    "Lor",
    "Mel",
    "Nel",
    "Ol",
    "Par",
    "Rin",
    "Sel",
    "Tam",
    "Um",
    "Vor",
    "Wen",
    "Yal",
    "Zor",
    "Ash",
    "Bel",
    "Cal",
    "Dun",
    "Er",
    "Fin",
    "Gren",
    "Hol",
    "Ing",
    "Jun",
    "Kip",
    "Lud",
    "Mos",
    "Nim",
    "Orr",
    "Pax",
    "Rud",
    "Sim",
    "Tev",
    "Urs",
    "Vik",
    "Wal",
    "Yst",
    "Zim",
    "Alb",
    "Bran",
    "Clem",
    "Dres",
    "Edd",
    "Flor",
    "Grim",
    "Hask",
    "Ivo",
    "Jel",
    "Knut",
    "Lim",
    "Mur",
    "Nad",
    "Ott",
    "Pim",
    "Ruf",
    "Stel",
    "Tro",
    "Und",
    "Vas",
    "Wim",
]
_WORD_ONSETS = tuple(onset.lower() for onset in ONSETS if onset[0] not in "AEIOU")  # preceded by "a"
_CODAS = {
    "person": [
        "ra",
        "la",
        "na",
        "da",
        "ko",
        "mi",
        "lo",
        "ri",
        "sa",
        "ta",
        "vi",
        "no",
        "dia",
        "rik",
        "ton",
        "bert",
        "mund",
        "lina",
    ],
    "company": ["tex", "lon", "max", "dyn", "corp", "plan", "gen", "soft", "craft", "nova"],
    "town": ["vik", "ford", "ham", "burg", "stad", "mouth", "field", "wick", "dale", "bury"],
    "river": ["sel", "wash", "ern", "uva", "ack"],
    "thing": ["bo", "lick", "rum", "dle", "kin", "zel"],
}
_COLOURS = ["red", "blue", "green", "grey", "black", "white", "brown", "yellow", "silver", "purple"]
_MATERIALS = ["wooden", "copper", "steel", "glass", "stone", "paper", "leather", "golden"]
_SIZES = ["tall", "small", "large", "round", "long", "plain"]
_NOUNS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "animal": (_COLOURS, ["horse", "goat", "dog", "cat", "cow", "duck", "pig", "hen"]),
    "instrument": (_MATERIALS, ["flute", "drum", "harp", "horn", "bell", "fiddle"]),
    "vehicle": (_COLOURS, ["car", "boat", "cart", "bicycle", "van", "sledge"]),
    "food": (
        ["sweet", "salted", "dried", "fresh", "baked", "cold"],
        ["plums", "beans", "bread", "fish", "apples", "nuts"],
    ),
    "product": (_MATERIALS, ["chairs", "lamps", "boxes", "clocks", "pens", "keys"]),
    "sign": (_COLOURS, ["star", "tree", "wheel", "crown", "lion", "moon"]),
    "sight": (_SIZES, ["bridge", "tower", "market", "church", "garden", "harbour"]),
    "tool": (_SIZES, ["hammer", "ladder", "basket", "kettle", "rope", "mirror"]),
    "paint": (["dark", "pale", "bright", "deep"], _COLOURS),
}
_CENTURIES, _YEARS = ("17", "18", "19", "20"), tuple(f"{year:02d}" for year in range(100))
_TRIES = 100_000
_COLUMNS = ["door", "coat", "roof", "hat", "chair", "gate"]


def reserved(first: str, second: str) -> bool:
    """Return whether the pair is reserved for the test split."""
    return _hash(first, second)[0] % 5 == 0


def _hash(first: str, second: str) -> bytes:
    return blake2b(f"{first}|{second}".encode(), digest_size=2).digest()


@cache
def _pairs(split: str, firsts: tuple[str, ...], seconds: tuple[str, ...], between: str) -> tuple[str, ...]:
    return tuple(a + between + b for a in firsts for b in seconds if reserved(a, b) == (split == "test"))


# -------------------------------------------------------------------------------------------------- the relations


@dataclass(frozen=True)
class _Relation:
    """An attribute: kind of value, statements, questions for the value and for the entity."""

    value: str
    says: tuple[str, ...]
    asks: tuple[str, ...]
    inverse: tuple[str, ...]


_RELATIONS: dict[str, dict[str, _Relation]] = {
    "person": {
        "born": _Relation(
            "town",
            ("was born in {v}", "comes from {v}", "grew up in {v}"),
            ("Where was {e} born?", "Which town does {e} come from?"),
            ("Who was born in {v}?", "Who comes from {v}?"),
        ),
        "animal": _Relation(
            "animal",
            ("owns a {v}", "keeps a {v}", "looks after a {v}"),
            ("Which animal does {e} own?", "What does {e} keep?"),
            ("Who owns a {v}?", "Who keeps a {v}?"),
        ),
        "instrument": _Relation(
            "instrument",
            ("plays a {v}", "makes music on a {v}", "has learned to play a {v}"),
            ("Which instrument does {e} play?", "What does {e} play?"),
            ("Who plays a {v}?", "Who has learned to play a {v}?"),
        ),
        "vehicle": _Relation(
            "vehicle",
            ("drives a {v}", "travels in a {v}", "goes to work with a {v}"),
            ("What does {e} drive?", "In what does {e} travel?"),
            ("Who drives a {v}?", "Who travels in a {v}?"),
        ),
        "food": _Relation(
            "food",
            ("likes to eat {v}", "is fond of {v}", "often eats {v}"),
            ("What does {e} like to eat?", "Which food is {e} fond of?"),
            ("Who likes to eat {v}?", "Who is fond of {v}?"),
        ),
        "school": _Relation(
            "year",
            ("finished school in {v}", "left school in {v}", "was at school until {v}"),
            ("When did {e} finish school?", "In which year did {e} leave school?"),
            ("Who finished school in {v}?", "Who left school in {v}?"),
        ),
        "employer": _Relation(
            "company",
            ("works for {v}", "is employed by {v}", "earns money at {v}"),
            ("Who employs {e}?", "Which company does {e} work for?"),
            ("Who works for {v}?", "Who is employed by {v}?"),
        ),
    },
    "company": {
        "makes": _Relation(
            "product",
            ("makes {v}", "produces {v}", "is a maker of {v}"),
            ("What does {e} make?", "What is produced by {e}?"),
            ("Which company makes {v}?", "Who produces {v}?"),
        ),
        "founded": _Relation(
            "year",
            ("was founded in {v}", "has existed since {v}", "opened in {v}"),
            ("When was {e} founded?", "Since when has {e} existed?"),
            ("Which company was founded in {v}?", "Which company opened in {v}?"),
        ),
        "based": _Relation(
            "town",
            ("is based in {v}", "has its offices in {v}", "can be found in {v}"),
            ("Where is {e} based?", "Where does {e} have its offices?"),
            ("Which company is based in {v}?", "Which company has its offices in {v}?"),
        ),
        "sign": _Relation(
            "sign",
            ("has a {v} as its sign", "shows a {v} on its letters", "chose a {v} as its sign"),
            ("What is the sign of {e}?", "What does {e} show on its letters?"),
            ("Which company has a {v} as its sign?", "Which company shows a {v}?"),
        ),
        "head": _Relation(
            "person",
            ("is led by {v}", "belongs to {v}", "is run by {v}"),
            ("Who leads {e}?", "Who runs {e}?"),
            ("Which company is led by {v}?", "Which company is run by {v}?"),
        ),
        "delivers": _Relation(
            "vehicle",
            ("delivers with a {v}", "brings its goods in a {v}", "has bought a {v}"),
            ("What does {e} deliver with?", "What has {e} bought?"),
            ("Which company delivers with a {v}?", "Which company has bought a {v}?"),
        ),
    },
    "town": {
        "river": _Relation(
            "river",
            ("lies on the {v}", "was built by the {v}", "gets its water from the {v}"),
            ("On which river does {e} lie?", "Where does {e} get its water from?"),
            ("Which town lies on the {v}?", "Which town was built by the {v}?"),
        ),
        "sight": _Relation(
            "sight",
            ("is known for its {v}", "is proud of its {v}", "has a {v}"),
            ("What is {e} known for?", "What is {e} proud of?"),
            ("Which town is known for its {v}?", "Which town has a {v}?"),
        ),
        "mayor": _Relation(
            "person",
            ("has {v} as its mayor", "is governed by {v}", "elected {v}"),
            ("Who is the mayor of {e}?", "Who governs {e}?"),
            ("Which town has {v} as its mayor?", "Which town is governed by {v}?"),
        ),
        "first": _Relation(
            "year",
            ("was first settled in {v}", "became a town in {v}", "got its walls in {v}"),
            ("When was {e} first settled?", "When did {e} become a town?"),
            ("Which town was first settled in {v}?", "Which town got its walls in {v}?"),
        ),
        "flag": _Relation(
            "sign",
            ("has a {v} on its flag", "chose a {v} for its flag", "carries a {v} in its arms"),
            ("What is on the flag of {e}?", "What did {e} choose for its flag?"),
            ("Which town has a {v} on its flag?", "Which town chose a {v}?"),
        ),
        "dish": _Relation(
            "food",
            ("sells {v} on its market", "sends {v} abroad", "feeds its guests with {v}"),
            ("What does {e} sell?", "What does {e} send abroad?"),
            ("Which town sells {v}?", "Which town sends {v} abroad?"),
        ),
    },
}
_USES = ("uses a {v}", "cannot live without a {v}", "always carries a {v}")
_FRAMES = ("", "As it happens, ", "In fact, ", "By all accounts, ", "It is said that ", "As many know, ")
_ASKING = ("", "Tell me: ", "Please say: ", "In the text: ", "Say: ")
_WHOSE = {"person": ("She", "He"), "company": ("The company",), "town": ("The town",)}


@cache
def _framed(split: str, phrases: tuple[str, ...], frames: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the split's (frame, phrase) pairs; at least one is reserved for every set of phrases."""
    pairs = [(frame, phrase) for phrase in phrases for frame in frames]
    kept = [pair for pair in pairs if reserved(*pair)] or [min(pairs, key=lambda pair: _hash(*pair))]
    return tuple(pair for pair in pairs if (pair in kept) == (split == "test"))


# ------------------------------------------------------------------------------------------------- one context


@dataclass
class _Entity:
    kind: str
    name: str
    pronoun: str
    facts: dict[str, str]
    near: frozenset[str] = frozenset()  # relations stated in the passage that names the entity
    sentences: dict[str, str] = field(default_factory=dict)  # the sentence of every relation

    def fact(self, relation: str) -> tuple[str, str]:
        """Value and sentence."""
        return self.facts[relation], self.sentences[relation]


_Passage = tuple[str, str]  # text and subject


class _Context:
    """Draws one context; see `sample`."""

    def __init__(self, rng: random.Random, split: str, names: set[str]) -> None:
        self.rng, self.split, self.names = rng, split, names
        self.used: set[str] = set()
        self.starts: set[str] = set()
        self.questions: list[Question] = []
        self.defined: list[tuple[str, str]] = []  # sentences of tables and glossaries, with their subjects

    # ---- words

    def value(self, kind: str) -> str:
        """A name or value not yet in this context. No two names in a context begin alike, as in a novel."""
        for _ in range(_TRIES):
            if kind in _CODAS:
                onsets = _WORD_ONSETS if kind == "thing" else tuple(ONSETS)
                drawn = self.rng.choice(_pairs(self.split, onsets, tuple(_CODAS[kind]), ""))
                start = next(onset for onset in sorted(onsets, key=len, reverse=True) if drawn.startswith(onset))
                if start.lower() in self.starts or drawn in self.names:
                    continue
                self.starts.add(start.lower())
                self.names.add(drawn)
            elif kind == "year":
                drawn = self.rng.choice(_pairs(self.split, _CENTURIES, _YEARS, ""))
            else:
                first, second = _NOUNS[kind]
                drawn = self.rng.choice(_pairs(self.split, tuple(first), tuple(second), " "))
            if drawn not in self.used:
                self.used.add(drawn)
                return drawn
        raise KvragError(f"no {kind} is left that the other contexts do not use: draw fewer contexts")

    def framed(self, phrases: tuple[str, ...], frames: tuple[str, ...], bare: float) -> tuple[str, str]:
        pairs = _framed(self.split, phrases, frames)
        framed = self.rng.random() >= bare
        wanted = [pair for pair in pairs if bool(pair[0]) == framed]
        return self.rng.choice(wanted or pairs)

    def say(self, subject: str, phrases: tuple[str, ...], value: str, bare: float) -> str:
        frame, phrase = self.framed(phrases, _FRAMES, bare)
        if frame and subject.split()[0] in ("She", "He", "The"):
            subject = subject[0].lower() + subject[1:]
        return f"{frame}{subject} {phrase.format(v=value)}."

    def ask(self, kind: str, phrases: tuple[str, ...], answer: str, *facts: tuple[str, str], **slots: str) -> None:
        frame, phrase = self.framed(phrases, _ASKING, 0.6)
        self.questions.append(Question(frame + phrase.format(**slots), answer, kind, facts))

    # ---- articles

    def entity(self, kind: str, relations: Sequence[str]) -> _Entity:
        facts = {name: self.value(_RELATIONS[kind][name].value) for name in relations}
        return _Entity(kind, self.value(kind), self.rng.choice(_WHOSE[kind]), facts)

    def article(self, entity: _Entity, word: tuple[str, str] | None, guest: bool) -> list[_Passage]:
        """Return an article's passages of two or three sentences each; only the first names its subject.

        Args:
            word: A made-up word that the subject uses, and what it means.
            guest: Include the subject's employer, which has no article of its own.
        """
        relations = _RELATIONS[entity.kind]
        order = list(entity.facts)
        self.rng.shuffle(order)
        statements = [(name, relations[name].says, entity.facts[name]) for name in order]
        if word:
            statements.insert(self.rng.randint(1, len(statements)), ("uses", _USES, word[0]))
        sizes = [2] * (len(statements) // 2)
        for number in self.rng.sample(range(len(sizes)), len(statements) % 2):
            sizes[number] += 1
        parts = [[statements.pop(0) for _ in range(size)] for size in sizes]
        entity.near = frozenset(name for name, _, _ in parts[0])
        passages = []
        for number, part in enumerate(parts):
            sentences = []
            # at least one frame, so that passages are long enough to be reused; names always follow a space
            framed = self.rng.randrange(len(part)) if number else 0
            for index, (name, phrases, value) in enumerate(part):
                subject = entity.name if number == index == 0 else entity.pronoun
                sentences.append(self.say(subject, phrases, value, 0.0 if index == framed else 0.6))
                entity.sentences[name] = sentences[-1]
            passages.append((" ".join(sentences), entity.name))
        if guest:
            at = next(number for number, part in enumerate(parts) if any(name == "employer" for name, _, _ in part))
            passages.insert(self.rng.randint(at + 1, len(passages)), self.guest(entity))
        return passages

    def guest(self, host: _Entity) -> _Passage:
        """A passage about the company that the host's article mentioned, in that article."""
        names = self.rng.sample(list(_RELATIONS["company"]), 2)
        sentences = []
        for name in names:
            relation = _RELATIONS["company"][name]
            value = self.value(relation.value)
            sentences.append(self.say("The company", relation.says, value, 0.3))
            fact = value, sentences[-1]
            self.ask("reference", relation.inverse, host.facts["employer"], fact, v=value)
            self.ask("reference", relation.asks, value, fact, e=host.facts["employer"])
        return " ".join(sentences), host.facts["employer"]

    def ask_entity(self, entity: _Entity) -> None:
        for name, value in entity.facts.items():
            relation = _RELATIONS[entity.kind][name]
            near = name in entity.near
            fact = entity.fact(name)
            self.ask("direct" if near else "anaphora", relation.asks, value, fact, e=entity.name)
            self.ask("inverse" if near else "inverse across", relation.inverse, entity.name, fact, v=value)

    # ---- facts across articles

    def ask_two_hops(self, entities: Sequence[_Entity]) -> None:
        by_name = {entity.name: entity for entity in entities}
        for entity in entities:
            if other := by_name.get(entity.facts.get("employer", "")):
                place, product = other.facts.get("based"), other.facts.get("makes")
                if product:
                    asks = ("What does the company that employs {e} make?", "What is made where {e} works?")
                    self.ask("two-hop", asks, product, entity.fact("employer"), other.fact("makes"), e=entity.name)
                    asks = ("Who works for the company that makes {v}?", "Who is employed by the maker of {v}?")
                    self.ask("two-hop", asks, entity.name, other.fact("makes"), entity.fact("employer"), v=product)
                if place:
                    asks = ("Where is the company that employs {e} based?", "In which town does {e} work?")
                    self.ask("two-hop", asks, place, entity.fact("employer"), other.fact("based"), e=entity.name)
            if (other := by_name.get(entity.facts.get("born", ""))) and (river := other.facts.get("river")):
                asks = ("Which river flows by the town where {e} was born?", "By which river was {e} born?")
                self.ask("two-hop", asks, river, entity.fact("born"), other.fact("river"), e=entity.name)
                asks = ("Who was born in the town on the {v}?", "Who comes from the town by the {v}?")
                self.ask("two-hop", asks, entity.name, other.fact("river"), entity.fact("born"), v=river)

    def ask_comparisons(self, entities: Sequence[_Entity]) -> None:
        dated = {
            "school": ("Who finished school first, {a} or {b}?", "Who left school earlier, {a} or {b}?"),
            "founded": ("Which company is older, {a} or {b}?", "Which company opened first, {a} or {b}?"),
        }
        for name, phrases in dated.items():
            having = [entity for entity in entities if name in entity.facts]
            self.rng.shuffle(having)
            for left, right in itertools.pairwise(having):
                if abs(int(left.facts[name]) - int(right.facts[name])) >= 10:
                    first = min(left, right, key=lambda entity: int(entity.facts[name]))
                    self.ask(
                        "comparison", phrases, first.name, left.fact(name), right.fact(name), a=left.name, b=right.name
                    )

    def table(self, num_rows: int) -> list[_Passage]:
        """A table in three passages: what its columns are, and the rows in halves."""
        columns = self.rng.sample(_COLUMNS, 2)
        half = [(self.value("paint"), self.value("paint")) for _ in range(num_rows // 2)]
        cells = [*half, *((right, left) for left, right in half)]  # every colour stands once in either column
        self.rng.shuffle(cells)
        names = [self.value("person") for _ in cells]
        rows = [f"For {name}: A {left}, B {right}." for name, (left, right) in zip(names, cells, strict=True)]
        self.defined += zip(rows, names, strict=True)
        header = f"The list gives names and two colours: A that of the {columns[0]}, B that of the {columns[1]}."
        for name, row, sentence in zip(names, cells, rows, strict=True):
            for column, cell in zip(columns, row, strict=True):
                facts = (column, header), (cell, sentence)
                asks = ("Which colour is the {c} of {e}?", "How is the {c} of {e} painted?")
                self.ask("table", asks, cell, *facts, c=column, e=name)
                asks = "Who has a {v} {c}?", "Who owns the {v} {c}?"
                self.ask("table", asks, name, *facts, c=column, v=cell)
        middle = len(rows) // 2
        return [(header, ""), (" ".join(rows[:middle]), ""), (" ".join(rows[middle:]), "")]

    def glossary(self, words: Sequence[tuple[str, str]]) -> _Passage:
        sentences = [_define(word, meaning) for word, meaning in words]
        self.defined += zip(sentences, (word for word, _ in words), strict=True)
        return " ".join(sentences), ""


def _define(word: str, meaning: str) -> str:
    return f"A {word} is a {meaning}."


def sample(rng: random.Random, split: str, num_articles: int, names: set[str] | None = None) -> Sample:
    """Draw one context of `num_articles` articles, of about three passages each, and its questions.

    Args:
        names: Made-up names that other contexts use: this one uses none of them, and adds its own.
    """
    context = _Context(rng, split, set() if names is None else names)
    extra = rng.choices(("", "table", "glossary"), (0.2, 0.4, 0.4))[0] if num_articles > 1 else ""
    num_entities = num_articles - (extra != "")
    kinds = rng.choices(("person", "company", "town"), (0.55, 0.28, 0.17), k=num_entities)
    shared = {  # entities of one kind have the same attributes
        kind: rng.sample(list(relations), rng.randint(5, 6)) for kind, relations in _RELATIONS.items()
    }
    entities = [context.entity(kind, shared[kind]) for kind in kinds]
    _link(rng, entities)
    people = [entity for entity in entities if entity.kind == "person"]
    words: dict[str, tuple[str, str]] = {}
    if extra == "glossary":
        words = {entity.name: (context.value("thing"), context.value("tool")) for entity in people}
        for _ in range(max(0, 2 - len(words))):
            words[context.value("person")] = (context.value("thing"), context.value("tool"))
    names = {entity.name for entity in entities}
    articles: list[list[_Passage]] = []
    for entity in entities:
        guest = "employer" in entity.facts and entity.facts["employer"] not in names and rng.random() < 0.4
        articles.append(context.article(entity, words.get(entity.name), guest))
        context.ask_entity(entity)
        if entity.name in words:
            word, meaning = words[entity.name]
            asks = ("Who uses a {v}?", "Who always carries a {v}?")
            used, defined = (word, entity.sentences["uses"]), (meaning, _define(word, meaning))
            context.ask("definition", asks, entity.name, defined, used, v=meaning)
            asks = ("What does {e} use?", "What does {e} always carry?")
            context.ask("definition", asks, meaning, used, defined, e=entity.name)
    if extra == "table":
        articles.append(context.table(rng.choice((4, 6))))
    context.ask_two_hops(entities)
    context.ask_comparisons(entities)
    rng.shuffle(articles)
    if words:
        listed = list(words.values())
        rng.shuffle(listed)
        articles.insert(rng.randint(0, 1) * len(articles), [context.glossary(listed)])
    passages, subjects = zip(*itertools.chain(*articles), strict=True)
    named = tuple(f"article {number}" for number, parts in enumerate(articles, 1) for _ in parts)
    return Sample(passages, subjects, tuple(context.questions), tuple(context.defined), named)


def gather(rng: random.Random, split: str, num_articles: int) -> Sample:
    """Draw one long context: several of `sample`, without the questions that more than one of them answers."""
    names: set[str] = set()
    drawn: list[Sample] = []
    while num_articles:
        number = min(num_articles, rng.randint(4, 6))
        drawn.append(sample(rng, split, number, names))
        num_articles -= number
    texts = ["\n\n".join(context.passages) for context in drawn]

    def is_clear(number: int, question: Question) -> bool:
        others = "\n\n".join(texts[:number] + texts[number + 1 :])
        asked = [value for value, _ in question.facts if value in question.text]
        return not any(part in others for part in asked + [sentence for _, sentence in question.facts])

    questions = [
        question for number, context in enumerate(drawn) for question in context.questions if is_clear(number, question)
    ]
    articles = [
        (f"{number} {article}", list(parts))
        for number, context in enumerate(drawn)
        for article, parts in itertools.groupby(
            zip(context.articles, context.passages, context.subjects, strict=True), key=lambda part: part[0]
        )
    ]
    rng.shuffle(articles)
    named = tuple(article for article, parts in articles for _ in parts)
    passages, subjects = zip(*((text, name) for _, parts in articles for _, text, name in parts), strict=True)
    return Sample(passages, subjects, tuple(questions), sum((context.defined for context in drawn), ()), named)


def _link(rng: random.Random, entities: Sequence[_Entity]) -> None:
    """Assign employers and home towns with articles to people, one person each."""
    for relation, kind in (("employer", "company"), ("born", "town")):
        others = [entity for entity in entities if entity.kind == kind]
        rng.shuffle(others)
        people = [entity for entity in entities if entity.kind == "person" and relation in entity.facts]
        for person, other in zip(people, others, strict=False):
            if rng.random() < 0.8:
                person.facts[relation] = other.name
    for relation, kind in (("head", "company"), ("mayor", "town")):
        people = [entity for entity in entities if entity.kind == "person"]
        rng.shuffle(people)
        others = [entity for entity in entities if entity.kind == kind and relation in entity.facts]
        for other, person in zip(others, people, strict=False):
            if rng.random() < 0.3:
                other.facts[relation] = person.name


_WEIGHTS = {"inverse across": 2, "table": 2, "two-hop": 3, "comparison": 3, "definition": 4}


def draw(rng: random.Random, questions: Sequence[Question], num: int) -> list[Question]:
    """Choose up to `num` questions of all kinds, with higher weights for hard and rare ones."""
    by_kind: dict[str, list[Question]] = {}
    for question in questions:
        by_kind.setdefault(question.kind, []).append(question)
    for group in by_kind.values():
        rng.shuffle(group)
    kinds = sorted(by_kind)
    drawn: list[Question] = []
    while kinds and len(drawn) < num:
        kind = rng.choices(kinds, [_WEIGHTS.get(kind, 1) for kind in kinds])[0]
        drawn.append(by_kind[kind].pop())
        if not by_kind[kind]:
            kinds.remove(kind)
    return drawn
