"""An OTLP collector, and requests whose spans it checks."""

import http.server
import json
import threading
import urllib.error
import urllib.request

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

MODEL = "starling-tiny-q8_0"
SECRET = "xylophone"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
STAGES = ["tokenize", "queue", "prefill", "decode", "sample", "stream"]


class Collector:
    """An OTLP endpoint on a free port that records the request bodies."""

    def __init__(self):
        collector = self
        self.bodies, self.spans, self.resources = [], [], []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()

    def take(self, body):
        self.bodies.append(body)
        for of in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({a.key: a.value.string_value for a in of.resource.attributes})
            self.spans += [span for scope in of.scope_spans for span in scope.spans]

    def check(self):
        """Checks the spans of `with_requests`; call it after the shutdown, which exports the last ones."""
        assert all(r["service.name"] == "starling" and r["service.version"] for r in self.resources) and self.resources
        words = [SECRET.encode(), *(text.encode() for text in ANSWERS)]
        assert not any(word in body for word in words for body in self.bodies), "text of a request in its trace"
        roots = {attribute(span, "request_id"): span for span in self.spans if span.name == "gateway"}
        assert set(roots) == {"streamed", "whole", "two", "wrong", "vectors"}, roots.keys()
        for name, stages in [
            ("streamed", STAGES),
            ("whole", STAGES),
            ("two", ["tokenize", "queue", "queue", "prefill", "prefill", "decode", "decode", "sample", "sample", "stream"]),
            ("wrong", ["stream"]),
            ("vectors", ["tokenize", "embed", "stream"]),
        ]:
            root = roots[name]
            children = [span for span in self.spans if span.parent_span_id == root.span_id]
            assert sorted(span.name for span in children) == sorted(stages), (name, [s.name for s in children])
            assert all(span.trace_id == root.trace_id for span in children)
            for span in children:
                start, end = span.start_time_unix_nano, span.end_time_unix_nano
                assert root.start_time_unix_nano <= start <= end <= root.end_time_unix_nano, (name, span)
            assert attribute(root, "tenant") == "default" and attribute(root, "url.path").startswith("/v1/")
            assert root.kind == root.SPAN_KIND_SERVER
        # the span is part of the client's trace
        assert (roots["streamed"].trace_id.hex(), roots["streamed"].parent_span_id.hex()) == (TRACE, PARENT)
        assert not roots["whole"].parent_span_id and roots["whole"].trace_id.hex() != TRACE
        assert attribute(roots["streamed"], "session") == "s-1"
        assert [attribute(roots[n], "http.response.status_code") for n in ("whole", "wrong")] == [200, 404]
        by_name = {span.name: span for span in self.spans if span.parent_span_id == roots["streamed"].span_id}
        ordered = [by_name[name] for name in ["tokenize", "queue", "prefill", "decode"]]
        for before, after in zip(ordered, ordered[1:]):
            assert before.end_time_unix_nano <= after.start_time_unix_nano, (before, after)
        assert attribute(by_name["decode"], "tokens") == 12 and attribute(by_name["prefill"], "prompt_tokens") > 0
        for name in "decode", "sample":
            span = by_name[name]
            assert 0 < attribute(span, "busy_ms") * 1e6 <= span.end_time_unix_nano - span.start_time_unix_nano


def attribute(span, key):
    """The value of an attribute of any type."""
    for a in span.attributes:
        if a.key == key:
            return getattr(a.value, a.value.WhichOneof("value"))
    raise AssertionError(f"no {key} in {span}")


ANSWERS = []


def with_requests(base):
    def post(path, name, headers={}, **body):
        headers = {"content-type": "application/json", "x-request-id": name, **headers}
        request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request).read().decode()

    ask = dict(messages=[{"role": "user", "content": f"Tell me of a {SECRET}"}], max_tokens=12, seed=1, ignore_eos=True)
    mine = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-session-id": "s-1"}
    post("/chat/completions", "streamed", mine, stream=True, **ask)
    whole = json.loads(post("/chat/completions", "whole", **ask))
    ANSWERS.append(whole["choices"][0]["message"]["content"])
    json.loads(post("/completions", "two", prompt=f"The {SECRET}", n=2, max_tokens=4, ignore_eos=True))
    post("/embeddings", "vectors", input=[SECRET, "a"])
    try:
        post("/chat/completions", "wrong", **dict(ask, model="x"))
        raise AssertionError("an unknown model is answered")
    except urllib.error.HTTPError as e:
        assert e.code == 404
    # the client's traceparent says: not sampled
    post("/completions", "unsampled", {"traceparent": f"00-{'a' * 32}-{PARENT}-00"}, prompt=SECRET, max_tokens=2)
