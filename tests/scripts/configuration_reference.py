#!/usr/bin/env python3
"""Write host-native/docs/configuration.md from `starling serve --help` and the table of settings.

    python3 tests/scripts/configuration_reference.py target/debug/starling [--check]

The help has the flags, their meaning and their defaults. Which settings models may have of their own, which may change while
the server runs, and the range of numbers are in host-native/server/src/config/mod.rs. With --check, the exit code is 1 if the
document is old.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "host-native/docs/configuration.md"
TABLE = ROOT / "host-native/server/src/config/mod.rs"

HEAD = """# Configuration

All settings of `starling serve`. This document is made by `tests/scripts/configuration_reference.py`; do not edit it.

A setting is a flag (`--queue-high 512`), an environment variable (`STARLING_QUEUE_HIGH`) or a key of the file of `--config`
(`queue-high = 512`; TOML, YAML or JSON). A flag overrides the environment, and both override the file. `--print-config` prints
the settings in effect. Times are in seconds and sizes in bytes unless they have a unit (`2m 30s`, `512MiB`).

- **model**: also a key of `[models.NAME]`; see [models](models.md#several-models-in-one-server).
- **live**: may change while the server runs; see [administration](admin.md#settings).
"""
# in the order of the document; settings that are in none come under "Other"
GROUPS = {
    "Address, keys, TLS": "host port api-key api-key-file key-requests key-tokens allow-no-key allowed-hosts tls-cert tls-key"
    " tls-client-ca tls-client-required cors-origins require-signature signature-window sign-responses",
    "Models": "model model-name models-dir aliases memory autoload load load-wait load-queue pin idle-timeout weight share"
    " chat-template tool-call-format reasoning-format",
    "Engine": "threads isa kv-type working-memory ctx-size max-seqs batch-tokens prefill-chunk embed-tokens kv-memory snapshot-memory"
    " snapshot-interval seed"
    " draft-max draft-min-acceptance draft-model",
    "Workers and faults": "workers cpu-affinity strategy stall-timeout breaker-faults breaker-window breaker-open memory-pressure"
    " fault-injection",
    "Queue and time limits": "queue-high queue-low queue-timeout request-timeout drain-timeout tenant-requests tenant-tokens",
    "Limits of a request": "max-prompt max-tokens max-n max-inputs max-grammar grammar-items refuse-unknown-fields",
    "Sessions and stored completions": "session-ttl max-sessions session-memory sessions-memory state-dir state-key-file"
    " stored-answers-ttl stored-answers-size",
    "Results that are used again": "response-cache response-cache-disk response-cache-disk-size share-identical embedding-cache"
    " resume-window idempotency-window",
    "KV cache on disk": "kv-disk kv-disk-key-file kv-disk-size slot-save-path slot-save-size",
    "Connections": "max-body max-header header-timeout body-timeout body-rate write-timeout sse-keep-alive max-connections"
    " max-connections-per-address connection-memory connection-memory-share",
    "Administration": "admin-key-file admin-listen manage-without-keys config watch-config print-config audit-log audit-key-file audit-log-size"
    " audit-log-files",
    "Logs, metrics, traces": "log-level log-format metrics-compat otlp-endpoint worker-id callback-url",
}
# flags that are no settings of a file
FLAGS = {"config", "print-config"}
# arguments of all commands that a file may set too, and each model
ARGUMENTS = {"model", "threads", "isa", "kv-type", "working-memory"}


def flags(binary):
    """Flag -> (placeholder, help) of `serve --help`."""
    options = {"capture_output": True, "text": True, "check": True, "env": {"COLUMNS": "100000"}}
    text = subprocess.run([binary, "serve", "--help"], **options).stdout
    # headings of groups
    text = re.sub(r"^(?!Options:)\S.*:\n", "", text, flags=re.M)
    found = {}
    blocks = re.split(r"\n(?=  (?:-\w, |    )--)", text.split("\nOptions:\n")[1].split("\nEach setting is")[0])
    for block in blocks:
        match = re.match(r"\n? +(?:-\w, )?--([\w-]+)(?:[= \[]*<(\w[^>]*)>\]?)?\n(.*)", block, re.S)
        if not match:
            sys.exit(f"{binary}: this part of the help has an unknown form:\n{block}")
        name, placeholder, meaning = match.groups()
        meaning = re.sub(r"\s*\[env: [^\]]*\]", "", meaning)
        values = re.findall(r"^ +- (\w+): ", meaning, re.M)
        meaning = meaning.split("Possible values:")[0]
        meaning = re.sub(r"\s+", " ", meaning).strip()
        if values:
            meaning += f" ({', '.join(f'`{value}`' for value in values)})"
        found[name] = (placeholder or "", meaning)
    for name in "help", "version":
        found.pop(name, None)
    return found


def table():
    """Setting -> (range, whether models may have it), and the settings that may change while the server runs."""
    text = TABLE.read_text()
    rows = {}
    body = re.search(r"^settings! \{\n(.*?)^\}", text, re.M | re.S)[1]
    for line in body.splitlines():
        key = re.match(r'\s+\w+ "([\w-]+)"', line)[1]
        limits = re.search(r'" in ([\d_.e]+)\.\.=([\d_.e]+), "', line)
        rows[key] = (limits and tuple(float(n.replace("_", "")) for n in limits.groups()), line.endswith(" per model;"))
    live = re.search(r"pub const LIVE.*?\[\n(.*?)\];", text, re.S)[1]
    return rows, set(re.findall(r'"([\w-]+)"', live))


def number(value):
    return f"{value:,.0f}" if value == int(value) else str(value)


def document(binary):
    help_of, (rows, live) = flags(binary), table()
    missing = set(rows) ^ (set(help_of) - ARGUMENTS - FLAGS)
    if missing:
        sys.exit(f"{TABLE}: settings and flags differ: {sorted(missing)}")
    groups = {title: names.split() for title, names in GROUPS.items()}
    grouped = [name for names in groups.values() for name in names]
    unknown = sorted(set(grouped) - set(help_of))
    if unknown:
        sys.exit(f"{sys.argv[0]}: no setting {', '.join(unknown)}")
    others = [name for name in help_of if name not in grouped]
    parts = [HEAD]
    for title, names in [*groups.items(), *([("Other", others)] if others else [])]:
        parts.append(f"\n## {title}\n\n| setting | value | default | meaning | |\n|---|---|---|---|---|\n")
        for name in names:
            placeholder, meaning = help_of[name]
            limits, is_per_model = rows.get(name, (None, name in ARGUMENTS - {"model"}))
            default = re.search(r" ?\[default: ((?:[^\[\]]|\[\])*)\]", meaning)
            if default:
                meaning = meaning.replace(default[0], "")
            value = placeholder
            if limits:
                value += f", {number(limits[0])} to {number(limits[1])}"
            marks = ", ".join(["model"] * is_per_model + ["live"] * (name in live) + ["flag"] * (name == "print-config"))
            cells = [f"`{name}`", value, default[1].strip('"') if default else "", meaning, marks]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def main():
    text = document(pathlib.Path(sys.argv[1]).resolve())
    if "--check" not in sys.argv:
        DOCUMENT.write_text(text)
    elif not DOCUMENT.exists() or DOCUMENT.read_text() != text:
        sys.exit(f"{DOCUMENT.relative_to(ROOT)} is old: run tests/scripts/configuration_reference.py BINARY")


main()
