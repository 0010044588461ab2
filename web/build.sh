#!/bin/sh
# Builds the npm package from the modules of tests/build-wasm.sh: optimises them with Binaryen, compiles the TypeScript.
set -eu
cd "$(dirname "$0")"
wasm=${STARLING_WASM:-${CARGO_TARGET_DIR:-../target}/wasm}
rm -rf wasm dist
mkdir wasm
cp ../LICENSE-APACHE ../LICENSE-MIT .
# optimise MODULE TO: with the features that the module has, and without the names of functions. Not with the passes that
# move constants into the loops of kernels: that costs a third of their speed
optimise() {
    case $2 in *-memory64*) memory64=--enable-memory64 ;; *) memory64= ;; esac
    npx wasm-opt --mvp-features --enable-mutable-globals --enable-sign-ext --enable-nontrapping-float-to-int \
        --enable-bulk-memory --enable-bulk-memory-opt --enable-multivalue --enable-reference-types --enable-simd \
        --enable-relaxed-simd --enable-threads $memory64 -Oz --skip-pass=precompute-propagate --skip-pass=simplify-locals \
        --skip-pass=code-pushing "$1" -o "$2"
}
# face NAME BUILDS...: builds that have the same bindings
face() {
    face=$1
    first=$2
    shift
    node bindings.mjs "$wasm/web-$first" starling "wasm/$face"
    for build; do
        cmp "$wasm/web-$first/starling.js" "$wasm/web-$build/starling.js"
        optimise "$wasm/web-$build/starling_bg.wasm" "wasm/$build.wasm"
    done
}
{
    face starling simd128 relaxed-simd
    face memory64 simd128-memory64
} &
face threads simd128-threads relaxed-simd-threads
face memory64-threads simd128-memory64-threads
node bindings.mjs "$wasm/web-grammar" grammar wasm/grammar
optimise "$wasm/web-grammar/grammar_bg.wasm" wasm/grammar.wasm
wait $!
node check.mjs
# what the page shows Markdown with is committed: the server embeds it without Node
cmp node_modules/marked/lib/marked.esm.js demo/assets/marked.js
cmp node_modules/dompurify/dist/purify.es.mjs demo/assets/purify.js
npx tsc
