# ruff: noqa: RUF001, E501
"""Chat templates of models that think or call tools in their own format, reduced to what concerns the answer.

Written from memory of the models' `chat_template`s on the Hub, with their marks, the parts that render tools, calls and
results, and their switches for thoughts. `SPECIAL` tokens are control tokens there, `ADDED` ones are not.
"""

from __future__ import annotations

import copy
from typing import Any

from tokenizers import AddedToken

_IM = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
_HERMES_TOOLS = (
    "{% if tools %}{{ '# Tools\n<tools>\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
)
_HERMES_CALL = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
_HERMES = f"{_HERMES_TOOLS}{_IM}{_HERMES_CALL}<|im_end|>\n{{% endfor %}}"
_ASSISTANT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"

_CODER = (  # Qwen3-Coder, Qwen3.5 and later
    "{% if tools %}# Tools\n\n<tools>{% for t in tools %}\n<function>\n<name>{{ t.function.name }}</name>"
    "\n{{ t.function.parameters | tojson }}\n</function>{% endfor %}\n</tools>\n\nReply in this format:\n<tool_call>\n"
    "<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>"
    "{% endif %}" + _IM + "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for name, value in c.function.arguments | items %}{{ '<parameter=' + name + '>\n' }}"
    "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
)
_LLAMA_SAYS = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
_LLAMA4_SAYS = "You SHOULD NOT include any other text. Format: [func_name1(params_name1=params_value1), func_name2()]"


def _llama(says: str) -> str:
    return (
        f"{{% if tools %}}{{{{ '{says}' }}}}{{% for t in tools %}}{{{{ t | tojson }}}}{{% endfor %}}{{% endif %}}"
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content or '' }}"
        '{% for c in m.tool_calls or [] %}{{ \'{"name": "\' + c.function.name + \'", "parameters": \' }}'
        "{{ c.function.arguments | tojson }}}{% endfor %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )


def _deepseek(call: str, tail: str) -> str:
    """The official templates render calls in the history only; vLLM's examples for these models add the tools."""
    return (
        "{{ bos_token }}{% if tools %}## Tools\n{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
        "{% elif m.tool_calls %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
        "{{ '<｜tool▁call▁begin｜>' + " + call + " + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
        "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}" + tail + "{% endif %}"
    )


_MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'system' %}[SYSTEM_PROMPT]First draft your thinking "
    "process, in the format [THINK]your thoughts[/THINK]. {{ m.content }}[/SYSTEM_PROMPT]{% else %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
_GPT_OSS = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}{{ '<|end|>' }}{% if tools %}"
    "{{ '<|start|>developer<|message|># Tools\nnamespace functions {' }}{% for t in tools %}{{ 'type ' + t.function.name }}"
    "{{ t.function.parameters | tojson }}{% endfor %}{{ '}<|end|>' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{{ '<|start|>assistant to=functions.' }}"
    "{{ m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}{% elif m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_R1_CALL = "'function<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```'"
_V31_CALL = "c.function.name + '<｜tool▁sep｜>' + c.function.arguments"
_OFF = "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"

_GEMMA = (
    "{{ bos_token }}{% if tools %}<|turn>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<turn|>\n{% endif %}"
    "{% for m in messages %}{{ '<|turn>' + m.role + '\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    "{{ '<|tool_call>call:' + c.function.name }}{{ c.function.arguments | tojson }}<tool_call|>{% endfor %}"
    "{{ '<turn|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)

TEMPLATES = {
    "hermes": f"{_HERMES}{_ASSISTANT}{{% endif %}}",
    "qwen3": f"{_HERMES}{_ASSISTANT}{_OFF}{{% endif %}}{{% endif %}}",
    "qwen3-thinking": f"{_HERMES}{_ASSISTANT}{{{{ '<think>\n' }}}}{{% endif %}}",
    "nemotron": f"{_HERMES}{_ASSISTANT}{{{{ '<think>\n' }}}}{{% endif %}}",  # its marks are no tokens of their own
    "qwen3-coder": f"{_CODER}{_ASSISTANT}{{% endif %}}",
    "qwen3.5": f"{_CODER}{_ASSISTANT}{_OFF}{{% else %}}{{{{ '<think>\n' }}}}{{% endif %}}{{% endif %}}",
    "deepseek-r1": _deepseek(_R1_CALL, "{{ '<think>\n' }}"),
    "deepseek-v3.1": _deepseek(
        _V31_CALL,
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "{% if thinking %}<think>{% else %}</think>{% endif %}",
    ),
    "magistral": _MISTRAL,
    "gpt-oss": _GPT_OSS,
    "llama": _llama(_LLAMA_SAYS),
    "gemma4": _GEMMA,
    "llama4": _llama(_LLAMA4_SAYS),
}
ADDED = {
    "<think>": ("qwen3", "qwen3-thinking", "qwen3.5", "deepseek-r1", "deepseek-v3.1"),
    "</think>": ("qwen3", "qwen3-thinking", "qwen3.5", "deepseek-r1", "deepseek-v3.1"),
    "<tool_call>": ("hermes", "qwen3", "qwen3-thinking", "qwen3-coder", "qwen3.5"),
    "</tool_call>": ("hermes", "qwen3", "qwen3-thinking", "qwen3-coder", "qwen3.5"),
    **dict.fromkeys(
        (f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
        ("deepseek-v3.1",),
    ),
}
SPECIAL = {
    **dict.fromkeys(("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]"), ("magistral",)),
    **dict.fromkeys(("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|turn>", "<turn|>"), ("gemma4",)),
    **dict.fromkeys(
        [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return")], ("gpt-oss",)
    ),
}
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
RESPONSES = {  # tokenizers' own descriptions of answers
    "gemma4": {
        "start_anchor": "<|turn>model\n",
        "fields": {
            "content": {},
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "content": "json",
                "repeats": True,
                "transform": _CALL,
            },
        },
    }
}


def tokenizer_of(name: str, tokenizer: Any) -> Any:
    """Return a copy of the tokenizer with the template and the tokens of this model."""
    theirs = copy.deepcopy(tokenizer)
    theirs.chat_template, theirs.response_template = TEMPLATES[name], RESPONSES.get(name)
    theirs.add_tokens([AddedToken(mark, special=False) for mark, names in ADDED.items() if name in names])
    theirs.add_special_tokens({"additional_special_tokens": [mark for mark, names in SPECIAL.items() if name in names]})
    return theirs
