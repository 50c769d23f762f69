"""LlamaIndex: `python llama_index_client.py URL`. Loops of FunctionAgent and ReActAgent, whole and streamed."""

import asyncio
import sys

import openai
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike

called = []


def weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return f"sunny in {city}"


async def main() -> None:
    name = openai.OpenAI(base_url=sys.argv[1], api_key="none").models.list().data[0].id
    common = {"model": name, "api_base": sys.argv[1], "api_key": "none", "is_chat_model": True, "max_retries": 0}
    for kind, calls in ((FunctionAgent, True), (ReActAgent, False)):
        llm = OpenAILike(is_function_calling_model=calls, max_tokens=200, **common)
        for streaming in (False, True):
            agent = kind(tools=[weather], llm=llm, system_prompt="Use tools.", streaming=streaming)
            memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
            print(await agent.run("What is the weather in Paris?", memory=memory))
            print(await agent.run("And now?", memory=memory))
    print(len(called), "calls")


asyncio.run(main())
