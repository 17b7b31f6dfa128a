#!/usr/bin/env bash
# Set-up for a clone: system packages, .venv, the extension. Does nothing when nothing it depends on has changed.
#   PYTHON=/path/to/python3.x   use this interpreter instead of looking for one
# `setup.sh suites` installs the programs that only the slow tests run instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/.setup-stamp

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# What a finished set-up depends on, as text.
fingerprint() {
    pwd
    .venv/bin/python -V 2>/dev/null || echo "no python"
    find ext -type f ! -name '_*.c' -print0 | sort -z | xargs -0 sha256sum pyproject.toml tests/setup.sh
}

is_done() {
    [[ -f $stamp ]] && compgen -G 'moonclipfs/_codec*.so' >/dev/null && [[ $(fingerprint) == "$(<"$stamp")" ]]
}

# The first interpreter that runs and is new enough. Asked by running it: a shim may exist and refuse.
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
}

# Debian's names of the system packages that are missing. Each is asked for by what it gives, since the
# same thing may come from elsewhere.
missing_packages() {
    local python=$1
    command -v gcc >/dev/null || command -v cc >/dev/null || echo gcc
    [[ -e /usr/include/stdio.h ]] || echo libc6-dev
    command -v pkg-config >/dev/null || echo pkg-config
    command -v fusermount3 >/dev/null || echo fuse3
    has_header fuse3/fuse.h || echo libfuse3-dev
    has_header zstd.h || echo libzstd-dev
    has_header xxhash.h || echo libxxhash-dev
    if [[ -z $python ]]; then
        printf '%s\n' python3 python3-dev python3-venv
    elif [[ $("$python" -c 'import sys; print(sys.base_prefix)') == /usr ]]; then
        local version
        version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
        "$python" -c 'import ensurepip' 2>/dev/null || echo "$version-venv"
        has_python_header "$python" || echo "$version-dev"
    fi
}

has_header() { compgen -G "/usr/include/$1" >/dev/null || compgen -G "/usr/include/*-linux-gnu/$1" >/dev/null || compgen -G "/usr/local/include/$1" >/dev/null; }

has_python_header() { [[ -e $("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]]; }

install_packages() {
    local install="apt-get install -y --no-install-recommends $*" as_root=
    command -v apt-get >/dev/null || die "missing: $*. Install what these Debian packages give, then run this again."
    if [[ $(id -u) != 0 ]]; then
        command -v sudo >/dev/null || die "missing: $*. Install them as root, then run this again:  $install"
        as_root=sudo
    fi
    say "installing $*"
    $as_root sh -c "apt-get update -qq; DEBIAN_FRONTEND=noninteractive $install" >&2 ||
        die "could not install: $*. Install them as root, then run this again:  $install"
}

# Programs and their packages; the tests of what cannot be had are skipped.
install_suites() {
    local pair missing=()
    for pair in fio:fio stress-ng:stress-ng dbench:dbench bonnie++:bonnie++ fs_mark:fsmark postmark:postmark \
        rsync:rsync inotifywait:inotify-tools git:git; do
        PATH=$PATH:/usr/sbin command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
    done
    ((${#missing[@]} == 0)) || (install_packages "${missing[@]}") || say "their tests are skipped"
}

main() {
    ! is_done || exit 0
    local python packages
    python=$(find_python)
    [[ -n $python || -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is no Python 3.11 or newer"
    mapfile -t packages < <(missing_packages "$python")
    ((${#packages[@]} == 0)) || install_packages "${packages[@]}"
    python=$(find_python)
    [[ -n $python ]] || die "no Python 3.11 or newer; give one by PYTHON=/path/to/python3.x"
    has_python_header "$python" || die "$python has no Python.h; give another one by PYTHON=/path/to/python3.x"

    rm -f "$stamp"
    if ! .venv/bin/python -c '' 2>/dev/null; then
        say "making .venv with $python ($("$python" -V))"
        rm -rf .venv
        "$python" -m venv .venv
    fi
    say "installing moonclipfs and what it is developed with into .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
    fingerprint >"$stamp"
}

case ${1:-} in
    suites) install_suites ;;
    *) main ;;
esac
