"""Python frameworks that speak to servers through SDKs of others: litellm and pydantic-ai.
The small model does not call tools by itself: the call is forced."""

import json
import os
from typing import Literal

import openai
import pydantic

HELLO = [{"role": "user", "content": "Hi"}]


class Weather(pydantic.BaseModel, extra="forbid"):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


def greedy_answer(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=12, temperature=0)
    return model, answer.choices[0].message.content


def with_litellm(base):
    """OpenAI's, Anthropic's and Ollama's API: the same greedy answer, structured output and calls."""
    # otherwise litellm downloads a price list
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    root, (model, expected) = base.removesuffix("/v1"), greedy_answer(base)
    function = {"name": "weather_of", "parameters": Weather.model_json_schema()}
    choice = {"type": "function", "function": {"name": "weather_of"}}
    # without the last, litellm looks for tools of MCP in its own proxy, which is not installed
    forced = dict(tools=[{"type": "function", "function": function}], tool_choice=choice, _skip_mcp_handler=True)
    for api, at in {"openai": base, "anthropic": root, "ollama_chat": root}.items():
        ask = dict(model=f"{api}/{model}", api_base=at, api_key="none", messages=HELLO, temperature=0)
        whole = litellm.completion(**ask, max_tokens=12)
        assert whole.choices[0].message.content == expected, (api, whole)
        pieces = list(litellm.completion(**ask, max_tokens=12, stream=True, stream_options={"include_usage": True}))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected, api
        used = whole.usage.prompt_tokens, whole.usage.completion_tokens
        assert used == (pieces[-1].usage.prompt_tokens, pieces[-1].usage.completion_tokens), (api, pieces[-1])
        weather = litellm.completion(**ask, max_tokens=200, response_format=Weather).choices[0].message.content
        assert Weather.model_validate_json(weather), (api, weather)
        try:
            litellm.completion(**dict(ask, model=f"{api}/x"))
            raise AssertionError(f"an unknown model is answered: {api}")
        except litellm.NotFoundError:
            pass
        # Ollama's API cannot force a call
        if api == "ollama_chat":
            continue
        done = litellm.completion(**ask, **forced, max_tokens=200).choices[0]
        (call,) = done.message.tool_calls
        assert done.finish_reason == "tool_calls" and call.function.name == "weather_of", (api, done)
        arguments = Weather.model_validate_json(call.function.arguments)
        stream = litellm.completion(**ask, **forced, max_tokens=200, stream=True)
        text = "".join(call.function.arguments or "" for piece in stream for call in piece.choices[0].delta.tool_calls or [])
        assert Weather.model_validate_json(text) == arguments, (api, text)
    openais = litellm.embedding(model=f"openai/{model}", api_base=base, api_key="none", input=["a"]).data[0]["embedding"]
    ollamas = litellm.embedding(model=f"ollama/{model}", api_base=root, input=["a"]).data[0]["embedding"]
    assert len(openais) == len(ollamas) == 256


def with_pydantic_ai(base):
    """OpenAI's APIs: the same greedy answer, structured output by a schema and by a tool, and an answer that is sent back."""
    from pydantic_ai import Agent, ModelRetry, NativeOutput, ToolOutput
    from pydantic_ai.models.ollama import OllamaModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.ollama import OllamaProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    name, expected = greedy_answer(base)
    provider = OpenAIProvider(base_url=base, api_key="none")
    short, long = dict(temperature=0, max_tokens=12), dict(temperature=0, max_tokens=200)
    for model in [
        OpenAIChatModel(name, provider=provider),
        OpenAIResponsesModel(name, provider=provider),
        OllamaModel(name, provider=OllamaProvider(base_url=base)),
    ]:
        agent = Agent(model)
        assert agent.run_sync("Hi", model_settings=short).output == expected, model
        stream = agent.run_stream_sync("Hi", model_settings=short)
        assert "".join(stream.stream_text(delta=True)) == expected, model
        native = Agent(model, output_type=NativeOutput(Weather)).run_sync("Warm?", model_settings=long)
        assert isinstance(native.output, Weather) and native.usage.output_tokens, model
        # the validator sends the first answer back: its arguments and the complaint are in the second request
        strict = Agent(model, output_type=ToolOutput(Weather), retries=1)
        seen = []

        @strict.output_validator
        def twice(weather: Weather) -> Weather:
            seen.append(weather)
            if len(seen) == 1:
                raise ModelRetry("Are you sure?")
            return weather

        done = strict.run_sync("Warm?", model_settings=dict(long, parallel_tool_calls=False))
        assert done.output == seen[1] and done.usage.requests == 2, (model, seen)
        kinds = [part.part_kind for message in done.all_messages() for part in message.parts]
        assert kinds == ["user-prompt", "tool-call", "retry-prompt", "tool-call", "tool-return"], (model, kinds)
