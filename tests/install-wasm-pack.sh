#!/bin/sh
# Installs wasm-pack, and the wasm-bindgen command of the version in Cargo.lock, into target/tools: with these on the PATH,
# wasm-pack downloads nothing.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/tools"
tools=$(cd "$target/tools" && pwd)

# install PACKAGE VERSION COMMAND
install() {
    case $("$tools/bin/$3" --version 2>/dev/null || :) in *" $2") return ;; esac
    CARGO_TARGET_DIR=$tools/build CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_LTO=false \
        cargo install --quiet --root "$tools" "$1@$2"
}

install wasm-pack 0.15.1 wasm-pack
install wasm-bindgen-cli "$(sed -n '/^name = "wasm-bindgen"$/{n;s/version = "\(.*\)"/\1/p;}' Cargo.lock)" wasm-bindgen
