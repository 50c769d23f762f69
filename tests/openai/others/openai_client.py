"""openai, unmodified: `python openai_client.py URL`. Its messages go back as it dumps them, or as they are."""

import json
import sys

import openai
from pydantic import BaseModel

ASKED = {"role": "user", "content": "What is the weather in Paris?"}
AGAIN = {"role": "user", "content": "And now?"}


class Weather(BaseModel):
    """The weather of a city."""

    city: str


TOOL = openai.pydantic_function_tool(Weather, name="weather")
PLAIN = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
chat = client.chat.completions
common = {"model": client.models.list().data[0].id, "max_tokens": 200, "temperature": 0}


def whole(messages):
    return chat.create(messages=messages, tools=[PLAIN], **common).choices[0].message


def parsed(messages):
    return chat.parse(messages=messages, tools=[TOOL], **common).choices[0].message


def streamed(messages):
    with chat.stream(messages=messages, tools=[TOOL], **common) as stream:
        return stream.get_final_completion().choices[0].message


dumps = (lambda each: each, lambda each: each.model_dump(), lambda each: each.model_dump(exclude_unset=True))
for take in (whole, parsed, streamed):
    for dump in dumps:
        messages, called = [ASKED], []
        for more in ([AGAIN], []):
            while (message := take(messages)).tool_calls:
                messages.append(dump(message))
                for call in message.tool_calls:
                    called.append(json.loads(call.function.arguments)["city"])
                    answer = f"sunny in {called[-1]}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
            assert message.content == "It is sunny in Paris.", messages
            messages += [dump(message), *more]
        assert called == ["Paris", "Paris"], called
print("whole, parsed, streamed")
