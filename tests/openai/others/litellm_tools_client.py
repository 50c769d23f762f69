"""litellm: `python litellm_tools_client.py URL`. Loops, whole and streamed; messages go back as dumped or not."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks GitHub for prices

import json

import litellm

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
calls = 0
for provider in ("openai", "hosted_vllm"):
    ask = {"model": f"{provider}/toy", "api_base": sys.argv[1], "api_key": "none", "max_tokens": 200, "tools": [TOOL]}
    messages = []
    for streams, question in ((False, "What is the weather in Paris?"), (True, "And now?")):
        messages.append({"role": "user", "content": question})
        while True:
            answer = litellm.completion(messages=messages, stream=streams, num_retries=0, **ask)
            if streams:
                answer = litellm.stream_chunk_builder(list(answer))
            message = answer.choices[0].message
            messages.append(message if streams else message.model_dump())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                calls += 1
                city = json.loads(call.function.arguments)["city"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"})
        print(message.content)
print(calls, "calls")
