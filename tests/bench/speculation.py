#!/usr/bin/env python3
"""Measures speculative decoding: tokens per second with and without drafts, on answers that repeat the prompt and on prose.

    tests/bench/speculation.py target/release/starling MODEL.gguf [--runs 3] [--threads N] [--only TASK] [--prediction] [--cpu-time]
        [--draft-model DRAFT.gguf] [--llama-server LLAMA_SERVER]

Tasks: rename a function in a file of 150 lines, add a parameter to another, summarise with quotes, open prose. Runs with and
without drafts alternate, at temperature 0 and 0.7; all answers to a prompt must have the same tokens. Prints JSON: median
tokens per second of the decode phase, their ratio, and the draft tokens. --prediction gives the file as the prediction.
--draft-model measures a third way, with lookup and that model.
--llama-server measures llama.cpp's server too, in turns: without drafts, with `--spec-type ngram-simple`, and with the draft
model; its answers may change with drafts, which is reported.
--cpu-time measures seconds of CPU time on one thread, less those of an answer of one token: for busy machines.
"""

import argparse
import atexit
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request


def source():
    """A Python file of about 150 lines."""
    random.seed(7)
    nouns = "order invoice customer product shipment payment refund basket voucher address parcel".split()
    lines = ["import json", "from dataclasses import dataclass", "", ""]
    for noun in nouns:
        fields = random.sample("name price total count status owner created weight".split(), 3)
        lines += ["@dataclass", f"class {noun.capitalize()}:"]
        lines += [f"    {field}: str" for field in fields]
        lines += ["", "", f"def load_{noun}(path):"]
        lines += ["    with open(path) as file:", "        data = json.load(file)"]
        lines += [f"    return {noun.capitalize()}(" + ", ".join(f'data["{field}"]' for field in fields) + ")"]
        lines += ["", ""]
    return "\n".join(lines).rstrip() + "\n"


ARTICLE = """The town of Harrow Bridge voted on Tuesday to replace its century-old waterworks. "We have patched these pipes for
thirty years, and every patch costs more than the last," said Mayor Ellen Whitcombe. The new plant will cost 41 million euros
and take four years to build. Half of the money comes from the regional fund for drinking water, the rest from a levy of nine
euros a month on each household. Opponents called the plan too large for a town of 12,000. "A plant of half the size would
serve us until 2060," said Tomas Reuter, an engineer who led the campaign against it. The council's own report puts the growth
of the town at two percent a year, which the opponents doubt. The old waterworks, built in 1921, lose a third of the water that
they pump. "On some nights we lose more than the whole town drinks," said Ines Calloway, who runs them with a staff of nine.
Work begins in March with a new main along the river road, which will close to cars for six weeks."""

FILE = source()


def tasks():
    code = f"```python\n{FILE}```"
    ask = "in the following file. Write out the whole changed file, with all classes and functions."
    return {
        "edit_rename": f"Rename the function load_invoice to read_invoice {ask}\n\n{code}",
        "edit_parameter": f'Add a parameter encoding="utf-8" to load_payment {ask}\n\n{code}',
        "summarise": f"{ARTICLE}\n\nSummarise this article in five sentences, and quote each person word for word.",
        "prose": "Write a story of 300 words about a lighthouse keeper who finds a letter in a bottle.",
    }


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def ways(args):
    """Name of each way to decode, and its options."""
    found = {"plain": ["--draft-max", "0"], "lookup": ["--draft-max", str(args.draft_max)]}
    if args.draft_model:
        found["draft_model"] = [*found["lookup"], "--draft-model", args.draft_model]
    return found


def decode(args, *which):
    """The answer, and its tokens per second of the decode phase."""
    if not args.cpu_time:
        result = run(args, args.tokens, *which)
        return result, result["timings"]["decode_tokens_per_second"]
    begin = cpu_seconds()
    run(args, 1, *which)
    middle = cpu_seconds()
    result = run(args, args.tokens, *which)
    return result, (len(result["ids"]) - 1) / (cpu_seconds() - middle - (middle - begin))


