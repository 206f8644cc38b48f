"""Prompts from documents, without questions or labels: sentences that break off, for the model to complete.

A continuation breaks off after two thirds of a sentence: a chunk says how it goes on. A cloze breaks off before a rare
word that also stands in another chunk; chunks that contain the sentence are left out of the prompt, so that only the
other chunk can give the word.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from kvrag.config import BlendConfig
from kvrag.errors import ContextWindowError, KvragError, StoreError
from kvrag.store import KVStore

if TYPE_CHECKING:
    from kvrag.backend.transformers import Model, Tokenizer

CONTINUATION, CLOZE = "continuation", "cloze"

Search = Callable[[str, int], Sequence[str]]
"""From a query and a number to the texts of that many chunks, best first."""

# a run of letters and digits, or one character of a script that is written without spaces
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n\s*\n")
_CHUNKS = 1000  # stored chunks that prompts are generated from
_SHORTEST, _LONGEST = 6, 60  # words of a sentence
_BEFORE = 4  # words before a gap
_LETTERS = 4  # of a word to be completed: shorter ones are rarely names
_RARE = 3, 0.01  # maximum number of chunks with a rare word: this many, or this share of them
_INSTRUCTION = "Complete the next sentence from the text above. Write nothing else."


@dataclass(frozen=True, slots=True)
class Gap:
    """A sentence that breaks off, and the prompt that ends with it.

    Attributes:
        kind: CONTINUATION or CLOZE.
        beginning: The sentence up to the gap.
        sentence: The complete sentence.
        word: The first missing word.
        chunks: What was retrieved, in the order of the prompt.
        ids: Token ids of the prompt.
    """

    kind: str
    beginning: str
    sentence: str
    word: str
    chunks: tuple[str, ...] = ()
    ids: list[int] = field(default_factory=list)


def make_prompts(
    model: Model, chunks: Sequence[str], search: Search, count: int, top_k: int = 4, seed: int = 0, room: int = 8
) -> list[Gap]:
    """Make up to `count` prompts, every second one a cloze while there are any; a larger `count` appends.

    Args:
        chunks: Texts that sentences are drawn from.
        search: Retrieves the chunks of a prompt, given its broken sentence. They are shuffled.
        room: Tokens to leave for the answer.

    Raises:
        KvragError: No complete sentence.
        ContextWindowError: No prompt fits into the window.
    """
    prompts: list[Gap] = []
    shortest = 0
    for number, gap in enumerate(find_gaps(chunks, seed)):
        texts = list(search(gap.beginning, top_k if gap.kind == CONTINUATION else 2 * top_k))
        if gap.kind == CLOZE:  # more, to replace those that are left out
            texts = [text for text in texts if gap.sentence not in text][:top_k]
        random.Random(f"{seed} {number}").shuffle(texts)
        ids = render(model.tokenizer, texts, gap.beginning)
        if len(ids) + room <= model.context_window:
            prompts.append(replace(gap, chunks=tuple(texts), ids=ids))
        else:
            shortest = min(shortest or len(ids), len(ids))
        if len(prompts) == count:
            break
    if not prompts and shortest:
        raise ContextWindowError(
            f"prompts of {top_k} chunks have {shortest} tokens and more, which with {room} for the answer do not fit "
            f"into the window of {model.name} ({model.context_window}): use fewer or shorter chunks"
        )
    if not prompts:
        raise KvragError(
            f"none of {len(chunks)} chunks has a complete sentence of {_SHORTEST} to {_LONGEST} words to ask about: "
            "give documents of prose, or questions of your own"
        )
    return prompts


def chunk_texts(model: Model, store: KVStore, namespace: str) -> list[str]:
    """Return the texts of a namespace's chunks, of not too many and from the whole corpus.

    Raises:
        StoreError: Fewer than two chunks.
    """
    least = BlendConfig().min_run  # shorter ones are stored, but never reused
    entries = [entry for entry in store.entries(0) if entry.namespace == namespace and len(entry.ids) >= least]
    if len(entries) < 2:
        raise StoreError(
            f"calibration needs at least two stored chunks, there {'is one' if entries else 'are none'}: "
            "warm the corpus first"
        )
    step = -(-len(entries) // _CHUNKS)
    return [model.tokenizer.decode(entry.ids.tolist()) for entry in entries[::step]]


def render(tokenizer: Tokenizer, chunks: Sequence[str], beginning: str) -> list[int]:
    """Return the ids of a prompt: the chunks, then the broken sentence as the beginning of the model's answer."""
    if not tokenizer.has_chat_template:
        return tokenizer.render("\n\n".join([*chunks, beginning]))
    return tokenizer.render(tokenizer.as_prompt("\n\n".join([*chunks, _INSTRUCTION]))) + tokenizer.encode(beginning)


