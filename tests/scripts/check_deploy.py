#!/usr/bin/env python3
"""Check host-native/deploy and the documents of operators against a running server.

    python3 tests/scripts/check_deploy.py target/debug/starling    check
    python3 tests/scripts/check_deploy.py --write                  write the files that are made from others

Needs PyYAML and promtool. Uses kubectl, systemd-analyze and shellcheck if they are there.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "host-native/deploy"
DOCS = ROOT / "host-native/docs"
ALERTS = DEPLOY / "prometheus/alerts.yaml"
RULE = DEPLOY / "kubernetes/components/monitoring/prometheus-rule.yaml"
DASHBOARD = DEPLOY / "grafana/dashboard.json"
OVERLAYS = ["kubernetes/base", "kubernetes/overlays/example"]
MODEL = ROOT / "fixtures/starling-tiny/starling-tiny-q8_0.gguf"
# labels that Prometheus adds
TARGET_LABELS = {"job", "instance", "namespace", "pod"}

problems = []


def check(condition, problem):
    if not condition:
        problems.append(problem)


def run(*command, **options):
    """Runs a command; returns its output. A failure is a problem."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    name = " ".join(str(part) for part in command)
    check(done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


# -- files --


def parse_all():
    """Parses every YAML, JSON and TOML file; returns the number of files."""
    n = 0
    for path in sorted(DEPLOY.rglob("*")):
        parse = {".yaml": lambda t: list(yaml.safe_load_all(t)), ".json": json.loads, ".toml": tomllib.loads}
        if path.suffix in parse and "secrets" not in path.parts:
            n += 1
            try:
                parse[path.suffix](path.read_text())
            except (yaml.YAMLError, ValueError) as e:
                check(False, f"{path.relative_to(ROOT)}: {e}")
    return n


def prometheus_rule():
    """The PrometheusRule object of the alert rules: Kustomize reads no file outside of its directory."""
    head = "# Made from prometheus/alerts.yaml by tests/scripts/check_deploy.py --write.\n"
    rule = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "starling"}}
    return head + yaml.safe_dump(rule | {"spec": yaml.safe_load(ALERTS.read_text())}, sort_keys=False, width=1000)


def check_dockerfile():
    path = DEPLOY / "Dockerfile"
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    stages, last = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append(rest.partition(" AS ")[2].strip())
            last = []
        last.append((word, rest))
        source = re.search(r"--from=(\S+)", rest)
        if word == "COPY" and source:
            check(source[1] in stages[:-1], f"Dockerfile: COPY --from={source[1]}, expected one of {stages[:-1]}")
    words = dict(last)
    check(words.get("USER", "0").split(":")[0] not in ("0", "root"), "Dockerfile: the last stage runs as root")
    check("HEALTHCHECK" in words, "Dockerfile: no HEALTHCHECK")
    check("EXPOSE" in words, "Dockerfile: no EXPOSE")
    check(words.get("ENTRYPOINT", "").startswith("["), "Dockerfile: ENTRYPOINT is no list, so signals reach a shell")
    # what the build reads must be in its context
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    check(all(list(ROOT.glob(pattern)) for pattern in kept), ".dockerignore: a pattern matches no file")
    members = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["members"]
    embedded = [str(MODEL.relative_to(ROOT)), "web/demo/index.html", "web/demo/assets"]
    needed = ["Cargo.toml", "Cargo.lock", ".cargo", *embedded, *(m.split("/")[0] for m in members)]
    for name in needed:
        check(name in kept, f".dockerignore: {name} is not in the build context")
    for name in re.findall(r"(host-native/\S+\.rs)", text):
        check(name in kept, f".dockerignore: {name} is not in the build context")


