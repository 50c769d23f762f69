"""openai, unmodified: `python openai_client.py URL`. Its messages go back as it dumps them, or as they are."""

import json
import sys

import openai
from pydantic import BaseModel


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
calls = 0
for take in (whole, parsed, streamed):
    for dump in dumps:
        messages = []
        for question in ("What is the weather in Paris?", "And now?"):
            messages.append({"role": "user", "content": question})
            while (message := take(messages)).tool_calls:
                messages.append(dump(message))
                for call in message.tool_calls:
                    calls += 1
                    city = json.loads(call.function.arguments)["city"]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"})
            print(message.content)
            messages.append(dump(message))
print(calls, "calls")
