"""An agent of ten turns with a tool in each, streamed, through the SDKs of OpenAI (chat and Responses), Anthropic and Ollama.
The small model does not call tools by itself: the call is forced, by the choice of the tool or, in Ollama's API, by a schema."""

import json

import anthropic
import ollama
import openai

TURNS = 10
QUESTION = "How warm is it?"
CITIES = ["Oslo", "Rome", "Lima", "Bern", "Kyiv"]


def schema(turn):
    city = {"enum": [CITIES[turn % len(CITIES)]]}
    properties = {"city": city, "day": {"enum": [turn]}}
    return {"type": "object", "properties": properties, "required": ["city", "day"], "additionalProperties": False}


def name(turn):
    return "weather_of" if turn % 2 else "forecast"


def result(arguments):
    return f"{arguments['day'] + 10} degrees in {arguments['city']}"


def chat_completions(base, model):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    messages, calls = [{"role": "user", "content": QUESTION}], []
    for turn in range(TURNS):
        function = {"name": name(turn), "parameters": schema(turn)}
        ask = dict(model=model, messages=messages, temperature=0, max_tokens=200, parallel_tool_calls=False)
        choice = {"type": "function", "function": {"name": name(turn)}}
        with client.chat.completions.stream(**ask, tools=[{"type": "function", "function": function}], tool_choice=choice) as stream:
            final = stream.get_final_completion().choices[0]
        (call,) = final.message.tool_calls
        assert final.finish_reason == "tool_calls", final
        arguments = json.loads(call.function.arguments)
        calls.append((call.function.name, arguments))
        asked = {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [asked]}, {"role": "tool", "tool_call_id": call.id, "content": result(arguments)}]
    last = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)
    return calls, last.choices[0].message.content


def responses(base, model):
    """Each turn continues the stored response before."""
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    items, previous, calls = [{"role": "user", "content": QUESTION}], None, []
    for turn in range(TURNS):
        tool = {"type": "function", "name": name(turn), "parameters": schema(turn), "strict": True}
        ask = dict(model=model, input=items, temperature=0, max_output_tokens=200, parallel_tool_calls=False)
        choice = {"type": "function", "name": name(turn)}
        with client.responses.stream(**ask, tools=[tool], tool_choice=choice, previous_response_id=previous) as stream:
            final = stream.get_final_response()
        (call,) = [item for item in final.output if item.type == "function_call"]
        arguments = json.loads(call.arguments)
        calls.append((call.name, arguments))
        items, previous = [{"type": "function_call_output", "call_id": call.call_id, "output": result(arguments)}], final.id
    last = client.responses.create(model=model, input=items, temperature=0, max_output_tokens=8, previous_response_id=previous)
    kept = client.responses.retrieve(last.id)
    assert kept.output_text == last.output_text and kept.usage == last.usage
    kinds = [item.type for item in client.responses.input_items.list(last.id, order="asc", limit=7)]
    assert kinds == ["message"] + ["function_call", "function_call_output"] * TURNS, kinds
    client.responses.delete(last.id)
    try:
        client.responses.retrieve(last.id)
        raise AssertionError("a deleted response is found")
    except openai.NotFoundError as error:
        assert error.code == "response_not_found"
    return calls, last.output_text


def messages_api(base, model):
    client = anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key="none", max_retries=0)
    messages, calls = [{"role": "user", "content": QUESTION}], []
    greedy = dict(model=model, extra_body=dict(temperature=0))
    for turn in range(TURNS):
        tool = {"name": name(turn), "input_schema": schema(turn), "cache_control": {"type": "ephemeral"}}
        choice = {"type": "tool", "name": name(turn), "disable_parallel_tool_use": True}
        with client.messages.stream(**greedy, messages=messages, max_tokens=200, tools=[tool], tool_choice=choice) as stream:
            final = stream.get_final_message()
        (call,) = [block for block in final.content if block.type == "tool_use"]
        assert final.stop_reason == "tool_use", final
        calls.append((call.name, call.input))
        used = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}
        answered = {"type": "tool_result", "tool_use_id": call.id, "content": result(call.input)}
        messages += [{"role": "assistant", "content": [used]}, {"role": "user", "content": [answered]}]
    last = client.messages.create(**greedy, messages=messages, max_tokens=8)
    count = client.messages.count_tokens(model=model, messages=messages)
    assert count.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens
    return calls, last.content[0].text


def ollama_chat(base, model):
    client = ollama.Client(host=base.removesuffix("/v1"))
    messages, calls = [{"role": "user", "content": QUESTION}], []
    for turn in range(TURNS):
        tool = {"type": "function", "function": {"name": name(turn), "description": "", "parameters": schema(turn)}}
        options = dict(temperature=0, num_predict=200)
        # with a schema an answer is the arguments
        pieces = client.chat(model=model, messages=messages, format=schema(turn), options=options, stream=True)
        arguments = json.loads("".join(piece.message.content or "" for piece in pieces))
        calls.append((name(turn), arguments))
        asked = {"function": {"name": name(turn), "arguments": arguments}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [asked]}, {"role": "tool", "tool_name": name(turn), "content": result(arguments)}]
        assert client.chat(model=model, messages=messages, tools=[tool], options=dict(temperature=0, num_predict=1)).done
    last = client.chat(model=model, messages=messages, options=dict(temperature=0, num_predict=8))
    return calls, last.message.content


def with_agents(base):
    model = openai.OpenAI(base_url=base, api_key="none").models.list().data[0].id
    expected = [(name(turn), {"city": CITIES[turn % len(CITIES)], "day": turn}) for turn in range(TURNS)]
    for agent in [chat_completions, responses, messages_api, ollama_chat]:
        calls, answer = agent(base, model)
        assert calls == expected and answer, (agent.__name__, calls, answer)
