"""outlines, unmodified: `python outlines_client.py URL`. Every output must be of the type that was asked for."""

import json
import re
import sys
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)


client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
name = client.models.list().data[0].id
ask = {"max_tokens": 80, "seed": 1}
for model in (outlines.from_vllm(client, name), outlines.from_openai(client, name)):
    Person(**json.loads(model("Who are you?", Person, **ask)))
model = outlines.from_vllm(client, name)
assert model("Is the sky blue?", Literal["yes", "no"], **ask) in ("yes", "no")
assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", model("What day is it?", Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"), **ask))
assert re.fullmatch(r"\d{1,3}\+\d{1,3}", model("A sum", CFG('start: N "+" N\nN: /[0-9]{1,3}/\n'), **ask))
assert "".join(model.stream("Is the sky blue?", Literal["yes", "no"], **ask)) in ("yes", "no")
print("json, choice, regex, grammar, stream")
