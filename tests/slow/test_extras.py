"""Each extra works beside kvrag's own dependencies alone: no package of the development extra is needed.

A child process does not find any installed module that neither the extra nor what it requires contains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import marked
import pytest
from families import build
from gguf_files import write_gguf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pdf import pdf
from places import CREDENTIALS, free_port, run_s3
from pypdf import PdfReader, PdfWriter
from transformers import AutoTokenizer

import kvrag

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHILD = """import json, re, sys
from importlib.machinery import PathFinder

class Installed:
    @staticmethod
    def find_distributions(*context):
        found = PathFinder.find_distributions(*context)
        return (each for each in found if re.sub("[-_.]+", "-", each.metadata["Name"]).lower() in allowed)

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in refused:
            return next((spec for each in finders if (spec := each.find_spec(name, path, target))), None)

refused, allowed = map(set, json.loads(sys.argv.pop()))
finders = [*sys.meta_path]
sys.meta_path[:] = [Installed]
"""
ENGINE = """from kvrag import BlendEngine, FileStore, Model
engine = BlendEngine(Model.from_pretrained("reader"), sys.argv[1])
"""


def _required(extra: str) -> set[str]:
    """Return the distributions that an extra installs, kvrag's own dependencies included."""
    found = set[tuple[str, str]]()
    open_ = [Requirement(each) for each in PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, [])]
    while open_:
        each = open_.pop()
        for wanted in ("", *each.extras):
            if (key := (canonicalize_name(each.name), wanted)) not in found:
                found.add(key)
                more = map(Requirement, requires(each.name) or ())
                open_ += [one for one in more if not one.marker or one.marker.evaluate({"extra": wanted})]
    return {name for name, _ in found}


@cache
def _owners() -> dict[str, set[str]]:
    """Return the distributions of each installed module."""
    return {module: set(map(canonicalize_name, owners)) for module, owners in packages_distributions().items()}


def _run(extra: str, code: str, *arguments: object) -> str:
    """Run code where only this extra is installed; return what it prints."""
    allowed = _required(extra)
    refused = [module for module, owners in _owners().items() if module != "kvrag" and not allowed & owners]
    done = subprocess.run(
        [sys.executable, "-c", CHILD + code, *map(str, arguments), json.dumps([refused, [*allowed, "kvrag"]])],
        capture_output=True,
        text=True,
        env={**os.environ, **CREDENTIALS, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file of each kind, and a PDF with AES that anyone may open."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for suffix, build_file in marked.BUILDERS.items():
        (folder / f"a{suffix}").write_bytes(build_file(lambda place: "Mira plays the harp."))
    (folder / "a.txt").write_bytes("Die Straße nach München.".encode("cp1252"))
    (folder / "plain.pdf").write_bytes(pdf("Zel owns a snake."))
    writer = PdfWriter(clone_from=PdfReader(folder / "plain.pdf"))
    writer.encrypt("", owner_password="secret", algorithm="AES-256")
    writer.write(folder / "aes.pdf")
    return folder


@pytest.mark.slow
def test_the_extra_cli_reads_every_kind_of_file_and_answers(folder: Path, store: Path) -> None:
    code = """from kvrag.cli.main import main
place = ["--store", sys.argv[2], "--json"]
sys.exit(main(["warm", sys.argv[1], *place]) or main(["ask", "Who owns a snake?", *place]))
"""
    result, answer = map(json.loads, _run("cli", code, folder, store).splitlines())
    assert not [each for each in result["problems"] if each["file"].endswith("aes.pdf")]
    assert not [each for each in result["problems"] if "broken" in each["message"]]
    assert answer["answer"]


@pytest.mark.slow
def test_the_extra_shared_opens_a_bucket() -> None:
    code = ENGINE + "print(engine.warm(['Mira Brel plays the harp.'], document='a'))"
    with run_s3() as bucket:
        assert _run("shared", code, bucket.url)


@pytest.mark.slow
def test_the_extra_llama_loads_a_file(tmp_path: Path, store: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(kvrag.__file__).parent / "reader")
    file = write_gguf(tmp_path / "tiny.gguf", "llama", build("llama"), tokenizer, "Q8_0")
    assert "llama" in _run(
        "llama", "from kvrag import Model\nprint(Model.from_pretrained(sys.argv[1]).fingerprint)", file
    )


@pytest.mark.slow
def test_the_extra_grammar_constrains_an_answer(store: Path) -> None:
    code = ENGINE + (
        "from kvrag import Grammar\n"
        "print(engine.generate('Yes or no?', grammar=Grammar(regex='(yes|no)'), max_new_tokens=8).text)"
    )
    assert _run("grammar", code, store).strip() in ("yes", "no")


SERVER = """import threading, urllib.request
from kvrag.cli.main import main
port = sys.argv[2]
serve = lambda: main(["serve", "--store", sys.argv[1], "--port", port, "--no-api-key", *sys.argv[3:]])
def ask():
    for _ in range(600):
        try:
            body = json.dumps({"model": "reader", "prompt": "Who?", "max_tokens": 2}).encode()
            url, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
            print(urllib.request.urlopen(urllib.request.Request(url, body, kind)).read().decode(), flush=True)
            break
        except OSError as error:
            last = error
            __import__("time").sleep(0.2)
    else:
        print(last, flush=True)
    __import__("os")._exit(0)
threading.Thread(target=ask, daemon=True).start()
sys.exit(serve())
"""


@pytest.mark.slow
def test_the_extra_server_answers_a_request(store: Path) -> None:
    assert "choices" in _run("server", SERVER, store, free_port(), "--no-corpus")


@pytest.mark.slow
def test_the_extra_client_makes_an_engine() -> None:
    code = """from kvrag import KvragError, RemoteEngine
try:
    RemoteEngine(sys.argv[1], max_retries=0).generate("Who?")
except KvragError as error:
    print(error)
"""
    assert "not installed" not in (said := _run("client", code, f"http://127.0.0.1:{free_port()}"))
    assert said


@pytest.mark.slow
def test_what_an_extra_does_not_install_is_refused() -> None:
    """The tests above mean something."""
    assert "lxml" not in _required("client")
    with pytest.raises(AssertionError, match="No module named 'lxml'"):
        _run("client", "import lxml")
