#!/usr/bin/env python3
"""Third-party clients against a server: openai in Python and Node, anthropic, ollama, LangChain's classes for them,
litellm, pydantic-ai, Vercel's AI SDK, curl, promtool, schemathesis, jsonschema, and an OTLP collector. Needs these
packages, the programs in PATH, and the path of the binary.

    python3 tests/clients/run.py target/release/starling
"""

import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import urllib.request

import openai
from prometheus_client import parser as prometheus
from prometheus_client.openmetrics import parser as openmetrics

from agents import with_agents
from frameworks import with_litellm, with_pydantic_ai
from structure import with_forced_calls, with_schemas
from traces import Collector, with_requests

HERE = pathlib.Path(__file__).parent
MODEL = "starling-tiny-q8_0"
HELLO = [{"role": "user", "content": "Hi"}]


def with_openai(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "starling"
    ask = dict(model=MODEL, messages=HELLO, max_tokens=12, seed=3)
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2, n=2)
    assert len(whole.choices) == 2 and whole.usage.prompt_tokens > 0 and whole.system_fingerprint
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    text, usage = "", None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    several = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=4, logprobs=2, seed=1)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert len(several.choices[0].logprobs.tokens) == 4
    stopped = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=200, temperature=0, stop=["Lena"])
    assert stopped.choices[0].finish_reason == "stop" and "Lena" not in stopped.choices[0].text
    # the client requests base64 by default
    vectors = client.embeddings.create(model=MODEL, input=["a", "b"])
    plain = client.embeddings.create(model=MODEL, input="a", encoding_format="float")
    same = [struct.pack("<256f", *data.embedding) for data in (vectors.data[0], plain.data[0])]
    assert same[0] == same[1]
    for wrong, kind, code, param in [
        (dict(ask, model="x"), openai.NotFoundError, "model_not_found", "model"),
        (dict(ask, messages=[]), openai.BadRequestError, None, "messages"),
        (dict(ask, messages=[{"role": "user", "content": "dog " * 9000}]), openai.BadRequestError, "context_length_exceeded", "messages"),
        (dict(ask, temperature=3), openai.BadRequestError, None, "temperature"),
    ]:
        try:
            client.chat.completions.create(**wrong)
            raise AssertionError(f"{wrong} is answered")
        except kind as e:
            assert (e.code, e.param) == (code, param) and e.request_id, e


def with_node(base):
    subprocess.run(["node", HERE / "openai.mjs", base, MODEL], check=True)


def with_vercel(base):
    subprocess.run(["node", HERE / "vercel.mjs", base, MODEL], check=True)


def with_curl(base):
    """The raw bytes of event streams."""
    body = json.dumps(dict(model=MODEL, messages=HELLO, max_tokens=12, seed=3, stream=True))
    ask = ["curl", "-sSN", "--fail", "-D", "-", "-H", "content-type: application/json", "-d", body, f"{base}/chat/completions"]
    texts = set()
    for more in [["--http1.1", "--raw"], ["--http1.1"], ["--http2-prior-knowledge"], ["--http1.1", "--compressed"]]:
        out = subprocess.run(ask + more, check=True, capture_output=True).stdout
        head, _, stream = out.partition(b"\r\n\r\n")
        assert b"text/event-stream; charset=utf-8" in head, head
        if "--raw" in more:
            assert b"transfer-encoding: chunked" in head.lower(), head
            pieces, rest = [], stream
            while rest:
                size, _, rest = rest.partition(b"\r\n")
                n = int(size, 16)
                assert rest[n:n + 2] == b"\r\n"
                pieces, rest = pieces + [rest[:n]], rest[n + 2:]
            assert pieces.pop() == b"" and all(piece.endswith(b"\n\n") for piece in pieces), "an event is cut"
            stream = b"".join(pieces)
        assert stream.endswith(b"\n\n") and b"\r" not in stream
        events = stream[:-2].split(b"\n\n")
        assert all(event.startswith(b"data: ") and b"\n" not in event for event in events), events
        assert events.pop() == b"data: [DONE]"
        choices = [json.loads(event[6:])["choices"][0] for event in events]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""} and choices[-1]["finish_reason"]
        texts.add("".join(choice["delta"].get("content", "") for choice in choices))
    assert len(texts) == 1 and texts.pop(), texts


