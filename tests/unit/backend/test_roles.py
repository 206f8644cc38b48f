"""Roles of messages: those of the chat template, and nothing that the template leaves out."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvrag import PromptError
from kvrag.backend.transformers import Tokenizer
from kvrag.generate.prompt import prepare

USER = {"role": "user", "content": "Hi."}
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'ipython'] %}"
    "<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
)
FIRST = (  # like gpt-oss's
    "{% if messages[0].role == 'developer' or messages[0].role == 'system' %}<developer>{{ messages[0].content }}\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}\n{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"


def say(tokenizer: Any, template: str, *messages: dict[str, Any], **options: Any) -> str:
    hf = copy.deepcopy(tokenizer)
    hf.chat_template = template
    ours = Tokenizer(hf, "a model")
    direct = ours.decode(ours.render(list(messages)))
    assert ours.decode(prepare(ours, list(messages), **options).render(ours)) == direct
    return direct


def of(role: str, content: str = "Be brief.") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (CHATML, [of("developer"), USER], "<system>Be brief.\n<user>Hi.\n"),
        (STRICT, [of("developer"), USER], "<system>Be brief.\n<user>Hi.\n"),
        (FIRST, [of("developer"), USER], "<developer>Be brief.\n<user>Hi.\n"),
        (STRICT, [USER, of("ipython", "5")], "<user>Hi.\n<ipython>5\n"),
        # what the template leaves out is merged
        (FIRST, [of("system"), of("system", "Be kind."), USER], "<developer>Be brief.\n\nBe kind.\n<user>Hi.\n"),
        (FIRST, [of("system"), of("developer", "Be kind."), USER], "<developer>Be kind.\n<user>Be brief.\n\nHi.\n"),
        (FIRST, [USER, of("system")], "<user>Be brief.\n\nHi.\n"),
        (NO_SYSTEM, [of("system"), USER], "<user>Be brief.\n\nHi.\n"),
    ],
)
def test_instructions_reach_the_prompt(tokenizer: Any, template: str, messages: list[Any], text: str) -> None:
    assert say(tokenizer, template, *messages) == text


@pytest.mark.parametrize("template", [CHATML, STRICT, FIRST])
@pytest.mark.parametrize("role", ["instructions", "", "m.role", "User", "function"])
def test_an_unknown_role_is_an_error(tokenizer: Any, template: str, role: str) -> None:
    with pytest.raises(PromptError, match=r"unknown role .*: use system, user, assistant, tool or developer"):
        say(tokenizer, template, of(role), USER)


def test_a_message_that_the_template_leaves_out_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="leaves out message 1, with the role 'developer'"):
        say(tokenizer, FIRST, USER, of("developer"))
