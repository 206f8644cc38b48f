"""The scripts and notebooks in examples/: each runs offline, with the bundled model, from an empty folder."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from run_script import start

import kvrag

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))

# script -> what its output must have
OUTPUT = {
    "warm_folder.py": r"chunks of 30 files: (\d+) encoded now, .*known for its round harbour\?",
    "langchain.ipynb": r"30 documents added\nWhich company has its offices in Danvik\? .+\nWhat does Holra play\? .+\n",
    "warm_from_chroma.py": r"30 documents: 30 encoded now, 0 before\nWhich company",
    "warm_from_qdrant.py": r"30 documents: 30 encoded now, 0 before\nWhich company",
    "llama_index.ipynb": r"query engine: .+\n.*chat engine: .+\n.*chat engine: .+\n",
    "demo.py": r"right +5 of 5 +\d of 5\nfirst token, median +[\d.]+ s +[\d.]+ s\n",
    "terminal_chat.py": r"> .*from .*\.txt.*> .*from .*HOLRA\.TXT.*> ",
}
ARGUMENTS = {"terminal_chat.py": ["notes"]}
TIMES = {"llama_index.ipynb": 3, "terminal_chat.py": 2}
ELSEWHERE = {"openai_client.py", "open_webui_warm.py", "vllm_rag.py", "warm_from_file.py"}
SAID = {"terminal_chat.py": ["Which company has its offices in Danvik?", "What does Holra play?", ""]}
KVRAG = Path(sys.executable).with_name("kvrag")


AS_IN_JUPYTER = """import asyncio

async def main():
    names = {{"__name__": "__main__"}}
    for cell in {cells!r}:
        exec(cell, names)

asyncio.run(main())
"""


def cells(name: str) -> list[str]:
    """Return the code of a script, or of each code cell of a notebook."""
    source = (EXAMPLES / name).read_text()
    if name.endswith(".py"):
        return [source]
    return ["".join(cell["source"]) for cell in json.loads(source)["cells"] if cell["cell_type"] == "code"]


def run(script: Path, folder: Path, *arguments: str) -> str:
    """Run the script; return its output."""
    folder.mkdir(exist_ok=True)
    process = start(script, *arguments, folder=folder, stdin=SAID.get(script.name, ()))
    process.join(300)
    assert process.exitcode == 0, (folder / "stderr").read_text()
    return (folder / "stdout").read_text()


def check_reuse(output: str, times: int) -> None:
    counted = re.findall(r"(\d+) of (\d+) prompt tokens", output)
    assert len(counted) == times, output
    for reused, tokens in counted:
        assert int(reused) > int(tokens) / 3, output  # most of a prompt are passages, a third of these is recomputed


@pytest.mark.parametrize("name", OUTPUT)
def test_it_runs_and_reuses_what_it_has_warmed(name: str, tmp_path: Path) -> None:
    notes = shutil.copytree(EXAMPLES / "corpus", tmp_path / "notes")
    (notes / "holra.txt").rename(notes / "HOLRA.TXT")
    (notes / "folder.md").mkdir()
    script = EXAMPLES / name
    if name in NOTEBOOKS:
        shutil.copytree(EXAMPLES / "corpus", tmp_path / "corpus")
        script = tmp_path / f"{name}.py"
        script.write_text(AS_IN_JUPYTER.format(cells=cells(name)))  # cells run while an event loop does
    output = run(script, tmp_path, *ARGUMENTS.get(name, ()))
    assert re.search(OUTPUT[name], output, re.DOTALL), output
    check_reuse(output, TIMES.get(name, 1))


def test_warmed_chunks_stay_warm(tmp_path: Path) -> None:
    for encoded in ("30 encoded now, 0 before", "0 encoded now, 30 before"):
        output = run(EXAMPLES / "warm_from_file.py", tmp_path)
        assert f"30 documents: {encoded}\nWhich company" in output
        check_reuse(output, 1)


def test_an_openai_client_and_the_server(tmp_path: Path) -> None:
    run(KVRAG, tmp_path / "warm", "warm", str(EXAMPLES / "corpus"), "--store", str(tmp_path / "kv"))
    folder = tmp_path / "server"
    folder.mkdir()
    server = start(KVRAG, "serve", "--json", "--port", "0", "--store", str(tmp_path / "kv"), folder=folder)
    try:
        while not (said := folder / "stdout").exists() or "\n" not in said.read_text():
            assert server.is_alive(), (folder / "stderr").read_text()
            time.sleep(0.1)
        url = json.loads(said.read_text())["url"]
        output = run(EXAMPLES / "openai_client.py", tmp_path / "client", f"{url}/v1")
    finally:
        server.terminate()
        server.join(60)
    assert re.search(r"Which company has its offices in Danvik\? .+\n  \[1\] \w+\.txt: .+\n  \[2\] ", output), output
    check_reuse(output, 2)


def test_every_script_is_run_and_listed() -> None:
    assert {*OUTPUT, *ELSEWHERE} == {*SCRIPTS, *NOTEBOOKS}
    listed = (ROOT / "docs" / "quickstart.md").read_text()
    assert [name for name in SCRIPTS if f"python examples/{name}" not in listed] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs(name: str) -> None:
    for cell in json.loads((EXAMPLES / name).read_text())["cells"]:
        assert (cell.get("outputs"), cell.get("execution_count")) in (([], None), (None, None)), name


@pytest.mark.parametrize("name", [*SCRIPTS, *NOTEBOOKS])
def test_a_script_is_short_and_uses_public_names(name: str) -> None:
    source = "\n".join(cells(name))
    assert len(source.splitlines()) < 150
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith(("kvrag", "langchain_kvrag")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and "kvrag" in node.module:
            assert node.module in (
                "kvrag",
                "langchain_kvrag",
                "llama_index.llms.kvrag",
                "llama_index.vector_stores.kvrag",
            )
            if node.module == "kvrag":
                assert {alias.name for alias in node.names} <= {*kvrag.__all__}
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")
