#!/usr/bin/env python3
"""llama.cpp's tests of its server, tools/server/tests, against this one. Needs the packages of requirements.txt and the
path of the binary.

    python3 tests/clients/llama_server_suite.py target/release/starling [arguments of pytest]

The tests are taken from the source package of llama-cpp-python on PyPI. They start a llama-server with its options; here
they start `starling serve` with the corresponding ones, on bundled models. llama_server_suite.toml lists the tests that
cannot be run or that have to fail, with reasons. All others have to pass.
"""

import hashlib
import os
import pathlib
import re
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import types
import urllib.parse
import urllib.request

import pytest

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
# the templates are read by tests
PARTS = ("tools/server/tests/", "models/templates/")
HERE = pathlib.Path(__file__).resolve().parent
FIXTURES = HERE.parent.parent / "fixtures"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent.parent / "target")).resolve()

# model of a test: bundled model. Tests of others have to fail.
MODELS = {
    "ggml-org/test-model-stories260K": "starling-tiny/starling-tiny-q8_0.gguf",
    "ggml-org/stories15M_MOE": "starling-tiny/starling-tiny-f16.gguf",
    "bert-bge-small/ggml-model-f16.gguf": "reference/bert-mean-f32.gguf",
    "stories15M-q4_0.gguf": "starling-tiny/starling-tiny-q4_0.gguf",
}
INFILL = "ggml-org/test-model-stories260K-infill"
# what a llama-server without a model finds in its cache
ROUTED = ["ggml-org/tinygemma3-GGUF:Q8_0", "ggml-org/test-model-stories260K"]
# names of models in requests: llama-server ignores them
NAMES = "test davinci-002 gpt-3.5-turbo gpt-3.5-turbo-instruct gpt-4.1 text-embedding-3-small codellama70b".split()

# options of llama-server that have the same meaning here
SAME = {
    "--host": "--host",
    "--port": "--port",
    "--seed": "--seed",
    "--temp": "--temperature",
    "--threads": "--threads",
    "--batch-size": "--batch-tokens",
    "--parallel": "--max-seqs",
    "--api-key": "--api-key",
    "--cors-origins": "--cors-origins",
    "--slot-save-path": "--slot-save-path",
    "--chat-template": "--chat-template",
    "--chat-template-file": "--chat-template",
    "--no-models-autoload": "--autoload=false",
    "--spec-draft-n-max": "--draft-max",
    "--sleep-idle-seconds": "--idle-timeout",
}
# options that say what is always so here, or that do not change answers, and those that `arguments` reads below. --n-predict
# is a default of requests; --max-tokens is a bound of them.
OTHERS = set(
    """--offline --embedding --reranking --metrics --slots --no-slots --jinja --no-jinja --cont-batching --verbose --ubatch-size
    -fa --n-gpu-layers --n-predict --hf-repo --hf-file --pooling --reasoning --alias --ctx-size --kv-unified --model-draft
    --spec-type --spec-draft-n-min --backend_sampling --swa-full""".split()
)


class NoSuchOption(Exception):
    """llama-server has an option, or a test a model, that this server does not have."""


def unpack():
    """The folder of the tests as the package has them, downloaded once."""
    folder = TARGET / "tools" / f"{PACKAGE}-{VERSION}"
    if folder.exists():
        return folder
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    file = f"{PACKAGE.replace('-', '_')}-{VERSION}.tar.gz"
    with urllib.request.urlopen(f"{index}/{PACKAGE}/") as page:
        link = re.search(rf'href="([^"#]*{re.escape(file)})', page.read().decode())
        assert link, f"{index}/{PACKAGE}/ has no {file}"
        url = urllib.parse.urljoin(page.url, link[1])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        archive, unpacked = pathlib.Path(work, file), pathlib.Path(work, "unpacked")
        with urllib.request.urlopen(url) as response, archive.open("wb") as out:
            shutil.copyfileobj(response, out)
        with archive.open("rb") as data:
            found = hashlib.file_digest(data, "sha256").hexdigest()
        assert found == SHA256, f"{url} has the SHA-256 {found}, expected {SHA256}"
        with tarfile.open(archive) as tar:
            for member in tar:
                path = member.name.partition("/vendor/llama.cpp/")[2]
                if path.startswith(PARTS) and member.isfile():
                    member.name = path
                    tar.extract(member, unpacked, filter="data")
        unpacked.rename(folder)
    return folder


def infill_model(folder):
    """A copy of a bundled model whose control tokens are those for infilling."""
    path, text = folder / "infill.gguf", lambda s: struct.pack("<Q", len(s)) + s
    data = (FIXTURES / MODELS["ggml-org/test-model-stories260K"]).read_bytes()
    (n_keys,) = struct.unpack_from("<Q", data, 16)
    size = len(data)
    for old, new in [(b"<|im_start|>", b"<fim_prefix>"), (b"<|im_end|>", b"<fim_suffix>"), (b"<|pad|>", b"<fim_middle>")]:
        assert data.count(text(old)) == 1
        data = data.replace(text(old), text(new))
    # one more key, so that tensors are aligned
    key = text(b"padding") + struct.pack("<I", 8)
    key += text(b" " * (-(len(data) - size + len(key) + 8) % 32))
    path.write_bytes(data[:16] + struct.pack("<Q", n_keys + 1) + key + data[24:])
    return path


def model(repo, file=None):
    path = MODELS.get(file or repo) or MODELS.get(repo)
    if path is None:
        raise NoSuchOption(f"there is no model for {repo} {file}")
    return FIXTURES / path


