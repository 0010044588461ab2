#!/bin/sh
# Runs the engine's tests and replays the pinned results on every target, and prints a line per target; with
# arguments, on those targets only.
# Needs qemu-aarch64 and gcc-aarch64-linux-gnu, Node, and for `relaxed-simd` a Python with wasmtime ($PYTHON).
set -u
cd "$(dirname "$0")/.."
export CARGO_TERM_QUIET=true
target=${CARGO_TARGET_DIR:-target}

# engine tests, then the goldens; or those of `only`, with `features` without the goldens, which have none of them
only=
features=
tests() {
    if [ -n "$only" ]; then
        cargo test -p starling-compute --lib $features "$@" "$only"
    else
        cargo test --lib -p starling -p starling-compute "$@"
    fi && { [ -n "$features" ] || cargo test -p starling-tests --test goldens "$@"; }
}

# wasm FEATURES ISA: a directory for each set of features, or each run would build everything anew
wasm() {
    RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=$1" STARLING_TEST_ISA=$2 \
        tests --target wasm32-wasip1 --target-dir "$target/wasm$1"
}

# aarch64 CPU ISA
aarch64() {
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu $1 -L /usr/aarch64-linux-gnu" \
        STARLING_TEST_ISA=$2 tests --target aarch64-unknown-linux-gnu
}

relaxed=+simd128,+relaxed-simd

run() {
    case $1 in
        native) tests ;;
        # what is not the kernels' has nothing of the instruction set; where there are dot products, kernels are tested
        # with and without them
        neon) only=kernels::tests::the_named_path && aarch64 cortex-a53 neon ;;
        neon-dotprod) only=kernels:: && aarch64 max neon-dotprod ;;
        scalar-wasm) wasm -simd128 scalar ;;
        # all but the kernels is what relaxed-simd runs
        simd128)
            only=kernels:: && wasm +simd128 simd128 && features="--features loads-together" && wasm +simd128 simd128
            ;;
        # the baseline compiler of Node 20 (V8 11) lowers the relaxed dot wrongly: the engine must do without
        relaxed-simd-node)
            only=kernels::
            isa=$(node -p 'parseInt(process.versions.v8) < 12 ? "simd128" : "relaxed-simd"') && wasm $relaxed "$isa"
            ;;
        relaxed-simd)
            CARGO_TARGET_WASM32_WASIP1_RUNNER="${PYTHON:-python3} $PWD/tests/wasi-run.py" wasm $relaxed relaxed-simd
            ;;
        *) echo "no target $1; there are: $all" && return 1 ;;
    esac
}

all="native neon neon-dotprod scalar-wasm simd128 relaxed-simd-node relaxed-simd"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0
for name in ${*:-$all}; do
    only=
    features=
    if run "$name" >"$log" 2>&1; then
        echo "$name: $(grep '^test result' "$log" | cut -d. -f1-2 | tr '\n' ' ')"
    else
        echo "$name: FAILED"
        cat "$log"
        failed=1
    fi
done
exit $failed
