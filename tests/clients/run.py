#!/usr/bin/env python3
"""Real clients against a server: openai, langchain-openai, litellm. Needs these packages and the binary's path.

    python3 tests/clients/run.py target/release/starling
"""

import os
import struct
import subprocess
import sys
import tempfile
import urllib.request

import openai
from prometheus_client import parser as prometheus
from prometheus_client.openmetrics import parser as openmetrics

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
    # the client asks for base64 by itself
    vectors = client.embeddings.create(model=MODEL, input=["a", "b"])
    plain = client.embeddings.create(model=MODEL, input="a", encoding_format="float")
    same = [struct.pack("<256f", *data.embedding) for data in (vectors.data[0], plain.data[0])]
    assert same[0] == same[1]
    for wrong, kind, code, param in [
        (dict(ask, model="x"), openai.NotFoundError, "model_not_found", "model"),
        (dict(ask, messages=[]), openai.BadRequestError, None, "messages"),
        (dict(ask, max_tokens=10**6), openai.BadRequestError, "context_length_exceeded", "messages"),
        (dict(ask, temperature=3), openai.BadRequestError, None, "temperature"),
    ]:
        try:
            client.chat.completions.create(**wrong)
            raise AssertionError(f"{wrong} is answered")
        except kind as e:
            assert (e.code, e.param) == (code, param) and e.request_id, e


def with_langchain(base):
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(model=MODEL, base_url=base, api_key="none", max_tokens=12, temperature=0, seed=1, max_retries=0)
    whole = chat.invoke("Hi").content
    assert whole and "".join(piece.content for piece in chat.stream("Hi")) == whole
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]["content"]
    assert logprobs[0]["top_logprobs"]
    vectors = OpenAIEmbeddings(model=MODEL, base_url=base, api_key="none", check_embedding_ctx_length=False)
    assert len(vectors.embed_query("a")) == 256


def with_litellm(base):
    # or it asks another host for prices
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    ask = dict(model=f"openai/{MODEL}", api_base=base, api_key="none", messages=HELLO, max_tokens=12, temperature=0, seed=1)
    whole = litellm.completion(**ask).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)]
    assert whole and "".join(pieces) == whole
    try:
        litellm.completion(**dict(ask, model="openai/x"))
        raise AssertionError("an unknown model is answered")
    except litellm.NotFoundError:
        pass


def with_metrics(base):
    url = base.removesuffix("/v1") + "/metrics"

    def get(accept):
        return urllib.request.urlopen(urllib.request.Request(url, headers={"accept": accept})).read().decode()

    new = list(openmetrics.text_string_to_metric_families(get("application/openmetrics-text; version=1.0.0")))
    old = list(prometheus.text_string_to_metric_families(get("text/plain")))
    names = {family.name for family in new}
    assert {"starling_requests", "vllm:num_requests_waiting", "vllm:cache_config_info"} <= names, names
    assert len(old) == len(new)


def with_tls(base):
    assert base.startswith("https://")
    client = openai.OpenAI(base_url=base, api_key="none", http_client=openai.DefaultHttpxClient(verify=certificate))
    pieces = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces)
    try:
        openai.OpenAI(base_url=base, api_key="none", max_retries=0).models.list()
        raise AssertionError("a certificate that nobody vouches for is taken")
    except openai.APIConnectionError:
        pass


def serve(tests, *more):
    arguments = [sys.argv[1], "serve", "--port", "0", "--log-level", "error", "--metrics-compat", "vllm", *more]
    server = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        base = server.stdout.readline().strip() + "/v1"
        for test in tests:
            test(base)
            print(f"{test.__name__.removeprefix('with_')}: ok", flush=True)
    finally:
        server.terminate()
    assert server.wait(30) == 0, "no clean end"


def main():
    global certificate
    serve([with_openai, with_langchain, with_litellm, with_metrics])
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = f"{folder}/cert.pem", f"{folder}/key.pem"
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
        subprocess.run([*make.split(), *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        serve([with_tls], "--tls-cert", certificate, "--tls-key", key)


main()