def run(args, tokens, prompt, temperature, drafts, prediction):
    """`drafts` are the options of a way to decode."""
    command = [args.command, "run", "--model", args.model, "--chat", "--json", "--file", prompt, "-n", str(tokens)]
    command += ["--temp", str(temperature), "--seed", "1", "--ctx-size", "8192", *drafts]
    if args.cpu_time or args.threads:
        command += ["--threads", str(1 if args.cpu_time else args.threads)]
    if prediction and drafts != ways(args)["plain"]:
        command += ["--prediction", prediction]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class LlamaServer:
    """llama.cpp's server with options of speculation."""

    def __init__(self, args, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        threads = str(args.threads or os.cpu_count())
        command = [args.llama_server, "-m", args.model, "--port", str(port), "-c", "8192", "-np", "1", "-t", threads]
        self.process = subprocess.Popen([*command, "--log-disable", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.address}/health").read()
                return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError("llama-server does not answer")

    def answer(self, text, tokens, temperature):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": temperature}
        body |= {"seed": 1, "cache_prompt": False}
        request = urllib.request.Request(f"{self.address}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        return json.load(urllib.request.urlopen(request))


def llama_cpp(servers, text, args, temperature):
    """Tokens per second of each way of llama.cpp, and whether its answer is that without drafts."""
    speeds, texts = {way: [] for way in servers}, {}
    for _ in range(args.runs):
        for way, server in servers.items():
            result = server.answer(text, args.tokens, temperature)
            speeds[way].append(result["timings"]["predicted_per_second"])
            texts[way] = result["choices"][0]["message"]["content"]
    plain = statistics.median(speeds["plain"])
    report = {"tokens_per_second": round(plain, 1)}
    for way in list(speeds)[1:]:
        speed = statistics.median(speeds[way])
        same = texts[way] == texts["plain"]
        report[way] = {"tokens_per_second": round(speed, 1), "ratio": round(speed / plain, 2), "same_text": same}
    return report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--draft-max", type=int, default=8)
    parser.add_argument("--draft-model")
    parser.add_argument("--llama-server")
    parser.add_argument("--only")
    parser.add_argument("--prediction", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    report, differ, servers = {}, 0, {}
    if args.llama_server:
        servers = {"plain": LlamaServer(args), "ngram_simple": LlamaServer(args, "--spec-type", "ngram-simple")}
        if args.draft_model:
            servers["draft_model"] = LlamaServer(args, "--spec-type", "draft-simple", "-md", args.draft_model)
        atexit.register(lambda: [server.process.kill() for server in servers.values()])
    with tempfile.TemporaryDirectory() as directory:
        prediction = None
        if args.prediction:
            prediction = f"{directory}/prediction"
            with open(prediction, "w") as file:
                file.write(FILE)
        for name, text in tasks().items():
            if args.only and args.only not in name:
                continue
            prompt = f"{directory}/{name}"
            with open(prompt, "w") as file:
                file.write(text)
            for temperature in (0, 0.7):
                speeds, answers, last = {way: [] for way in ways(args)}, [], {}
                for _ in range(args.runs):
                    for way, drafts in ways(args).items():
                        result, speed = decode(args, prompt, temperature, drafts, prediction)
                        speeds[way].append(speed)
                        answers.append((result["ids"], result["text"]))
                        last[way] = result["timings"]
                same = all(answer == answers[0] for answer in answers)
                differ += not same
                plain = statistics.median(speeds["plain"])
                row = {"tokens": len(answers[0][0]), "same_bytes": same, "tokens_per_second": round(plain, 1)}
                for way in list(speeds)[1:]:
                    drafted = statistics.median(speeds[way])
                    row[way] = {
                        "tokens_per_second": round(drafted, 1),
                        "ratio": round(drafted / plain, 2),
                        "drafted": last[way]["drafted_tokens"],
                        "accepted": last[way]["accepted_tokens"],
                    }
                if servers:
                    row["llama_cpp"] = llama_cpp(servers, text, args, temperature)
                report[f"{name}, temperature {temperature}"] = row
                print(name, temperature, report[f"{name}, temperature {temperature}"], file=sys.stderr, flush=True)
    print(json.dumps(report, indent=2))
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
