#!/bin/sh
# Builds the WebAssembly modules into target/wasm:
#
#   web-ISA/             JavaScript face: `wasm-pack build host-wasm --target web`
#   web-ISA-threads/     the same with threads; needs the source of the standard library (tests/install-wasm-std.sh)
#   web-ISA-memory64/    the same with 64-bit addresses; needs that source too
#   web-ISA-memory64-threads/
#   web-grammar/         grammar compiler: `wasm-pack build host-wasm/grammar --target web`
#   plain-ISA.wasm       module with plain exports
#   plain-ISA-chat.wasm  the same with chat templates
#   component-ISA.wasm   component
#
# ISA is scalar, simd128 or relaxed-simd. With arguments, builds those only, as `plain-scalar` or `web-simd128`.
# Needs wasm-pack and the wasm-bindgen of Cargo.lock on the PATH (tests/install-wasm-pack.sh).
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/wasm"
target=$(cd "$target" && pwd)
out=$target/wasm
PATH=$target/tools/bin:$PATH

# Modules are smaller with LTO
export CARGO_PROFILE_RELEASE_LTO=thin

# Panic messages have the same paths on every machine, without a user's directories
flags=
for folder in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/ "$(rustc --print sysroot)/lib/rustlib/src/rust/"; do
    flags="$flags --remap-path-prefix=$folder="
done

# with_flags DIRECTORY RUSTC-FLAGS COMMAND...: runs a cargo command with target directory DIRECTORY, and with RUSTC-FLAGS
# after those of .cargo/config.toml
with_flags() {
    directory=$target/$1
    rustc_flags=$2
    shift 2
    CARGO_TARGET_DIR=$directory CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS="$flags $rustc_flags" \
        CARGO_TARGET_WASM64_UNKNOWN_UNKNOWN_RUSTFLAGS="$flags $rustc_flags" "$@"
}

# wasm_pack CRATE NAME OUT RUSTC-FLAGS [CARGO-OPTIONS...]
wasm_pack() {
    crate=$1 name=$2 directory=$out/$3 rustc_flags=$4
    shift 4
    with_flags wasm-web "$rustc_flags" wasm-pack --quiet build "$crate" --target web --mode no-install --no-pack \
        --out-name "$name" --out-dir "$directory" -- "$@"
}

# with_std COMMAND...: runs it with a toolchain that compiles the standard library too
with_std() {
    (
        RUSTUP_TOOLCHAIN=$(tests/install-wasm-std.sh | tail -n 1)
        export RUSTUP_TOOLCHAIN RUSTC_BOOTSTRAP=1 CARGO_UNSTABLE_BUILD_STD=std,panic_abort
        "$@"
    )
}

# threads_flags BYTES: the workers of a page share the memory, of at most BYTES; 2 MiB at first in all builds, since the
# bindings create it. The precompiled standard library has no atomics
threads_flags() {
    printf %s "-C target-feature=+atomics,+bulk-memory"
    for argument in --shared-memory --import-memory --initial-memory=2097152 --max-memory="$1" --export=__heap_base \
        --export=__wasm_init_tls --export=__tls_size --export=__tls_align --export=__tls_base; do
        printf " -C link-arg=%s" "$argument"
    done
}

# memory64 OUT RUSTC-FLAGS [CARGO-OPTIONS...]: there is no precompiled standard library for memory64, and wasm-pack builds for
# it with a nightly toolchain only
memory64() {
    bindings=$out/$1 rustc_flags=$2
    shift 2
    with_flags wasm-web "$rustc_flags" cargo rustc --quiet --release -p starling-wasm --lib --crate-type cdylib \
        --target wasm64-unknown-unknown "$@"
    wasm-bindgen "$target/wasm-web/wasm64-unknown-unknown/release/starling_wasm.wasm" --target web --out-name starling \
        --out-dir "$bindings" --omit-default-module-path
}

# module FEATURES RUSTC-FLAGS: a module without the JavaScript face
module() {
    with_flags wasm-plain "$2" cargo rustc --quiet --release -p starling-wasm --lib --crate-type cdylib \
        --no-default-features --features "$1" --target wasm32-unknown-unknown -- -C strip=symbols
}

make() {
    isa=${1#*-}
    isa=${isa%-threads}
    case ${isa%-memory64} in
        scalar) isa_flags="-C target-feature=-simd128" ;;
        relaxed-simd) isa_flags="-C target-feature=+relaxed-simd" ;;
        *) isa_flags= ;;
    esac
    built=$target/wasm-plain/wasm32-unknown-unknown/release/starling_wasm.wasm
    case $1 in
        plain-*-chat)
            module plain,chat "$isa_flags"
            cp "$built" "$out/$1.wasm"
            ;;
        plain-*)
            module plain "$isa_flags"
            cp "$built" "$out/$1.wasm"
            ;;
        component-*)
            module component,chat "$isa_flags"
            cargo run --quiet --manifest-path tests/wasm-tools/Cargo.toml --target-dir "$target/wasm-tools" -- \
                component "$built" "$out/$1.wasm"
            ;;
        web-grammar) wasm_pack host-wasm/grammar grammar "$1" "" ;;
        *-memory64) with_std memory64 "$1" "$isa_flags" ;;
        *-memory64-threads) with_std memory64 "$1" "$isa_flags $(threads_flags 17179869184)" --features threads ;;
        *-threads)
            with_std wasm_pack host-wasm starling "$1" "$isa_flags $(threads_flags 4294967296)" --features threads
            ;;
        web-*) wasm_pack host-wasm starling "$1" "$isa_flags" ;;
    esac
}

# scalar for the plain face only: every browser of the last years has SIMD128
names=${*:-plain-scalar plain-simd128 plain-simd128-chat web-simd128 plain-relaxed-simd web-relaxed-simd web-simd128-threads \
    web-relaxed-simd-threads web-simd128-memory64 web-simd128-memory64-threads web-grammar component-simd128}

face() {
    for name in $names; do
        case $name in $1-*) make "$name" ;; esac
    done
}

# in parallel: most of a build is the work of one thread
{ face plain && face component; } &
face web
wait $!
find "$out" -name "*.wasm" -exec ls -l {} +
