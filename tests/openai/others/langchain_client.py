"""LangChain, unmodified: `python langchain_client.py URL`. Loops of create_agent (langgraph), whole and streamed."""

import sys

import openai
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

called = []


def weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return f"sunny in {city}"


name = openai.OpenAI(base_url=sys.argv[1], api_key="none").models.list().data[0].id
model = ChatOpenAI(model=name, base_url=sys.argv[1], api_key="none", max_tokens=200, max_retries=0)
agent = create_agent(model, [weather], system_prompt="Use tools.")
whole = agent.invoke({"messages": [{"role": "user", "content": "What is the weather in Paris?"}]})["messages"]
print(whole[-1].content)
again = [*whole, {"role": "user", "content": [{"type": "text", "text": "And now?"}]}]
*_, last = agent.stream({"messages": again}, stream_mode=["messages", "values"])
print(last[1]["messages"][-1].content)
print(len(called), "calls")
