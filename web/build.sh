#!/bin/sh
# Puts the package together: modules that tests/build-wasm.sh made, and the compiled TypeScript.
set -eu
cd "$(dirname "$0")"
wasm=${STARLING_WASM:-${CARGO_TARGET_DIR:-../target}/wasm}
mkdir -p wasm
cp ../LICENSE-APACHE ../LICENSE-MIT .
# face NAME BUILDS...: builds whose face is the same text
face() {
    face=$1
    first=$2
    shift
    for ending in js d.ts; do cp "$wasm/web-$first/starling.$ending" "wasm/$face.$ending"; done
    for build; do
        cmp "$wasm/web-$first/starling.js" "$wasm/web-$build/starling.js"
        cp "$wasm/web-$build/starling_bg.wasm" "wasm/$build.wasm"
    done
}
face starling simd128 relaxed-simd
face threads simd128-threads relaxed-simd-threads
node check.mjs
rm -rf dist
npx tsc
