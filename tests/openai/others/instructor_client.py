"""instructor, unmodified: `python instructor_client.py URL`. Prints how many of ten answers are what was asked for."""

import sys

import instructor
import openai
from pydantic import BaseModel, Field

ASKED = [{"role": "user", "content": "Extract: Jason is 25 years old."}]


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)


client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    create = instructor.from_openai(client, mode=mode).chat.completions.create
    asked = {"model": model, "response_model": Person, "messages": ASKED, "max_tokens": 80, "max_retries": 0}
    people = [create(**asked, seed=seed) for seed in range(10)]
    print(mode.value, sum(isinstance(each, Person) for each in people))
