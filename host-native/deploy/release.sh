#!/usr/bin/env bash
# Makes the files of a release: a static binary, a Debian package, a software bill of materials, and their digests.
#
#     host-native/deploy/release.sh [OPTION OF CARGO BUILD...]
#
# TARGET    target of the binary [x86_64-unknown-linux-musl]; `rustup target add` it, and for musl install musl-tools
# BINARY    package this binary instead of building one
# OUTPUT    directory of the files [target/dist]
#
# The same commit and toolchain give the same bytes: times are those of the commit, paths of the machine are replaced.
set -euo pipefail
cd "$(dirname "$0")/../.."

target=${TARGET:-x86_64-unknown-linux-musl}
folder=${CARGO_TARGET_DIR:-$PWD/target}
output=${OUTPUT:-$folder/dist}
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

case $target in
    x86_64-*) architecture=amd64 ;;
    aarch64-*) architecture=arm64 ;;
    *)
        echo "TARGET: found $target, expected x86_64 or aarch64" >&2
        exit 2
        ;;
esac

if [ -z "${BINARY:-}" ]; then
    cargo_home=${CARGO_HOME:-$HOME/.cargo}
    RUSTFLAGS="--remap-path-prefix=$PWD=/source --remap-path-prefix=$cargo_home=/cargo" \
        cargo build --release --locked -p starling-native --target "$target" "$@"
    BINARY=$folder/$target/release/starling
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
# the modes of directories must not depend on the umask
umask 022
install -D -m 755 "$BINARY" "$root/usr/bin/starling"
strip "$root/usr/bin/starling"

# the binary alone
rm -rf "$output"
mkdir -p "$output"
name=starling-$version-$target
mkdir "$work/$name"
cp "$root/usr/bin/starling" LICENSE-APACHE LICENSE-MIT README.md "$work/$name"
tar --create --directory="$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" "$name" |
    gzip --no-name --best >"$output/$name.tar.gz"

# the Debian package
deploy=host-native/deploy
install -D -m 644 $deploy/systemd/starling.service "$root/usr/lib/systemd/system/starling.service"
install -D -m 644 $deploy/systemd/starling.toml "$root/etc/starling/starling.toml"
# it may have a token
install -D -m 640 $deploy/systemd/environment "$root/etc/starling/environment"
install -D -m 644 LICENSE-MIT "$root/usr/share/doc/starling/LICENSE-MIT"
install -D -m 644 LICENSE-APACHE "$root/usr/share/doc/starling/LICENSE-APACHE"
install -D -m 644 /dev/null "$root/usr/share/bash-completion/completions/starling"
"$BINARY" completions bash >"$root/usr/share/bash-completion/completions/starling"
cat >"$root/usr/share/doc/starling/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: the Starling authors
License: MIT or Apache-2.0
 The texts are LICENSE-MIT and LICENSE-APACHE in this directory.

Files: bundled model
Copyright: the Starling authors
License: Apache-2.0
END
mkdir "$root/DEBIAN"
cat >"$root/DEBIAN/control" <<END
Package: starling
Version: $version
Architecture: $architecture
Maintainer: ${MAINTAINER:-The Starling authors}
Installed-Size: $(du -sk --apparent-size "$root" | cut -f1)
Recommends: ca-certificates
Section: net
Priority: optional
Description: language models on CPUs, with the same bytes everywhere
 Runs GGUF models, and serves them by the OpenAI API. The same model, prompt
 and seed give the same text on every instruction set, with any number of
 threads and any other requests in the batch.
END
printf '%s\n' /etc/starling/environment /etc/starling/starling.toml >"$root/DEBIAN/conffiles"
cat >"$root/DEBIAN/postinst" <<'END'
#!/bin/sh
set -e
# an update restarts a server that runs; a new installation starts none
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart starling.service
fi
END
cat >"$root/DEBIAN/prerm" <<'END'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now starling.service
fi
END
cat >"$root/DEBIAN/postrm" <<'END'
#!/bin/sh
set -e
if [ "$1" = purge ]; then
    # the store of models
    rm -rf /var/lib/private/starling /var/lib/starling
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
END
chmod 755 "$root"/DEBIAN/p*
# `dpkg-deb` takes times from SOURCE_DATE_EPOCH
dpkg-deb --root-owner-group --build "$root" "$output/starling_${version}_$architecture.deb" >/dev/null

python3 $deploy/sbom.py "$target" >"$output/starling-$version.cdx.json"
(cd "$output" && sha256sum -- * >SHA256SUMS)
ls -l "$output"
