#!/usr/bin/env python3
"""Two servers behind vllm-router (PyPI) and HAProxy. Needs the packages of requirements.txt, haproxy, and the path of the
binary.

    python3 tests/clients/router.py target/release/starling

Concurrent streamed conversations run through each router, and one server gets SIGTERM in the middle. No request may
fail, each conversation must stay on the server that has its prefix cached, and every answer must equal that of a single
server.
"""

import concurrent.futures
import contextlib
import http.client
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time

import openai

MODEL = "starling-tiny-q8_0"
SESSIONS, TURNS, AT_ONCE = 20, 10, 6
SYSTEM = "You write stories for children. They are short, their words are plain, and in the end all is well. " * 3
WORDS = "dog tree bird house boat ball moon fish star hill".split()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self):
        arguments = [sys.argv[1], "serve", "--port", "0", "--log-level", "error", "--max-seqs", "8"]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()

    def end(self):
        """Sends SIGTERM, as orchestrators do; running requests finish."""
        self.process.terminate()
        assert self.process.wait(30) == 0, "no clean end"


@contextlib.contextmanager
def running(*arguments):
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
            assert process.poll() is None, "the router has ended"
        except BaseException:
            log.seek(0)
            print(log.read()[-6000:])
            raise
        finally:
            process.kill()
            process.wait()


def wait_for(port, path):
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "the router does not start"
        time.sleep(0.1)


@contextlib.contextmanager
def vllm_router(policy, servers):
    port, metrics = free_port(), free_port()
    program = pathlib.Path(sys.executable).parent / "vllm-router"
    health = ["--health-check-endpoint", "/readyz", "--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    # retries must last longer than the detection of a stopped server
    health += ["--retry-max-retries", "10", "--cb-failure-threshold", "2", "--log-level", "warning"]
    workers = ["--worker-urls", *(server.url for server in servers), "--worker-startup-check-interval", "1"]
    # route by the prefix tree, not by the load of two small servers
    balance = ["--balance-abs-threshold", "64"] if policy == "cache_aware" else []
    address = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    with running(program, "--policy", policy, *address, *workers, *health, *balance):
        wait_for(port, "/readiness")
        yield f"http://127.0.0.1:{port}/v1"


@contextlib.contextmanager
def haproxy(servers):
    port = free_port()
    lines = "\n".join(f"    server s{i} {server.url.removeprefix('http://')}" for i, server in enumerate(servers))
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as config:
        config.write(HAPROXY.format(port=port, servers=lines))
        config.flush()
        with running("haproxy", "-db", "-f", config.name):
            wait_for(port, "/readyz")
            yield f"http://127.0.0.1:{port}/v1"


# a server in shutdown fails /readyz and refuses new requests with 503: HAProxy sends them to the other server
HAPROXY = """
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    retries 3
    retry-on conn-failure empty-response 503
    option redispatch 1
    option http-buffer-request
frontend front
    bind 127.0.0.1:{port}
    default_backend servers
backend servers
    balance hdr(X-Session-ID)
    hash-type consistent
    option httpchk GET /readyz
    http-check send hdr Host localhost
    default-server check inter 200ms fall 1 rise 1
{servers}
"""


def conversation(client, session, turns):
    """Runs a conversation; returns its answers, prompt tokens and cached prompt tokens."""
    messages, answers, prompt, cached = [{"role": "system", "content": SYSTEM}], [], 0, 0
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{WORDS[session % 10]} {WORDS[turn]} {session}"})
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=8, seed=1000 * session + turn, stream=True,
            stream_options={"include_usage": True}, extra_headers={"X-Session-ID": f"session-{session}"},
        )
        text, finished = "", False
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finished |= choice.finish_reason is not None
            if chunk.usage:
                prompt += chunk.usage.prompt_tokens
                cached += chunk.usage.prompt_tokens_details.cached_tokens
        assert finished, f"session {session}, turn {turn}: the stream is cut"
        answers.append(text)
        messages.append({"role": "assistant", "content": text})
        PASSED.release()
    return answers, prompt, cached


PASSED = threading.Semaphore(0)


def client(base):
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=60)


def through(name, router, expected):
    global PASSED
    PASSED = threading.Semaphore(0)
    servers = [Server(), Server()]
    try:
        with router(servers) as base, concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
            jobs = [threads.submit(conversation, client(base), session, TURNS) for session in range(SESSIONS)]
            for _ in range(SESSIONS * TURNS // 2):
                while not PASSED.acquire(timeout=1):
                    for job in jobs:
                        if job.done():
                            job.result()
            servers[0].end()
            results = [job.result() for job in jobs]
        servers[1].end()
    finally:
        for server in servers:
            server.process.kill()
    for session, (answers, _, _) in enumerate(results):
        assert answers == expected[session], f"{name}: session {session} has other answers than alone"
    rate = sum(cached for _, _, cached in results) / sum(prompt for _, prompt, _ in results)
    print(f"{name}: {SESSIONS * TURNS} answers, one server ended, {rate:.0%} of prompt tokens were cached", flush=True)
    assert rate > 0.8, "conversations did not stay where they were"


def main():
    alone = Server()
    one = client(alone.url + "/v1")
    expected = [conversation(one, session, TURNS)[0] for session in range(SESSIONS)]
    alone.end()
    through("haproxy", haproxy, expected)
    for policy in "consistent_hash", "cache_aware":
        through(f"vllm-router {policy}", lambda servers: vllm_router(policy, servers), expected)


main()
