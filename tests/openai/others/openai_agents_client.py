"""openai-agents, unmodified: `python openai_agents_client.py URL [required]`. Loops, whole and then streamed.

With `required`, the model must call a tool; the agent resets that on its second turn.
"""

import asyncio
import sys
from typing import Literal

import agents
import openai

agents.set_tracing_disabled(True)
called = []


@agents.function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    called.append(city)
    return f"sunny in {city}"


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    name = (await client.models.list()).data[0].id
    choice = sys.argv[2] if len(sys.argv) > 2 else None
    agent = agents.Agent(
        "Weather",
        instructions="Use tools.",
        model=agents.OpenAIChatCompletionsModel(name, client),
        model_settings=agents.ModelSettings(tool_choice=choice, max_tokens=80, temperature=0),
        tools=[weather],
    )
    whole = await agents.Runner.run(agent, "What is the weather in Paris?")
    print(whole.final_output)
    again = [*whole.to_input_list(), {"role": "user", "content": "And now?"}]
    streamed = agents.Runner.run_streamed(agent, again)
    async for _ in streamed.stream_events():
        pass
    print(streamed.final_output)
    print(len(called), "calls")


asyncio.run(main())
