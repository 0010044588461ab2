#!/bin/sh
# Puts the package together: modules that tests/build-wasm.sh made, and the compiled TypeScript.
set -eu
cd "$(dirname "$0")"
wasm=${STARLING_WASM:-${CARGO_TARGET_DIR:-../target}/wasm}
mkdir -p wasm
cp ../LICENSE-APACHE ../LICENSE-MIT .
# the faces of all builds are the same text, which the tests check
cp "$wasm/web-simd128/starling.js" "$wasm/web-simd128/starling.d.ts" wasm/
for isa in simd128 relaxed-simd; do
    cmp "$wasm/web-simd128/starling.js" "$wasm/web-$isa/starling.js"
    cp "$wasm/web-$isa/starling_bg.wasm" "wasm/$isa.wasm"
done
node check.mjs
rm -rf dist
npx tsc
