#!/usr/bin/env bash
# Installs what the tests need and runs all of them, on every target. Prints the seconds of each step at its end; the last
# line is `N passed, M failed`, of steps.
# Needs rustup, Node and Python; installs the rest with rustup, cargo, and (as root or with sudo) apt-get.
# With arguments, runs the steps of those names only.
set -uo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 RUST_BACKTRACE=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0
# the same random cases on every run; without it, each run of the tests tries new ones
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-20260}
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
target=$(cd "$target" && pwd)
export CARGO_TARGET_DIR=$target PATH=$target/tools/bin:$PATH
# a Python that has wasmtime
export PYTHON=$target/tools/python/bin/python

passed=0 failed=0 failures= table=
chosen=" $* "
is_chosen() {
    [ "$chosen" = "  " ] || [[ $chosen == *" $1 "* ]]
}

# sets `cpu` to the CPU seconds of all commands that have ended; not in a subshell, which has times of its own
count_cpu() {
    times >"$target/times"
    cpu=$(awk 'NR == 2 { gsub("[ms]", " "); printf "%d", $1 * 60 + $2 + $3 * 60 + $4 }' "$target/times")
}

# step NAME COMMAND...
step() {
    local name=$1 start=$SECONDS cpu cpu_before result=passed
    count_cpu
    cpu_before=$cpu
    shift
    is_chosen "$name" || return 0
    echo "== $name"
    "$@" || result=FAILED
    echo "== $name: $result in $((SECONDS - start)) s"
    if [ $result = passed ]; then passed=$((passed + 1)); else failed=$((failed + 1)) failures="$failures $name"; fi
    count_cpu
    table+=$(printf '%5d %5d  %s %s' $((SECONDS - start)) $((cpu - cpu_before)) "$name" "${result#passed}")$'\n'
}

# beside NAME COMMAND...: begins the work of a step that comes later, which has `begun NAME` as its command
declare -A running
beside() {
    local name=$1
    shift
    is_chosen "$name" || return 0
    "$@" >"$target/$name.log" 2>&1 &
    running[$name]=$!
}

