"""Help and wrong arguments of every benchmark."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import _COMMANDS, main

WRONG = [
    *([command, "--wrong-flag"] for command in _COMMANDS),
    *(["decay", *wrong] for wrong in (["--room", "0.001"], ["--learn", "no"], ["--seed", "-1"], ["--top-k", "999"])),
    ["serve", "--rate", "-1"],
    ["ttft", "--ratio", "2"],
    ["ttft", "--cold", "--ram-bytes", "1000"],
    *(["answers", *wrong] for wrong in (["--policies", "no"], ["--ratios", "2"], ["--codec", "no"])),
    *(["answers", *wrong] for wrong in (["--docs", "missing"], ["--top-k", "0"], [])),
    *(["answers", *wrong] for wrong in (["--top-k", "3"], ["--samples", "0"], ["--max-tokens", "0"])),
    *(["answers", *wrong] for wrong in (["--seed", "-1"], ["--policies", ","], ["--dtype", "float8"])),
    *(["answers", *wrong] for wrong in (["--ram-bytes", "-1"], ["--context-tokens", "many"])),
    *(["answers", "--data", __file__, *wrong] for wrong in ([], ["--top-k", "3"], ["--docs", "."])),
    *(["answers", "--docs", ".", *wrong] for wrong in (["--top-k", "1"], ["--skip-long"])),
    *(["answers", "--docs", "docs", *wrong] for wrong in (["--chunk-tokens", "4"], ["--instruction", "x"])),
    *(["quality", *wrong] for wrong in (["--top-k", "3"], ["--top-k", "0"])),
]


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("argv", WRONG, ids=" ".join)
def test_wrong_arguments_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(argv)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert (code in (1, 2), captured.out) == (True, "")
    assert len(captured.err.splitlines()) == 1
