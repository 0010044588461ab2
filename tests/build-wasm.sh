#!/bin/sh
# Builds what ships for WebAssembly into target/wasm: the module with plain exports, plain-ISA.wasm; those with the face
# for JavaScript, web-ISA/, and with threads, web-ISA-threads/, which need what install-wasm-std.sh gets, as does
# web-grammar/, what reads schemas and grammars for them; and the component, component-ISA.wasm. With arguments, builds
# those only, as `plain-scalar` or `web-simd128`.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
out=$target/wasm
mkdir -p "$out"

# What computes is compiled for speed, for the sake of its kernels. They say themselves what is inlined into them and are
# written in vectors: inlining more than is small, and making vectors of scalars, makes modules larger and slower. They are
# also written in an order that needs few registers, which engines keep to: the compiler is to leave it
small="-C llvm-args=-inline-threshold=5 -C llvm-args=-inlinehint-threshold=60 -C no-vectorize-loops -C no-vectorize-slp"
small="$small -C llvm-args=-pre-RA-sched=source"

# Panics name their places: the same ones on every machine, and without a user's folders
for folder in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/ "$(rustc --print sysroot)/lib/rustlib/src/rust/"; do
    small="$small --remap-path-prefix=$folder="
done

# build RUSTC-FEATURES CARGO-FEATURES RUSTC-OPTIONS...: leaves the module of $package in $built
build() {
    rustc_features=$1
    features=$2
    shift 2
    RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=$rustc_features $small" \
        cargo rustc --quiet --profile wasm -p $package --lib --crate-type cdylib --no-default-features \
        --features "$features" --target wasm32-unknown-unknown --target-dir "$dir" -- "$@"
}

# build_web as `build`, with the standard library compiled anew: for size, and with atomics where there are threads.
# Panics do not say where they were, the output of `{:?}` is short: a fiftieth of a module
build_web() {
    (
        RUSTFLAGS="${RUSTFLAGS:-} -Zlocation-detail=none -Zfmt-debug=shallow"
        RUSTUP_TOOLCHAIN=$(tests/install-wasm-std.sh | tail -n 1)
        export RUSTFLAGS RUSTUP_TOOLCHAIN RUSTC_BOOTSTRAP=1 CARGO_UNSTABLE_BUILD_STD=std,panic_abort
        export CARGO_UNSTABLE_BUILD_STD_FEATURES=optimize_for_size
        build "$@"
    )
}

# threads: memory that the workers of a page share, up to the 4 GiB there can be; 2 MiB at first, the same in all builds,
# as the face says how much
build_threads() {
    (
        RUSTFLAGS="${RUSTFLAGS:-}"
        for argument in --shared-memory --import-memory --initial-memory=2097152 --max-memory=4294967296 --export=__heap_base \
            --export=__wasm_init_tls --export=__tls_size --export=__tls_align --export=__tls_base; do
            RUSTFLAGS="$RUSTFLAGS -C link-arg=$argument"
        done
        export RUSTFLAGS
        build_web "$1,+atomics,+bulk-memory" bindgen,chat,threads
    )
}

wasm_tools() {
    cargo run --quiet --manifest-path tests/wasm-tools/Cargo.toml --target-dir "$target/wasm-tools" -- "$@"
}

make() {
    # plain module and component have most crates in common
    case $1 in
        web-*) dir=$target/wasm-web ;;
        *) dir=$target/wasm-plain ;;
    esac
    case $1 in
        web-grammar) package=starling-grammar ;;
        *) package=starling-wasm ;;
    esac
    built=$dir/wasm32-unknown-unknown/wasm/$(echo $package | tr - _).wasm
    isa=${1#*-}
    isa=${isa%-threads}
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
        component-*)
            build $rustc_features component,chat -C strip=symbols
            wasm_tools component "$built" "$out/$1.wasm"
            ;;
        web-grammar)
            build_web +simd128 ""
            wasm_tools bindgen "$built" grammar "$out/$1" restarts
            ;;
        web-*)
            # unstripped: names of functions go with the sections that are read here
            case $1 in
                *-threads) build_threads $rustc_features ;;
                *) build_web $rustc_features bindgen,chat ;;
            esac
            wasm_tools bindgen "$built" starling "$out/$1"
            cp host-wasm/src/constraints.js host-wasm/src/constraints.d.ts "$out/$1"
            ;;
    esac
}

# without SIMD the plain module alone: no browser of the last years lacks it
names=${*:-plain-scalar plain-simd128 web-simd128 plain-relaxed-simd web-relaxed-simd web-simd128-threads \
    web-relaxed-simd-threads web-grammar component-simd128}

face() {
    for name in $names; do
        case $name in $1-*) make "$name" ;; esac
    done
}

# side by side, since most of a build is the work of one thread
{ face plain && face component; } &
face web
wait $!
ls -l "$out"/*.wasm "$out"/web-*/*.wasm
