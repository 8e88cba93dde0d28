"""An agent with tools, written for OpenAI's API, on kvloop.

    kvloop serve gateway --router 127.0.0.1:7600
    python examples/agent_openai.py "How many copper valves are in crates A12 and B03 together?"

Nothing in it is kvloop's but one field, conversation_id, under which the history's KV is found again; every
request carries the whole history, as agents' requests do. Needs the openai package.
"""

import argparse
import json
import secrets
import sys
from collections.abc import Callable
from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall

STOCK = {"A12": {"copper valves": 40, "steel bolts": 1200}, "B03": {"brass fittings": 9, "copper valves": 2}}
SYSTEM = "You look after a warehouse. Use the tools for every count and every sum; answer in one sentence."


def look_into(crate: str) -> dict[str, int]:
    """Return what a crate holds."""
    return STOCK.get(crate, {})


def add(numbers: list[float]) -> float:
    """Return a sum."""
    return sum(numbers)


TOOLS: dict[str, Callable[..., Any]] = {"look_into": look_into, "add": add}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "look_into",
            "description": "Tells what a crate holds, and how many of each.",
            "parameters": {
                "type": "object",
                "properties": {"crate": {"type": "string", "description": "For example A12."}},
                "required": ["crate"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers up.",
            "parameters": {
                "type": "object",
                "properties": {"numbers": {"type": "array", "items": {"type": "number"}}},
                "required": ["numbers"],
            },
        },
    },
]


def use(call: ChatCompletionMessageFunctionToolCall) -> str:
    """Return a tool's answer as text; what goes wrong is told to the model, which may mend its call."""
    try:
        return json.dumps(TOOLS[call.function.name](**json.loads(call.function.arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def ask(client: openai.OpenAI, model: str, question: str, *, most_turns: int = 8) -> str:
    """Return the answer to a question, after as many calls of tools as the model wants."""
    conversation = f"agent-{secrets.token_hex(6)}"
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for turn in range(1, most_turns + 1):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=SCHEMAS,  # type: ignore[arg-type]
            temperature=0,
            extra_body={"conversation_id": conversation},
        )
        tell(turn, answer)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = [call for call in message.tool_calls or () if call.type == "function"]
        if not calls:
            return message.content or ""
        messages += [{"role": "tool", "tool_call_id": call.id, "content": use(call)} for call in calls]
    return f"(no answer within {most_turns} turns)"


def tell(turn: int, answer: ChatCompletion) -> None:
    """Say on stderr how much of a turn's prompt was reused."""
    usage = answer.usage
    if usage is not None:
        cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
        print(f"turn {turn}: {cached} of {usage.prompt_tokens} prompt tokens reused", file=sys.stderr)


def main() -> None:
    """Ask one question."""
    parser = argparse.ArgumentParser(description="An agent with tools on kvloop's gateway.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the gateway's API")
    parser.add_argument("--model", default="", help="name of the served model; the first one by default")
    parser.add_argument("--token", default="none", help="the tenant's token")
    given = parser.parse_args()
    client = openai.OpenAI(base_url=given.url, api_key=given.token)
    model = given.model or next(iter(client.models.list())).id
    print(ask(client, model, given.question))


if __name__ == "__main__":
    main()