def with_langchain(base):
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(model=MODEL, base_url=base, api_key="none", max_tokens=12, temperature=0, seed=1, max_retries=0)
    whole = chat.invoke("Hi").content
    assert whole and "".join(piece.content for piece in chat.stream("Hi")) == whole
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]["content"]
    assert logprobs[0]["top_logprobs"]
    vectors = OpenAIEmbeddings(model=MODEL, base_url=base, api_key="none", check_embedding_ctx_length=False)
    assert len(vectors.embed_query("a")) == 256


def with_metrics(base):
    url = base.removesuffix("/v1") + "/metrics"

    def get(accept):
        return urllib.request.urlopen(urllib.request.Request(url, headers={"accept": accept})).read().decode()

    new = list(openmetrics.text_string_to_metric_families(get("application/openmetrics-text; version=1.0.0")))
    old = list(prometheus.text_string_to_metric_families(get("text/plain")))
    names = {family.name for family in new}
    assert {"starling_requests", "vllm:num_requests_waiting", "vllm:cache_config_info"} <= names, names
    assert len(old) == len(new)


def promtool(base):
    metrics = urllib.request.urlopen(base.removesuffix("/v1") + "/metrics").read()
    out = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True)
    return out.returncode, (out.stdout + out.stderr).decode().splitlines()


def with_promtool(base):
    code, lines = promtool(base)
    # promtool reserves colons for recording rules, but vLLM's names have them; it must have no other complaint
    others = [line for line in lines if not (line.startswith("vllm:") and line.endswith("should not contain ':'"))]
    assert lines and not others and code in (0, 3), (code, lines)


def with_promtool_alone(base):
    assert promtool(base) == (0, []), promtool(base)


def with_schemathesis(base):
    """Requests generated from the OpenAPI document: no server error, and each response conforms to it."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    run = [pathlib.Path(sys.executable).parent / "st", "run", base.removesuffix("/v1") + "/openapi.json", "--checks", checks]
    with tempfile.TemporaryDirectory() as folder:
        # it writes into its working directory
        out = subprocess.run([*run, *SCHEMATHESIS], capture_output=True, text=True, cwd=folder)
    assert out.returncode == 0, out.stdout[-8000:] + out.stderr


# bounded and deterministic
SCHEMATHESIS = "--max-examples 12 --max-time 80 --generation-deterministic --no-color".split()


def with_stored(base):
    """OpenAI's client stores, finds, changes and deletes completions."""
    completions = openai.OpenAI(base_url=base, api_key="none", max_retries=0).chat.completions
    ask = dict(model=MODEL, messages=HELLO, max_tokens=8, seed=3, store=True)
    whole = completions.create(**ask, metadata={"n": "1"}, logprobs=True)
    pieces = list(completions.create(**ask, metadata={"n": "2"}, stream=True))
    found = completions.retrieve(whole.id)
    assert found.choices == whole.choices and found.usage == whole.usage and found.metadata == {"n": "1"}
    streamed = completions.retrieve(pieces[0].id).choices[0].message.content
    assert streamed == "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    # one page after the other
    assert [kept.id for kept in completions.list(limit=1)] == [whole.id, pieces[0].id]
    assert [kept.id for kept in completions.list(order="desc")] == [pieces[0].id, whole.id]
    assert [kept.id for kept in completions.list(metadata={"n": "2"})] == [pieces[0].id]
    messages = list(completions.messages.list(whole.id, limit=1))
    assert [(message.role, message.content) for message in messages] == [(m["role"], m["content"]) for m in HELLO]
    assert completions.update(whole.id, metadata={"n": "3"}).metadata == {"n": "3"}
    assert completions.delete(whole.id).deleted
    try:
        completions.retrieve(whole.id)
        raise AssertionError("a deleted completion is found")
    except openai.NotFoundError as error:
        assert error.code == "completion_not_found"


def with_tls(base):
    assert base.startswith("https://")
    client = openai.OpenAI(base_url=base, api_key="none", http_client=openai.DefaultHttpxClient(verify=certificate))
    pieces = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces)
    try:
        openai.OpenAI(base_url=base, api_key="none", max_retries=0).models.list()
        raise AssertionError("an untrusted certificate is accepted")
    except openai.APIConnectionError:
        pass


