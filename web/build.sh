#!/bin/sh
# Puts the package together: modules that tests/build-wasm.sh made, made smaller, and the compiled TypeScript.
set -eu
cd "$(dirname "$0")"
wasm=${STARLING_WASM:-${CARGO_TARGET_DIR:-../target}/wasm}
mkdir -p wasm
cp ../LICENSE-APACHE ../LICENSE-MIT .
# smaller MODULE TO: by Binaryen, which knows what compilers leave behind; with nothing in it that the module had not. Not
# by passes that move what kernels do: constants into their loops cost a third of their speed
smaller() {
    npx wasm-opt --mvp-features --enable-mutable-globals --enable-sign-ext --enable-nontrapping-float-to-int \
        --enable-bulk-memory --enable-bulk-memory-opt --enable-multivalue --enable-reference-types --enable-simd \
        --enable-relaxed-simd --enable-threads -Oz --converge --skip-pass=precompute-propagate --skip-pass=simplify-locals \
        --skip-pass=code-pushing "$1" -o "$2"
}
# face NAME BUILDS...: builds whose face is the same text
face() {
    face=$1
    first=$2
    shift
    for ending in js d.ts; do cp "$wasm/web-$first/starling.$ending" "wasm/$face.$ending"; done
    for build; do
        cmp "$wasm/web-$first/starling.js" "$wasm/web-$build/starling.js"
        smaller "$wasm/web-$build/starling_bg.wasm" "wasm/$build.wasm"
    done
}
cp "$wasm"/web-simd128/constraints.* "$wasm"/web-grammar/grammar.js "$wasm"/web-grammar/grammar.d.ts wasm
face starling simd128 relaxed-simd &
face threads simd128-threads relaxed-simd-threads
smaller "$wasm/web-grammar/grammar_bg.wasm" wasm/grammar.wasm
wait $!
node check.mjs
rm -rf dist
npx tsc
