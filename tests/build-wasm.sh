#!/bin/sh
# Builds what ships for WebAssembly into target/wasm: the module with plain exports, plain-ISA.wasm, and the package of
# wasm-bindgen for browsers, web-ISA/, and for Node, nodejs-ISA/. Needs wasm-bindgen of the crate's version.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
out=$target/wasm
mkdir -p "$out"

# build RUSTC-FEATURES CARGO-OPTIONS...: leaves the module in $built
build() {
    features=$1
    shift
    RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=$features" \
        cargo build --quiet --release -p starling-wasm --target wasm32-unknown-unknown --target-dir "$target" "$@"
}
built=$target/wasm32-unknown-unknown/release/starling_wasm.wasm

# plain ISA RUSTC-FEATURES
plain() {
    build "$2"
    cp "$built" "$out/plain-$1.wasm"
}

# package ISA RUSTC-FEATURES
package() {
    build "$2" --no-default-features --features bindgen
    for kind in web nodejs; do
        wasm-bindgen "$built" --target $kind --out-dir "$out/$kind-$1"
    done
    echo '{ "type": "module" }' >"$out/web-$1/package.json"
    echo '{ "type": "commonjs" }' >"$out/nodejs-$1/package.json"
}

# without SIMD the module alone: no browser of the last years lacks it
plain scalar -simd128
for isa in simd128 relaxed-simd; do
    features=+simd128
    [ $isa = simd128 ] || features=+simd128,+relaxed-simd
    plain $isa $features
    package $isa $features
done
ls -l "$out"/plain-*.wasm "$out"/web-*/*.wasm
