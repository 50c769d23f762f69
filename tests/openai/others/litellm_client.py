"""litellm, unmodified: `python litellm_client.py URL`. Streamed and not, the text must be the same."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks GitHub for prices

import litellm

NAME = "SmolLM2-135M-Instruct"
HELLO = [{"role": "user", "content": "Hello"}]
for provider in ("openai", "hosted_vllm"):
    ask = {"model": f"{provider}/{NAME}", "api_base": sys.argv[1], "api_key": "none", "max_tokens": 16}
    ask |= {"temperature": 0, "num_retries": 0}
    whole = litellm.completion(messages=HELLO, **ask)
    assert whole.usage.completion_tokens > 0
    stream = litellm.completion(messages=HELLO, stream=True, stream_options={"include_usage": True}, **ask)
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content, deltas
    provider = {"openai": "text-completion-openai"}.get(provider, provider)
    assert litellm.text_completion(prompt="Paris is", **{**ask, "model": f"{provider}/{NAME}"}).choices[0].text
    try:
        litellm.completion(messages=HELLO, logit_bias={"999999": 1}, **ask)
        raise SystemExit("a bias outside the vocabulary was taken")
    except litellm.BadRequestError as refused:
        assert "token id 999999 is outside the vocabulary" in str(refused)
print("chat, stream, completion, refusal")
