"""pydantic-ai, unmodified: `python pydantic_ai_client.py URL`. Loops, whole and then streamed."""

import asyncio
import sys

import openai
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

called = []


def weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return f"sunny in {city}"


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    name = (await client.models.list()).data[0].id
    model = OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, instructions="Use tools.", tools=[weather], model_settings={"max_tokens": 200})
    whole = await agent.run("What is the weather in Paris?")
    print(whole.output)
    async with agent.run_stream("And now?", message_history=whole.all_messages()) as streamed:
        print(await streamed.get_output())
    print(len(called), "calls")


asyncio.run(main())
