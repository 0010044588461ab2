#!/usr/bin/env bash
# Installs the source of the standard library, which builds with threads compile with atomics.
#
#   rustup               the usual case
#   Debian's rustc-web   if rustup's server has no source: a compiler with source, linked as the toolchain `distro`; needs
#                        root or sudo
#
# The last line of output is the toolchain to use, for RUSTUP_TOOLCHAIN.
set -euo pipefail

sysroot() { rustc +"$1" --print sysroot; }
has_source() { [ -f "$(sysroot "$1")/lib/rustlib/src/rust/library/Cargo.lock" ]; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

active=$(rustup show active-toolchain | cut -d' ' -f1)
if has_source "$active" || { rustup component add rust-src >&2 && has_source "$active"; }; then
    echo "$active"
    exit
fi

if ! [ -f /usr/lib/rustlib/src/rust/library/Cargo.lock ]; then
    echo "rustup has no source of the standard library: trying Debian's packages" >&2
    as_root apt-get update -qq >&2
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        rustc-web cargo-web rust-web-src >&2
fi
rustup toolchain link distro /usr
# Debian's compiler comes without the linker for WebAssembly, rustup's with it
host=$(rustc +distro -vV | sed -n 's/^host: //p')
linker=/usr/lib/rustlib/$host/bin/rust-lld
if ! [ -e "$linker" ]; then
    as_root mkdir -p "${linker%/*}"
    as_root ln -s "$(sysroot "$active")/lib/rustlib/$host/bin/rust-lld" "$linker"
fi
echo distro
