"""Explain what was reused of a prompt, chunk by chunk, and why not more.

    python examples/explain.py prompt.txt --model Qwen/Qwen2.5-1.5B-Instruct --store kv --html why.html

The prompt is the final one, as the chain sends it: a text, a list of messages as JSON, or the body of a request to
OpenAI's API.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvrag import BlendEngine


def read(path: Path) -> dict[str, Any]:
    """Return the body of a request, or `text`."""
    text = path.read_text("utf-8")
    try:
        parsed = json.loads(text)
    except ValueError:
        return {"text": text}
    if isinstance(parsed, list):
        return {"messages": parsed}
    return parsed if isinstance(parsed, dict) and {"messages", "prompt"} & {*parsed} else {"text": text}


def main() -> None:
    """Prefill the prompt as for an answer, and print what was reused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", type=Path)
    parser.add_argument("--model", default="reader")
    parser.add_argument("--store", help="folder or URL of the chunks (default: the model's own)")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--html", type=Path, help="write a page with the coloured prompt")
    args = parser.parse_args()
    request = read(args.prompt)
    with BlendEngine.from_pretrained(args.model, store=args.store) as engine:
        prompt = engine.as_prompt(request["text"]) if "text" in request else request.get("messages") or request["prompt"]
        options = {"tools": request.get("tools"), "template": request.get("chat_template_kwargs")}
        explanation = engine.explain(prompt, namespace=args.namespace, ratio=args.ratio, **options)
    print(explanation)
    if args.html:
        args.html.write_text(explanation.html(), "utf-8")


if __name__ == "__main__":
    main()
