#!/usr/bin/env python3
"""Build the image of host-native/deploy/Dockerfile with podman, start it, and ask the server.

    python3 tests/scripts/check_image.py target/release/starling

Needs root, podman, runc and curl, and no registry: stand-ins for the base images are made from this machine. In the
build stage, cargo hands out the given binary and copies the build context, which must have all files that the binary
was made from. In the last stage, a binary that is not static finds the libraries of glibc, and no other.

Then the Dockerfile and .dockerignore get one fault at a time, and each must be found.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "host-native/deploy/Dockerfile"
IGNORED = ROOT / ".dockerignore"
IMAGE = "localhost/starling"
KEY = "key-of-a-client"
# the user nonroot of the distroless images
USER = 65532
# bytes that the images may take
MEMORY = 2 << 30
# what a static binary has inside of it
GLIBC = {"libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "librt.so.1"}
# programs of the build stage, of those that Alpine and build-base have
BUILD_TOOLS = ["sh", "cp", "install", "mkdir", "rm", "strip"]

# text that is replaced, by what, and a part of the problem that must be found
FAULTS = [
    ("COPY . .", "COPY nothing .", "nothing"),
    ("--from=build /image /", "--from=build /images /", "/images"),
    ("/source/LICENSE-MIT", "/source/LICENSE", "/source/LICENSE"),
    ("-p starling-native", "-p starling-serve", "starling-serve"),
    ("RUST_VERSION=1.90", "RUST_VERSION=1.80", "1.80"),
    ("FROM gcr.io/distroless/static", "FROM gcr.io/distroless/statik", "statik"),
    ("--retries=9", "--retry=9", "retry"),
    ("USER 65532:65532\n", "", "user"),
    ("install -d -o 65532 -g 65532", "install -d", "Permission denied"),
    ("VOLUME /var/lib/starling\n", "", "Read-only file system"),
    ("STARLING_HOST=0.0.0.0", "STARLING_HOST=127.0.0.1", "listens on"),
    ("STARLING_LOG_FORMAT=json", "STARLING_LOG_FORMAT=pretty", "JSON"),
    ('ENTRYPOINT ["/usr/bin/starling"]', "ENTRYPOINT /usr/bin/starling", "/bin/sh"),
    ('CMD ["/usr/bin/starling", "health"]', 'CMD ["/usr/bin/starling", "healthy"]', "healthy"),
    ("STOPSIGNAL SIGTERM", "STOPSIGNAL SIGKILL", "137"),
    # lines of .dockerignore
    ("!LICENSE-*\n", "", "LICENSE"),
    ("!web/demo/index.html\n", "", "web/demo/index.html"),
    ("!host-wasm\n", "", "host-wasm"),
]


class Problem(Exception):
    """What is wrong with the image."""


def check(condition, problem):
    if not condition:
        raise Problem(problem)


def run(*command, **options):
    """Runs a command; returns the result with both of its outputs."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def output(*command, **options):
    """Output of a command, which must succeed."""
    done = run(*command, **options)
    name = " ".join(str(part) for part in command)
    check(done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


# -- stand-ins for base images --


def libraries(program):
    """Name and path of each library that a program needs, and of its loader; none if it is static."""
    found = run("ldd", program).stdout
    return {pathlib.Path(path).name: path for path in re.findall(r"(/\S+)(?= \(0x)", found)}


def copy(source, rootfs, target):
    target = rootfs / str(target).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def build_base(rootfs, tag):
    """Stands in for Alpine's image of Rust: an `apk`, and a `cargo` that hands out /given/starling."""
    expected = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    version = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?-alpine", tag)
    check(version, f"Dockerfile: base image rust:{tag}, expected rust:VERSION-alpine")
    is_new = tuple(map(int, version.groups()[:2])) >= tuple(map(int, expected.split(".")))
    check(is_new, f"Dockerfile: base image rust:{tag}, expected Rust {expected} or later (rust-version of Cargo.toml)")
    for tool in BUILD_TOOLS:
        path = shutil.which(tool)
        check(path, f"{tool} is not installed")
        copy(path, rootfs, f"/usr/bin/{tool}")
        for library in libraries(path).values():
            copy(library, rootfs, library)
    (rootfs / "bin").symlink_to("usr/bin")
    program(rootfs / "sbin/apk", '[ "$1" = add ] && [ $# -gt 1 ]')
    program(
        rootfs / "usr/local/cargo/bin/cargo",
        """
        [ "$1" = build ] && shift || { echo "cargo $*: expected cargo build" >&2; exit 1; }
        for option in --release --locked "-p starling-native"; do
            case " $* " in *" $option "*) ;; *) echo "cargo build $*: expected $option" >&2; exit 1 ;; esac
        done
        cp -R . /given/context
        mkdir -p target/release
        cp /given/starling target/release
        """,
    )
    return "ENV PATH=/usr/local/cargo/bin:/usr/bin:/sbin"


def program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nset -e\n{script}\n")
    path.chmod(0o755)


def static_base(rootfs, _tag, binary):
    """Stands in for distroless/static. Its user is root, since the Dockerfile must name the user."""
    (rootfs / "etc").mkdir()
    users = f"root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:{USER}:{USER}::/home/nonroot:/sbin/nologin\n"
    (rootfs / "etc/passwd").write_text(users)
    (rootfs / "etc/group").write_text(f"root:x:0:\nnonroot:x:{USER}:\n")
    certificates = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        copy(certificates, rootfs, certificates)
    (rootfs / "tmp").mkdir(mode=0o1777)
    for name, path in libraries(binary).items():
        if name in GLIBC or name.startswith("ld-linux"):
            copy(path, rootfs, path)
    return "ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"


def bases(dockerfile):
    """Name and tag of each image that the Dockerfile names."""
    values, stages = {}, set()
    for line in dockerfile.splitlines():
        if argument := re.match(r"ARG (\w+)=(\S+)", line):
            values[argument[1]] = argument[2]
        if stage := re.match(r"FROM (\S+)(?: AS (\S+))?", line):
            image = re.sub(r"\$\{(\w+)\}", lambda m: values.get(m[1], m[0]), stage[1])
            if image not in stages:
                yield image.rpartition(":")[::2]
            stages.add(stage[2])


# -- the image --


class Podman:
    """podman with images and containers of its own, in a directory that is removed at the end."""

    def __init__(self, folder):
        self.folder = folder
        # the machine may have neither systemd nor cgroups of version 2
        self.command = ["podman", "--root", folder / "images", "--runroot", folder / "run", "--runtime", "runc"]
        self.command += ["--cgroup-manager", "cgroupfs", "--events-backend", "file", "--storage-driver", "overlay"]
        if self.run("info").returncode != 0:
            # no overlay within an overlay: whole copies of each layer
            self.command[-1] = "vfs"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.run("rm", "--all", "--force", "--volumes", "--time", "0")
        self.run("image", "rm", "--all", "--force")

    def run(self, *arguments):
        return run(*self.command, *arguments)

    def __call__(self, *arguments):
        done = self.run(*arguments)
        check(done.returncode == 0, f"podman {arguments[0]}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def inspect(self, name, template):
        return json.loads(self("inspect", "--format", f"{{{{json {template}}}}}", name))

    def import_base(self, name, tag, binary):
        """Makes the stand-in of a base image."""
        makers = {"rust": build_base, "gcr.io/distroless/static-debian12": lambda r, t: static_base(r, t, binary)}
        check(name in makers, f"Dockerfile: base image {name}:{tag}, expected one of {list(makers)}")
        with tempfile.TemporaryDirectory(dir=self.folder) as rootfs:
            os.chmod(rootfs, 0o755)
            setting = makers[name](pathlib.Path(rootfs), tag)
            archive = self.folder / "base.tar"
            output("tar", "--create", "--file", archive, "--owner", "0", "--group", "0", "--directory", rootfs, ".")
        whole = name if "/" in name else f"docker.io/library/{name}"
        self("import", "--quiet", "--change", setting, archive, f"{whole}:{tag}")

    def build(self, dockerfile, ignored, given):
        file, ignorefile = self.folder / "Dockerfile", self.folder / "ignored"
        file.write_text(dockerfile)
        ignorefile.write_text(ignored)
        options = ["--pull=never", "--format", "docker", "--isolation", "chroot", "--network", "host", "--layers"]
        options += ["--volume", f"{given}:/given", "--file", file, "--ignorefile", ignorefile]
        self("build", *options, "--tag", IMAGE, ROOT)

    def start(self, name, *arguments):
        """Starts a container restricted as in compose.yaml. Its network has the loopback address alone."""
        options = ["--read-only", "--read-only-tmpfs=false", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
        options += ["--network", "none", "--env", f"STARLING_API_KEY={KEY}", "--health-interval", "disable"]
        # podman's own limits may be above what the machine permits
        options += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"]
        self("run", "--detach", "--name", name, *options, IMAGE, *arguments)


def check_context(given, binary):
    """The build context has the workspace, and each file that the binary was made from."""
    context = given / "context"
    check((context / "Cargo.toml").exists(), "the build context has no Cargo.toml")
    # cargo refuses a workspace without one of its members
    output("cargo", "metadata", "--locked", "--format-version", "1", "--manifest-path", context / "Cargo.toml")
    made_from = re.split(r"(?<!\\)\s+", binary.with_suffix(".d").read_text().strip().partition(": ")[2])
    check(len(made_from) > 100, f"{binary.with_suffix('.d')}: {len(made_from)} files")
    for name in [".cargo/config.toml", *(path.replace("\\ ", " ") for path in made_from)]:
        path = ROOT / name
        if path.is_relative_to(ROOT):
            inside = pathlib.Path(os.path.normpath(path)).relative_to(ROOT)
            check((context / inside).exists(), f"{inside} is not in the build context: see .dockerignore")


def check_settings(podman):
    config = podman.inspect(IMAGE, ".Config")
    user = f"{USER}:{USER}"
    check(config.get("User") == user, f"the user of the image is {config.get('User')!r}, expected {user}")
    check("8080/tcp" in config.get("ExposedPorts", {}), "the image exposes no port 8080")


def ask(pid, path, body=None):
    """Asks the server from within the container's network; status and text of the response."""
    command = ["nsenter", "--net", "--target", pid, "curl", "--silent", "--show-error", "--max-time", "20"]
    command += ["--write-out", "\n%{http_code}", "--header", f"authorization: Bearer {KEY}"]
    if body:
        command += ["--header", "content-type: application/json", "--data", json.dumps(body)]
    text, _, status = output(*command, f"http://127.0.0.1:8080{path}").rpartition("\n")
    return int(status), text


def wait_for_server(podman, name):
    """Waits until the server answers; its process."""
    for _ in range(100):
        state = podman.inspect(name, ".State")
        if not state["Running"]:
            log = podman.run("logs", name)
            raise Problem(f"the container ended with exit code {state['ExitCode']}:\n{log.stdout}{log.stderr}")
        try:
            ask(state["Pid"], "/livez")
            return state["Pid"]
        except Problem as problem:
            found = problem
        time.sleep(0.1)
    raise Problem(f"the server does not answer: {found}")


def check_process(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    for key in "Uid", "Gid":
        found = set(re.search(rf"^{key}:\s+(.*)$", status, re.M)[1].split())
        check(found == {str(USER)}, f"the server runs with {key} {found}, expected {USER}")
    listening = re.findall(r": ([0-9A-F]{8}):1F90 \S+ 0A ", pathlib.Path(f"/proc/{pid}/net/tcp").read_text())
    check(listening == ["00000000"], f"the server listens on {listening}, port 8080, expected 00000000: all addresses")


def check_answers(pid):
    status, text = ask(pid, "/livez")
    check(status == 200, f"/livez: status {status}: {text}")
    body = {"prompt": "The", "max_tokens": 8, "temperature": 0, "seed": 1}
    status, text = ask(pid, "/v1/completions", body)
    check(status == 200, f"/v1/completions: status {status}: {text}")
    check(json.loads(text)["choices"][0]["text"], f"/v1/completions: no text: {text}")


def check_stop(podman, name):
    podman("stop", "--time", "40", name)
    state = podman.inspect(name, ".State")
    log = podman.run("logs", name)
    check(state["ExitCode"] == 0, f"stopped by the image's signal, the server ended with exit code {state['ExitCode']}")
    lines = log.stderr.splitlines()
    check(lines and all(line.startswith("{") for line in lines), f"the log is no JSON:\n{log.stderr}")


def check_server(podman):
    """The server answers as the image's settings say, and writes to the volume, which is its only place to write."""
    name = "starling"
    try:
        podman.start(name, *podman.inspect(IMAGE, ".Config.Cmd"), "--state-dir", "/var/lib/starling/state")
        pid = wait_for_server(podman, name)
        podman("healthcheck", "run", name)
        check_process(pid)
        check_answers(pid)
        check_stop(podman, name)
    finally:
        podman("rm", "--force", "--ignore", "--volumes", "--time", "0", name)


def problem_of(podman, dockerfile, ignored, given, binary):
    """What is wrong with a Dockerfile and its .dockerignore, or nothing."""
    try:
        for name, tag in bases(dockerfile):
            if podman.run("image", "exists", f"{name}:{tag}").returncode != 0:
                podman.import_base(name, tag, binary)
        shutil.rmtree(given / "context", ignore_errors=True)
        podman.build(dockerfile, ignored, given)
        if (given / "context").exists():
            check_context(given, binary)
        check_settings(podman)
        check_server(podman)
    except Problem as problem:
        return str(problem)


def check_faults(podman, dockerfile, ignored, given, binary):
    """Number of faults that are not found."""
    n_missed = 0
    for old, new, expected in FAULTS:
        check((dockerfile + ignored).count(old) == 1, f"fault {old!r}: not once in Dockerfile and .dockerignore")
        found = problem_of(podman, dockerfile.replace(old, new), ignored.replace(old, new), given, binary)
        if expected not in (found or ""):
            n_missed += 1
            print(f"{old!r} replaced by {new!r}: found {found}, expected a problem with {expected!r}")
    print(f"{len(FAULTS)} faults of the Dockerfile, {n_missed} of them not found")
    return n_missed


def main():
    binary = pathlib.Path(sys.argv[1]).resolve()
    texts = DOCKERFILE.read_text(), IGNORED.read_text()
    # podman waits for the disk after each layer
    has_memory = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > MEMORY
    at = "/dev/shm" if has_memory else None
    with tempfile.TemporaryDirectory(dir=at) as folder, Podman(pathlib.Path(folder)) as podman:
        given = podman.folder / "given"
        given.mkdir()
        shutil.copy(binary, given / "starling")
        problem = problem_of(podman, *texts, given, binary)
        print(f"image: {problem or 'works'}")
        sys.exit(bool(problem) or check_faults(podman, *texts, given, binary) > 0)


if __name__ == "__main__":
    main()
