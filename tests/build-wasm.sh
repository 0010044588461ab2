#!/bin/sh
# Builds what ships for WebAssembly into target/wasm: the module with plain exports, plain-ISA.wasm, and the one with the
# face for JavaScript, web-ISA/. Needs wasm-bindgen of the crate's version. With arguments, builds those only, as
# `plain-scalar` or `web-simd128`.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
out=$target/wasm
mkdir -p "$out"
built=$target/wasm32-unknown-unknown/wasm/starling_wasm.wasm

# build RUSTC-FEATURES CARGO-FEATURES RUSTC-OPTIONS...: leaves the module in $built
build() {
    rustc_features=$1
    features=$2
    shift 2
    RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=$rustc_features" \
        cargo rustc --quiet --profile wasm -p starling-wasm --lib --crate-type cdylib --no-default-features \
        --features "$features" --target wasm32-unknown-unknown --target-dir "$target" -- "$@"
}

make() {
    isa=${1#*-}
    case $isa in
        scalar) rustc_features=-simd128 ;;
        simd128) rustc_features=+simd128 ;;
        relaxed-simd) rustc_features=+simd128,+relaxed-simd ;;
    esac
    case $1 in
        plain-*)
            build $rustc_features plain -C strip=symbols
            cp "$built" "$out/$1.wasm"
            ;;
        web-*)
            # names of functions go, sections that wasm-bindgen reads stay
            build $rustc_features bindgen,chat
            wasm-bindgen "$built" --target web --out-name starling --out-dir "$out/$1" --omit-default-module-path \
                --remove-name-section --remove-producers-section
            ;;
    esac
}

# without SIMD the plain module alone: no browser of the last years lacks it
for name in ${*:-plain-scalar plain-simd128 web-simd128 plain-relaxed-simd web-relaxed-simd}; do
    make "$name"
done
ls -l "$out"/plain-*.wasm "$out"/web-*/*.wasm
