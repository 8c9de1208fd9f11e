#!/bin/sh
# Set up a virtual environment with the locked dependencies and this project in it.
# Needs a Python >= 3.11; what else is missing is installed with apt when we are root.
set -eu
venv=$1

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
    for name in python3 python3.11 python3.12 python3.13 python3.14; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
}

apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    say "installing $* with apt"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq "$@" >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq "$@" >/dev/null; }
}

python=$(find_python)
[ -n "$python" ] || { apt_install python3 python3-venv && python=$(find_python); }
[ -n "$python" ] || die "no Python >= 3.11 found: install one, such as the package python3"

# A pip that was killed leaves packages that no later pip can read.
if [ -e "$venv/.installing" ]; then
    say "the last set-up did not end: beginning again"
    rm -rf "$venv"
fi
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $venv with $($python --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" 2>/dev/null ||
        { apt_install python3-venv && rm -rf "$venv" && "$python" -m venv "$venv"; } ||
        die "cannot make a virtual environment: install the package python3-venv"
fi
: >"$venv/.installing"
say "installing the locked dependencies: a minute or two"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --require-hashes \
    -r requirements.lock
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps \
    --no-build-isolation -e .
rm "$venv/.installing"

# What the kernel tier runs beside us: two shells for the boot script, a C compiler for rivals.
missing=
for tool in dash busybox cc; do
    command -v $tool >/dev/null 2>&1 || missing="$missing $tool"
done
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086
    apt_install $(echo "$missing" | sed 's/cc/gcc libc6-dev/') ||
        say "not found:$missing; the tests that need them will say so"
fi
say "done: $venv/bin/hostprep"
