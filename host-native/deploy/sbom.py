#!/usr/bin/env python3
"""Print a software bill of materials of the starling command: CycloneDX 1.6 in JSON, from Cargo.lock and `cargo metadata`.

    python3 host-native/deploy/sbom.py x86_64-unknown-linux-musl

It lists the normal dependencies of the command on the target, without those of tests and build scripts. The time is that
of the commit (SOURCE_DATE_EPOCH overrides it), and the serial number is made from the content, so the same commit gives
the same bytes.
"""

import datetime
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tomllib
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]


def output(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def commit_time():
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or output("git", "log", "-1", "--format=%ct")
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def main():
    metadata = json.loads(output("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", sys.argv[1]))
    packages = {p["id"]: p for p in metadata["packages"]}
    nodes = {n["id"]: n for n in metadata["resolve"]["nodes"]}
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    digests = {(p["name"], p["version"]): p.get("checksum") for p in lock}
    [root] = [p["id"] for p in metadata["packages"] if p["name"] == "starling-native"]
    # normal dependencies of the command and of what they need: neither tests nor build scripts are in the binary
    needed, todo = {}, [root]
    while todo:
        of = todo.pop()
        if of in needed:
            continue
        normal = [d["pkg"] for d in nodes[of]["deps"] if any(kind["kind"] is None for kind in d["dep_kinds"])]
        needed[of] = sorted(normal)
        todo += normal

    def reference(package):
        p = packages[package]
        return f"pkg:cargo/{p['name']}@{p['version']}"

    def component(package):
        p = packages[package]
        parts = {"type": "library", "bom-ref": reference(package), "name": p["name"], "version": p["version"]}
        parts["purl"] = reference(package)
        if digest := digests.get((p["name"], p["version"])):
            parts["hashes"] = [{"alg": "SHA-256", "content": digest}]
        if p["license"]:
            parts["licenses"] = [{"expression": p["license"].replace("/", " OR ")}]
        if p["repository"]:
            parts["externalReferences"] = [{"type": "vcs", "url": p["repository"]}]
        return parts

    model = ROOT / "fixtures/starling-tiny/starling-tiny-q8_0.gguf"
    bundled = {"type": "machine-learning-model", "bom-ref": "starling-tiny", "name": "starling-tiny-q8_0"}
    bundled["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(model.read_bytes()).hexdigest()}]
    bundled["licenses"] = [{"license": {"id": "Apache-2.0"}}]
    components = [component(p) for p in sorted(needed, key=reference) if p != root]
    dependencies = [{"ref": reference(p), "dependsOn": sorted(map(reference, needed[p]))} for p in sorted(needed, key=reference)]
    main_component = component(root) | {"type": "application", "name": "starling"}
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": commit_time(), "component": main_component},
        "components": [*components, bundled],
        "dependencies": dependencies,
    }
    digest = hashlib.sha256(json.dumps(bom, sort_keys=True).encode()).digest()
    bom["serialNumber"] = f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}"
    json.dump(bom, sys.stdout, indent=1)
    print()


main()