def with_vendors(base):
    """The same greedy answer through the SDKs of OpenAI (Responses), Anthropic and Ollama."""
    import anthropic
    import ollama

    root, ask = base.removesuffix("/v1"), dict(model=MODEL, temperature=0)
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    expected = client.chat.completions.create(**ask, messages=HELLO, max_tokens=12).choices[0].message.content
    stream = client.responses.create(**ask, input="Hi", max_output_tokens=12, stream=True)
    assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == expected
    messages = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0).messages
    # this SDK has no argument for the temperature
    greedy = dict(model=MODEL, messages=HELLO, max_tokens=12, extra_body=dict(temperature=0))
    with messages.stream(**greedy) as stream:
        assert "".join(stream.text_stream) == expected
    options = dict(temperature=0, num_predict=12)
    pieces = ollama.Client(host=root).chat(model=MODEL, messages=HELLO, options=options, stream=True)
    assert "".join(piece.message.content for piece in pieces) == expected


def with_langchain_vendors(base):
    """The same greedy answer through LangChain's classes for OpenAI, Anthropic and Ollama, and their structured output."""
    from typing import Literal

    import pydantic
    from langchain_anthropic import ChatAnthropic
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI

    class Weather(pydantic.BaseModel):
        """The weather of a city."""

        city: Literal["Oslo", "Rome"]

    root, ask = base.removesuffix("/v1"), dict(model=MODEL, temperature=0)
    chats = [
        ChatOpenAI(**ask, base_url=base, api_key="none", max_tokens=60, max_retries=0),
        ChatOpenAI(**ask, base_url=base, api_key="none", max_tokens=60, max_retries=0, use_responses_api=True),
        ChatAnthropic(**ask, base_url=root, api_key="none", max_tokens=60, max_retries=0),
        ChatOllama(**ask, base_url=root, num_predict=60),
    ]
    answers = {chat.invoke("Hi").text for chat in chats} | {"".join(piece.text for piece in chat.stream("Hi")) for chat in chats}
    assert len(answers) == 1 and answers.pop(), answers
    for chat in chats:
        weather = chat.with_structured_output(Weather, method="json_schema").invoke("Warm?")
        assert weather.city in ("Oslo", "Rome"), (chat, weather)


def serve(tests, *more):
    arguments = [sys.argv[1], "serve", "--port", "0", "--log-level", "error", *more]
    server = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        base = server.stdout.readline().strip() + "/v1"
        for test in tests:
            test(base)
            print(f"{test.__name__.removeprefix('with_')}: ok", flush=True)
    finally:
        server.terminate()
    assert server.wait(30) == 0, "the server exits with an error"


def main():
    global certificate
    serve([with_openai, with_node, with_curl, with_langchain, with_langchain_vendors, with_vendors, with_metrics, with_promtool], "--metrics-compat", "vllm")
    serve([with_promtool_alone, with_schemas])
    serve([with_forced_calls, with_litellm, with_pydantic_ai, with_vercel], "--chat-template", str(HERE / "../../fixtures/chat/qwen-tools.jinja"))
    with tempfile.TemporaryDirectory() as folder:
        serve([with_stored], "--state-dir", folder)
    with tempfile.TemporaryDirectory() as folder:
        template = str(HERE / "../../fixtures/chat/qwen-tools.jinja")
        serve([with_agents], "--chat-template", template, "--state-dir", folder, "--ctx-size", "4096")
    # short answers and a short timeout, so that generated requests do not hold up each other; slots can be saved, which
    # else is answered with 501, as llama-server does
    with tempfile.TemporaryDirectory() as folder:
        more = ["--state-dir", folder, "--slot-save-path", folder]
        serve([with_schemathesis], "--max-tokens", "16", "--request-timeout", "20", *more)
    with Collector() as collector:
        serve([with_requests], "--otlp-endpoint", collector.url)
        collector.check()
    print("traces: ok", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = f"{folder}/cert.pem", f"{folder}/key.pem"
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
        subprocess.run([*make.split(), *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        serve([with_tls], "--tls-cert", certificate, "--tls-key", key)


main()
