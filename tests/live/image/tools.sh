#!/usr/bin/env bash
# Build and run images without Docker: `tools.sh install FOLDER` unpacks the programs, and a base for images, there;
# `tools.sh in FOLDER COMMAND...` runs a command that sees them laid over /usr and /etc, as no one else does.
set -euo pipefail

packages=(buildah golang-github-containers-common golang-github-containers-image libassuan0 libgpgme11 mmdebstrap runc)
action=$1
folder=$(realpath -m "$2")

if [ "$action" = install ]; then
    rm -rf "$folder"
    mkdir -p "$folder/packages"
    apt-get -qq update
    (cd "$folder/packages" && apt-get -qq -o APT::Sandbox::User=root download "${packages[@]}")
    for package in "$folder"/packages/*.deb; do dpkg -x "$package" "$folder/root"; done
    rm -rf "$folder/packages"
    "$0" in "$folder" buildah --version > /dev/null
    "$0" in "$folder" runc --version > /dev/null
    "$0" in "$folder" mmdebstrap --quiet --variant=minbase --include=ca-certificates bookworm "$folder/debian.tar"
    touch "$folder/.installed"
else
    shift 2
    exec unshare --mount bash -c '
        mount -t overlay -o "lowerdir=$0/root/usr:/usr" overlay /usr
        mount -t overlay -o "lowerdir=$0/root/etc:/etc" overlay /etc
        exec "$@"' "$folder" "$@"
fi
