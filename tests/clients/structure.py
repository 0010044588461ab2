"""Structured answers validated by jsonschema, and parsed into types and tool calls by OpenAI's client."""

import enum
import json

import jsonschema
import openai
import pydantic

# bounded strings and arrays, so that each answer ends
SCHEMAS = {
    "empty object": {"type": "object", "additionalProperties": False},
    "object": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 12},
            "pages": {"type": "integer", "minimum": 1, "maximum": 999},
            "price": {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25},
            "new": {"type": "boolean"},
            "note": {"type": ["string", "null"], "maxLength": 8},
        },
        "required": ["title", "pages", "price", "new", "note"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"const": "x"}, "c": {"enum": [1, "two", False, None, ["e"]]}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "arrays": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "integer", "minimum": -5, "maximum": 5}],
        "items": {"type": "string", "pattern": "^[a-f]{2,4}$"},
        "minItems": 3,
        "maxItems": 5,
    },
    "choices": {
        "anyOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["kind", "n"], "additionalProperties": False},
            {"type": "object", "properties": {"kind": {"const": "b"}, "s": {"type": "string", "maxLength": 3}}, "required": ["kind", "s"], "additionalProperties": False},
        ]
    },
    "references": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}},
                "required": ["v", "left"],
                "additionalProperties": False,
            },
            "leaf": {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"], "additionalProperties": False},
        },
        "$ref": "#/$defs/tree",
    },
    "formats": {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}, "at": {"type": "string", "format": "ipv4"}},
        "required": ["day", "id", "at"],
        "additionalProperties": False,
    },
    "merged": {
        "allOf": [
            {"type": "object", "properties": {"x": {"type": "integer", "minimum": 3, "maximum": 12}}, "required": ["x"]},
            {"type": "object", "properties": {"x": {"maximum": 7}, "y": {"type": "boolean"}}, "required": ["y"], "additionalProperties": False},
        ]
    },
    "unicode": {"type": "object", "properties": {"größe \"é\"": {"enum": ["klein", "groß", "日本"]}}, "required": ["größe \"é\""], "additionalProperties": False},
}


class Kind(enum.Enum):
    CAT = "cat"
    DOG = "dog"


class Toy(pydantic.BaseModel):
    colour: str = pydantic.Field(max_length=6)


class Pet(pydantic.BaseModel):
    kind: Kind
    age: int = pydantic.Field(ge=0, le=30)
    toys: list[Toy] = pydantic.Field(max_length=2)
    owner: Toy | None


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Kind
    days: int = pydantic.Field(ge=1, le=9)


def with_schemas(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    ask = dict(model=model, messages=[{"role": "user", "content": "Tell me something"}], max_tokens=300)
    for name, schema in SCHEMAS.items():
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        validator.check_schema(schema)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        for seed, temperature in enumerate([0, 0.7, 1, 1, 1.5, 2]):
            this = dict(ask, response_format=form, seed=seed, temperature=temperature)
            whole = client.chat.completions.create(**this).choices[0]
            assert whole.finish_reason == "stop", (name, whole)
            validator.validate(json.loads(whole.message.content))
            pieces = client.chat.completions.create(**this, stream=True)
            assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.message.content, name
            text = client.completions.create(model=model, prompt="So: ", max_tokens=300, seed=seed, temperature=temperature, extra_body={"structured_outputs": {"json": schema}})
            validator.validate(json.loads(text.choices[0].text))
    for seed in range(4):
        pet = client.chat.completions.parse(**ask, seed=seed, response_format=Pet).choices[0].message.parsed
        assert isinstance(pet, Pet), pet
    with client.chat.completions.stream(**ask, seed=1, response_format=Pet) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)
    try:
        client.chat.completions.parse(**dict(ask, max_tokens=5), response_format=Pet)
        raise AssertionError("an answer that is cut is read")
    except openai.LengthFinishReasonError:
        pass
    try:
        client.chat.completions.create(**ask, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}})
        raise AssertionError("a schema that cannot be followed is taken")
    except openai.BadRequestError as e:
        assert (e.code, e.param) == ("invalid_grammar", "response_format.json_schema.schema"), e


def with_forced_calls(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    tool = openai.pydantic_function_tool(Weather, name="weather_of")
    ask = dict(model=model, messages=[{"role": "user", "content": "Warm?"}], tools=[tool], max_tokens=100)
    validator = jsonschema.Draft202012Validator(tool["function"]["parameters"])
    for seed in range(4):
        for choice in [{"type": "function", "function": {"name": "weather_of"}}, "required"]:
            done = client.chat.completions.parse(**ask, tool_choice=choice, parallel_tool_calls=False, seed=seed).choices[0]
            (call,) = done.message.tool_calls
            assert call.function.name == "weather_of" and done.finish_reason == "tool_calls", done
            validator.validate(json.loads(call.function.arguments))
            assert isinstance(call.function.parsed_arguments, Weather)