def find_gaps(chunks: Sequence[str], seed: int) -> list[Gap]:
    """Return gaps in random order, alternating clozes and continuations; those of one chunk are far apart."""
    frequencies = Counter(word for chunk in chunks for word in set(WORD.findall(chunk)))
    most = max(_RARE[0], round(_RARE[1] * len(chunks)))
    rare = {word: count for word, count in frequencies.items() if len(word) >= _LETTERS and 2 <= count <= most}
    kinds: dict[str, list[tuple[int, Gap]]] = {CLOZE: [], CONTINUATION: []}
    rng = random.Random(seed)
    used: set[str] = set()
    for number in rng.sample(range(len(chunks)), len(chunks)):
        sentences = list(_sentences(chunks[number]))
        rng.shuffle(sentences)
        for turn, sentence in enumerate(sentences):
            if sentence not in used:  # text that many documents repeat is asked about once
                used.add(sentence)
                for gap in _gaps(sentence, rare):
                    kinds[gap.kind].append((turn, gap))
    ordered = [[gap for _, gap in sorted(gaps, key=lambda pair: pair[0])] for gaps in kinds.values()]
    return [gap for pair in zip_longest(*ordered) for gap in pair if gap]


def _sentences(text: str) -> Iterator[str]:
    for sentence in _SENTENCE.split(text):
        sentence = sentence.strip()
        words = WORD.findall(sentence)
        # tables and code have few letters between their signs
        if _SHORTEST <= len(words) <= _LONGEST and sum(map(len, words)) >= 0.7 * len("".join(sentence.split())):
            yield sentence


def _gaps(sentence: str, rare: dict[str, int]) -> list[Gap]:
    """Return a continuation, and a cloze at the rarest word that the sentence does not have before."""
    words = list(WORD.finditer(sentence))
    breaks = [(CONTINUATION, words[2 * len(words) // 3])]
    first = {word.group(): word for word in reversed(words)}
    later = [first[word] for word in rare.keys() & first.keys() if first[word].start() >= words[_BEFORE].start()]
    if later:
        breaks.append((CLOZE, min(later, key=lambda word: (rare[word.group()], word.start()))))
    return [Gap(kind, sentence[: word.start()].rstrip(), sentence, word.group()) for kind, word in breaks]


def search_by_words(chunks: Sequence[str]) -> Search:
    """Return a search by the rare words that query and chunk share, for use without an embedder."""
    words_of = [{word.lower() for word in WORD.findall(chunk)} for chunk in chunks]
    frequencies = Counter(chain.from_iterable(words_of))

    def search(query: str, k: int) -> list[str]:
        known = dict.fromkeys(word for word in map(str.lower, WORD.findall(query)) if word in frequencies)
        weights = {word: math.log(1 + len(chunks) / frequencies[word]) for word in known}
        scores = [sum(weights[word] for word in known if word in words) for words in words_of]
        best = sorted(range(len(chunks)), key=lambda number: -scores[number])  # stable: ties in reading order
        return [chunks[number] for number in best[:k]]

    return search