def options(llama):
    """Options of llama-server and their values."""
    given, rest = {}, list(llama)
    while rest:
        name = rest.pop(0)
        if name not in SAME and name not in OTHERS:
            raise NoSuchOption(f"starling serve has no option {name}")
        given[name] = rest.pop(0) if rest and not re.match("-[-a-z]", rest[0]) else ""
    for name, wrong in [("--pooling", "none"), ("--reasoning", "on"), ("--reasoning", "off")]:
        if given.get(name) == wrong:
            raise NoSuchOption(f"starling serve has no option {name} {wrong}")
    return given


def arguments(binary, llama, infill):
    """The command of llama-server as one of `starling serve`."""
    given = options(llama)
    command = [binary, "serve", "--log-level", "warn", "--drain-timeout", "1"]
    for name, value in given.items():
        if name in SAME:
            command.append(f"{SAME[name]}={value}" if value else SAME[name])
    repo = given.get("--hf-repo")
    if repo is None:
        command += ["--load", "on-demand"]
        for name in ROUTED:
            command += ["--model", f"{name}={model(ROUTED[-1])}"]
    else:
        names = given.get("--alias", "model").split(",")
        path = infill if repo == INFILL else model(repo, given.get("--hf-file"))
        command += ["--model", path, "--model-name", names[0], "--aliases", ",".join(names[1:] + NAMES)]
    if "--model-draft" in given:
        command += ["--draft-model", model(given["--model-draft"])]
    if "--jinja" in given and not {"--chat-template", "--chat-template-file"} & set(given):
        # llama-server writes tools into the prompt if the template does not
        command += ["--chat-template", "../../../models/templates/Qwen-Qwen3-0.6B.jinja"]
    if "--cors-origins" not in given:
        command += ["--cors-origins", "*"]
    if "--ctx-size" in given:
        # llama-server's is that of all sequences together
        n_slots = 1 if "--kv-unified" in given else int(given.get("--parallel", 1))
        command += ["--ctx-size", int(given["--ctx-size"]) // n_slots]
    return [str(part) for part in command]


class Suite:
    """Plugin of pytest: the servers, and the table of exceptions."""

    def __init__(self, binary, table, infill, is_whole):
        self.binary, self.infill, self.is_whole = binary, infill, is_whole
        self.not_run, self.fails = each_case(table["not-run"]), each_case(table["fails"])
        self.used = set()

    def popen(self, command, creationflags, env, **streams):
        if "AIP_MODE" in env:
            raise NoSuchOption("starling serve has no interface of Google's Vertex AI")
        command = arguments(self.binary, command[1:], self.infill)
        print(" ".join(command))
        return subprocess.Popen(command, env=env, **streams)

    def pytest_configure(self, config):
        # its functions are replaced
        sys.modules["wget"] = types.ModuleType("wget")
        import utils

        utils.subprocess = types.SimpleNamespace(Popen=self.popen, TimeoutExpired=subprocess.TimeoutExpired)
        utils.download_file = lambda url, path=None: url.rsplit("/", 1)[1]
        self.instances = utils.server_instances

    @pytest.fixture(autouse=True)
    def stop_servers(self):
        yield
        for server in set(self.instances):
            server.stop()

    def pytest_collection_modifyitems(self, items):
        cases = {}
        for item in items:
            name = f"{item.path.stem}.{item.originalname}"
            cases[name] = cases.get(name, -1) + 1
            slow = ["slow"] if item.get_closest_marker("slow") else []
            self.mark(item, slow + [f"{name}[{cases[name]}]", name, item.path.stem])
        unused = [name for name in [*self.not_run, *self.fails] if name not in self.used]
        assert not (unused and self.is_whole), f"llama_server_suite.toml has tests that do not exist: {unused}"

    def mark(self, item, names):
        for name in names:
            if name in self.not_run:
                item.add_marker(pytest.mark.skip(reason=self.not_run[name]))
            elif name in self.fails:
                item.add_marker(pytest.mark.xfail(reason=self.fails[name], strict=True))
            else:
                continue
            self.used.add(name)
            break


def each_case(reasons):
    """Reasons by test, with NAME[FIRST-LAST] as a name for each case."""
    all_cases = {}
    for name, reason in reasons.items():
        cases = re.fullmatch(r"(.*)\[(\d+)-(\d+)\]", name)
        numbers = range(int(cases[2]), int(cases[3]) + 1) if cases else []
        all_cases |= {f"{cases[1]}[{i}]": reason for i in numbers} if cases else {name: reason}
    return all_cases


def edited(folder, work, edits):
    """A copy of the tests in which the texts and numbers of another model are those of ours."""
    shutil.copytree(folder, work, dirs_exist_ok=True)
    tests = pathlib.Path(work, "tools/server/tests")
    for name, pairs in edits.items():
        path = tests / f"{name}.py" if name == "utils" else tests / "unit" / f"{name}.py"
        text = path.read_text()
        for old, new in pairs:
            assert old in text, f"{path.name} does not contain {old!r}"
            text = text.replace(old, new)
        path.write_text(text)
    return tests


def main():
    binary, *more = sys.argv[1:]
    table = tomllib.loads((HERE / "llama_server_suite.toml").read_text())
    with tempfile.TemporaryDirectory() as work:
        tests = edited(unpack(), work, table["edits"])
        binary = str(pathlib.Path(binary).resolve())
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ["PORT"] = str(s.getsockname()[1])
        os.chdir(tests)
        sys.path.insert(0, str(tests))
        suite = Suite(binary, table, infill_model(pathlib.Path(work)), not more)
        options = ["--noconftest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        sys.exit(pytest.main(options + (more or ["unit"]), plugins=[suite]))


main()