def check_compose():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            exists = (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
            check(exists, f"compose.yaml: {name}: no volume {source}")
        for secret in service.get("secrets", []):
            check(secret in compose["secrets"], f"compose.yaml: {name}: no secret {secret}")


# -- Kubernetes --


def load_objects(overlay):
    """The objects of an overlay: as kubectl builds them, else those of its own directory and the base's."""
    path = DEPLOY / overlay
    if shutil.which("kubectl"):
        return [o for o in yaml.safe_load_all(run("kubectl", "kustomize", path)) if o]
    objects = []
    for file in sorted(DEPLOY.glob("kubernetes/base/*.yaml")) + sorted(DEPLOY.glob("kubernetes/components/*/*.yaml")):
        objects += [o for o in yaml.safe_load_all(file.read_text()) if o and "kind" in o]
    return [o for o in objects if o["kind"] not in ("Kustomization", "Component")]


def check_kubernetes(overlay):
    objects = load_objects(overlay)
    for o in objects:
        named = isinstance(o.get("metadata", {}).get("name"), str) and o.get("apiVersion")
        check(named, f"{overlay}: {o.get('kind')}: expected apiVersion and metadata.name")
    by_kind = {o["kind"]: o for o in objects}
    expected = {"Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"}
    if "overlays" in overlay:
        expected |= {"HorizontalPodAutoscaler", "HTTPRoute", "InferenceObjective", "InferencePool", "PrometheusRule"}
        expected |= {"ServiceMonitor"}
    check(expected <= set(by_kind), f"{overlay}: no {', '.join(sorted(expected - set(by_kind)))}")
    if not expected <= set(by_kind):
        return
    spec = by_kind["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    check(spec["enableServiceLinks"] is False, f"{overlay}: the Service's variables would be settings (STARLING_PORT)")
    check(spec["securityContext"]["runAsNonRoot"] is True, f"{overlay}: runAsNonRoot is not set")
    check(spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", f"{overlay}: no seccomp profile")
    security = container["securityContext"]
    restricted = security["allowPrivilegeEscalation"] is False and security["capabilities"] == {"drop": ["ALL"]}
    check(restricted and security["readOnlyRootFilesystem"], f"{overlay}: the container is not restricted")
    for probe, at in ("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz"):
        check(container[probe]["httpGet"] == {"path": at, "port": "http"}, f"{overlay}: {probe} is not {at}")
    settings = [o for o in objects if o["kind"] == "ConfigMap"]
    for o in settings:
        drain = tomllib.loads(o["data"]["starling.toml"])["drain-timeout"]
        needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain + 5
        check(spec["terminationGracePeriodSeconds"] > needed, f"{overlay}: the grace period is below {needed} s")
    mounts = {m["name"] for m in container["volumeMounts"]}
    check(mounts == {v["name"] for v in spec["volumes"]}, f"{overlay}: volumes and their mounts differ")
    ports = {p["name"] for p in container["ports"]}
    check(all(p["targetPort"] in ports for p in by_kind["Service"]["spec"]["ports"]), f"{overlay}: no such target port")
    if shutil.which("kubectl"):
        labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
        for kind in "Service", "PodDisruptionBudget":
            selector = by_kind[kind]["spec"]["selector"]
            check((selector.get("matchLabels") or selector).items() <= labels.items(), f"{overlay}: {kind} selects no pod")


# -- metrics --


class Server:
    """A server with administration and fault injection, on any free port."""

    KEY = "key-of-an-administrator"

    def __init__(self, binary, folder):
        (folder / "admin.keys").write_text(self.KEY)
        self.log = (folder / "log").open("w+")
        options = ["--admin-key-file", folder / "admin.keys", "--fault-injection", "--kv-memory", "1MiB"]
        models = ["-m", f"m={MODEL}", "-m", f"n={MODEL}"]
        command = [binary, "serve", "--port", "0", *models, *options]
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            self.log.seek(0)
            sys.exit(f"the server does not start:\n{self.log.read()}")

    def send(self, path, body=None, key=None):
        """Status and text of a response."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=20) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()

    def admin(self, path, body=None):
        return self.send("/admin/" + path, body, self.KEY)

    def answer(self):
        body = {"model": "m", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 4}
        return self.send("/v1/chat/completions", body)[0]


def cause_events(server):
    """Requests, and each rare event whose counter has no series before it."""
    for _ in range(3):
        check(server.answer() == 200, "the server does not answer")
    check(server.send("/admin/models")[0] == 401, "the administration needs no key")
    _, workers = server.admin("models/m/workers")
    worker = json.loads(workers)["workers"][0]["id"]
    server.admin(f"models/m/workers/{worker}/fail", {"fault": "panic"})
    check(server.answer() == 200, "a request is not resumed after a panic")
    check(server.admin("models/m/swap", {"source": "none.gguf"})[0] >= 400, "a swap to no file succeeds")
    # level 2 unloads idle models, level 3 refuses requests
    server.admin("pressure", {"level": 3})
    check(server.answer() == 503, "memory pressure of level 3 refuses nothing")
    server.admin("pressure", {"level": None})
    # the worker restarts with a delay
    deadline = time.monotonic() + 10
    while server.answer() != 200 and time.monotonic() < deadline:
        time.sleep(0.1)


def samples(text):
    """Metric name -> label -> values, of /metrics."""
    found = {}
    for name, labels in re.findall(r"^(starling_\w+)(?:\{(.*)\})? ", text, re.M):
        of = found.setdefault(name, {})
        for key, value in re.findall(r'(\w+)="([^"]*)"', labels):
            of.setdefault(key, set()).add(value)
    return found


def expressions():
    """Every PromQL expression, with its place."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield f"dashboard: {panel['title']}", target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield f"dashboard: variable {variable['name']}", variable["query"]["query"]
    autoscaling = DEPLOY / "kubernetes/components/autoscaling"
    for rule in yaml.safe_load((autoscaling / "prometheus-adapter.yaml").read_text())["rules"]["custom"]:
        yield "prometheus-adapter", rule["metricsQuery"]
    scaler = yaml.safe_load((autoscaling / "horizontal-pod-autoscaler.yaml").read_text())
    for metric in scaler["spec"]["metrics"]:
        yield "horizontal-pod-autoscaler", metric["pods"]["metric"]["name"]


def check_syntax():
    """The dashboard's expressions, as rules that promtool parses."""
    rules = []
    for place, text in expressions():
        if place.startswith("dashboard: ") and "variable" not in place:
            text = text.replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$model", ".*")
            rules.append({"record": f"r{len(rules)}", "expr": text})
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)
        file.flush()
        run("promtool", "check", "rules", file.name)


def check_metrics(binary):
    """Each metric, label and label value of an expression exists in /metrics."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(binary, pathlib.Path(folder))
        try:
            cause_events(server)
            metrics = server.send("/metrics")[1]
        finally:
            server.process.terminate()
            code = server.process.wait(40)
        check(code == 0, f"the server ended with exit code {code}")
    known = samples(metrics)
    # label values of events that are not caused here
    code = "".join(path.read_text() for path in (ROOT / "host-native/server/src").rglob("*.rs"))
    n = 0
    for place, text in expressions():
        for name, labels in re.findall(r"(?<![\w:])(starling_\w+)(?:\{([^}]*)\})?", text):
            n += 1
            check(name in known, f"{place}: no metric {name}")
            for key, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', labels):
                if key in TARGET_LABELS or value.startswith("$"):
                    continue
                values = known.get(name, {}).get(key)
                check(values is not None, f"{place}: {name} has no label {key}")
                for one in value.split("|") if "~" in operator else [value]:
                    is_known = any(re.fullmatch(one, v) for v in values or ()) or re.search(f'"{one}"', code)
                    check(is_known, f"{place}: {name}: no value {key}={one!r}")
    promtool = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True, text=True)
    check(promtool.returncode == 0, f"promtool check metrics: {promtool.stdout}{promtool.stderr}")
    return len(known), n


# -- documents --


def anchor(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def check_documents():
    anchors = {}
    for path in [*DOCS.glob("*.md"), *DEPLOY.rglob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
        anchors[path] = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, fragment = target.partition("#")
            if "://" in target:
                continue
            at = (path.parent / file).resolve() if file else path
            check(at.exists(), f"{path.relative_to(ROOT)}: no file {target}")
            if fragment and at.suffix == ".md" and at.exists():
                of = {anchor(h) for h in re.findall(r"^#+ (.*)$", at.read_text(), re.M)}
                check(fragment in of, f"{path.relative_to(ROOT)}: no heading {target}")
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    names = {rule["alert"] for rule in rules if "alert" in rule}
    for rule in rules:
        if "alert" in rule:
            expected = f"host-native/docs/runbook.md#{rule['alert'].lower()}"
            check(rule["annotations"].get("runbook") == expected, f"{rule['alert']}: expected runbook {expected}")
    headings = set(re.findall(r"^## (Starling\w+)$", (DOCS / "runbook.md").read_text(), re.M))
    check(headings == names, f"runbook.md: sections and alerts differ: {sorted(headings ^ names)}")
    tests = (DEPLOY / "prometheus/alerts_test.yaml").read_text()
    for name in names:
        check(name in tests, f"alerts_test.yaml: no test of {name}")


def check_unit(binary):
    if not shutil.which("systemd-analyze"):
        return
    with tempfile.TemporaryDirectory() as folder:
        unit = pathlib.Path(folder) / "starling.service"
        unit.write_text((DEPLOY / "systemd/starling.service").read_text().replace("/usr/bin/starling", str(binary)))
        said = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
        # units of the machine may be wrong too
        wrong = [line for line in said.stderr.splitlines() if "starling" in line]
        check(not wrong, "systemd-analyze verify: " + "\n".join(wrong))


def main():
    if sys.argv[1:] == ["--write"]:
        RULE.write_text(prometheus_rule())
        return
    binary = pathlib.Path(sys.argv[1]).resolve()
    n_files = parse_all()
    check(RULE.read_text() == prometheus_rule(), f"{RULE.relative_to(ROOT)} is old: run {sys.argv[0]} --write")
    check_dockerfile()
    check_compose()
    for overlay in OVERLAYS:
        check_kubernetes(overlay)
    run("promtool", "check", "rules", ALERTS)
    run("promtool", "test", "rules", "alerts_test.yaml", cwd=ALERTS.parent)
    run("promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yaml")
    check_syntax()
    n_metrics, n_uses = check_metrics(binary)
    check_documents()
    check_unit(binary)
    run(sys.executable, ROOT / "tests/scripts/configuration_reference.py", binary, "--check")
    for script in DEPLOY.glob("*.sh"):
        run("bash", "-n", script)
    print(f"{n_files} files; {n_uses} uses of {n_metrics} metrics", *problems, sep="\n")
    sys.exit(bool(problems))


main()