begun() {
    wait "${running[$1]}"
    local code=$?
    cat "$target/$1.log"
    return $code
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install_packages() {
    if command -v qemu-aarch64 && command -v aarch64-linux-gnu-gcc && [ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ] &&
        command -v chromium && command -v haproxy && python3 -c 'import ensurepip'; then
        return 0
    fi
    as_root apt-get update -qq &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross chromium haproxy python3-venv
}

# not before it is needed: a registry of packages may be slow
install_podman() {
    command -v podman && command -v runc && command -v curl && return 0
    as_root apt-get update -qq &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends podman runc curl
}

# the program alone: the package starts a server and brings web pages
install_promtool() {
    local folder=$target/tools/prometheus
    [ -x "$target/tools/bin/promtool" ] && return 0
    mkdir -p "$folder" "$target/tools/bin"
    (cd "$folder" && { apt-get download -qq prometheus || { as_root apt-get update -qq && apt-get download -qq prometheus; }; } &&
        dpkg-deb --extract prometheus_*.deb . && cp usr/bin/promtool "$target/tools/bin")
}

install_rust() {
    rustup component add rustfmt clippy &&
        rustup target add aarch64-unknown-linux-gnu aarch64-unknown-none wasm32-unknown-unknown wasm32-wasip1
}

lint() {
    cargo clippy --quiet --workspace --all-targets --all-features -- -D warnings &&
        cargo clippy --quiet -p starling-server --no-default-features -- -D warnings &&
        cargo clippy --quiet -p starling-wasm --no-default-features --features bindgen -- -D warnings &&
        cargo clippy --quiet -p starling-wasm --no-default-features --features plain -- -D warnings &&
        cargo clippy --quiet -p starling-wasm --no-default-features --features component,chat \
            --target wasm32-unknown-unknown -- -D warnings
}

# an intrinsic that is a function of its own was called from outside of its instruction set, at many times the cost
intrinsics_are_inlined() {
    local kernels
    cargo build --quiet --release && kernels=$(ls -t "$target"/release/deps/libstarling_compute-*.rlib | head -n 1) &&
        [ "$(nm "$kernels" | grep -c starling_compute)" -gt 100 ] && ! nm --demangle "$kernels" | grep 'core_arch::x86::avx'
}

# undefined behaviour in the safe interfaces of `unsafe` code: buffers, pages, tasks
miri() {
    { rustup component add miri rust-src --toolchain nightly ||
        rustup toolchain install nightly --profile minimal --component miri --component rust-src; } &&
        MIRIFLAGS=-Zmiri-disable-isolation CARGO_TARGET_DIR=$target/miri cargo +nightly miri test --quiet -p starling-compute \
            --lib --no-default-features -- kernels::aligned kernels::tasks kernels::attention::memory
}

wasi_run() {
    cargo test --quiet --release --manifest-path tests/wasi-run/Cargo.toml --target-dir "$target/wasi-run" "$@"
}

build_wasm() {
    tests/install-wasm-pack.sh && tests/build-wasm.sh && wasi_run --no-run
}

# in_wasmtime ISA MODULE TESTS...
in_wasmtime() {
    local isa=$1 module=$2
    shift 2
    STARLING_MODULE=$target/wasm/$module STARLING_TEST_ISA=$isa wasi_run "$@"
}

module_in_wasmtime() {
    local isa
    for isa in scalar simd128 relaxed-simd; do
        in_wasmtime $isa plain-$isa.wasm --test module --test instructions || return 1
    done
    for isa in simd128 relaxed-simd; do
        in_wasmtime $isa web-$isa-threads/starling_bg.wasm --test instructions || return 1
    done
    in_wasmtime simd128 web-simd128-memory64/starling_bg.wasm --test instructions || return 1
    in_wasmtime relaxed-i16 plain-relaxed-simd.wasm --test module goldens || return 1
    in_wasmtime simd128 component-simd128.wasm --test component --test instructions
}

# python_with FOLDER PACKAGES...: a Python of its own in $target/FOLDER, with what pip is told
python_with() {
    local at=$target/$1
    shift
    { [ -e "$at" ] || python3 -m venv "$at"; } && "$at/bin/pip" install --quiet --disable-pip-version-check "$@"
}

install_wasmtime() {
    python_with tools/python wasmtime==50.0.1
}

install_clients() {
    python_with clients --no-deps -r tests/clients/requirements.txt && npm_ci tests/clients
}

# with_server SCRIPT: a script of tests/clients, on the command as it is shipped
with_server() {
    cargo build --quiet --release &&
        "$target/clients/bin/python" "tests/clients/$1" "$target/release/starling"
}

# files, alert rules, dashboard and documents of host-native/deploy
check_deploy() {
    cargo build --quiet --release &&
        "$target/clients/bin/python" tests/scripts/check_deploy.py "$target/release/starling"
}

# the container image, built and started without a registry
check_image() {
    cargo build --quiet --release && install_podman &&
        as_root env PATH="$PATH" HOME="$HOME" python3 tests/scripts/check_image.py "$target/release/starling"
}

npm_ci() {
    (cd "$1" && npm ci --no-audit --no-fund --loglevel=error)
}

build_web() {
    npm_ci web && STARLING_WASM=$target/wasm sh web/build.sh
}

# chat completions must be those of the command's server
package_in_node() {
    cargo build --quiet --release &&
        STARLING=$target/release/starling node --test tests/node/*.test.mjs
}

# in headless Chromium; the text of the demo must be that of the command
package_in_chromium() {
    npm_ci tests/browser && cargo build --quiet --release &&
        STARLING=$target/release/starling node --test --test-concurrency=1 --test-timeout=900000 tests/browser/*.test.mjs
}

# in the runtimes of other people's servers; not `npm ci`, which wants packages for all machines, and not all registries
# have them
package_at_the_edge() {
    (cd tests/edge && npm install --no-save --no-audit --no-fund --loglevel=error) &&
        node --test tests/edge/edge.test.mjs
}

step install-packages install_packages
step install-rust install_rust
step install-wasm-std tests/install-wasm-std.sh
step install-wasmtime install_wasmtime
# compilers and downloads leave each other time
beside install-clients install_clients
beside build-wasm build_wasm
step format cargo fmt --all --check
step dependencies python3 tests/scripts/check_dependencies.py
step clippy lint
step doc env RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps
step bare-metal cargo check --quiet -p starling --no-default-features --target aarch64-unknown-none
step fuzz-targets cargo check --quiet --manifest-path tests/fuzz/Cargo.toml --target-dir "$target/fuzz"
step intrinsics-are-inlined intrinsics_are_inlined
step miri miri
step native cargo test --quiet --workspace
# emulators and WebAssembly runtimes take one core, and so do most of the steps that follow. Not scalar-wasm: relaxed-simd
# tests its kernels too, and module-in-wasmtime its module
beside targets tests/run-targets.sh neon neon-dotprod simd128 relaxed-simd-node relaxed-simd
step build-wasm begun build-wasm
step module-in-wasmtime module_in_wasmtime
step module-in-node node --test tests/node/goldens.mjs
step install-promtool install_promtool
step install-clients begun install-clients
step deploy check_deploy
step image check_image
step clients with_server run.py
step llama-server-suite with_server llama_server_suite.py
step router with_server router.py
step chat-in-a-terminal with_server chat_pty.py
step build-web build_web
step targets begun targets
step package-in-node package_in_node
step package-in-chromium package_in_chromium
step package-at-the-edge package_at_the_edge
step readme python3 tests/scripts/run_readme.py

count_cpu
echo "seconds of each step, and of CPU; $SECONDS and $cpu in all:"
sort -rn <<<"$table" | sed '/^$/d'
[ -z "$failures" ] || echo "failed:$failures"
echo "$passed passed, $failed failed"
[ $failed = 0 ]
