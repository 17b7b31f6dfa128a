#!/usr/bin/env bash
# Build the extension with sanitizers into a directory of its own and run the tests of the codec on it.
#   pytest_asan.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
python=$PWD/.venv/bin/python
view=build/asan/view
rm -rf "$view"
mkdir -p "$view/moonclipfs" build/asan/objects
sanitize="-fsanitize=address,undefined -fno-sanitize-recover=all"
CFLAGS="-O1 -g -fno-omit-frame-pointer $sanitize" LDFLAGS="$sanitize" \
    "$python" -W ignore -c 'from setuptools import setup; setup()' -q build_ext -b "$view" -t build/asan/objects
# The package around the extension: everything of the checkout but its own extension.
for path in moonclipfs/*; do
    [[ $path == *.so || -e $view/$path ]] || ln -s "$PWD/$path" "$view/moonclipfs/"
done
for path in tests pyproject.toml; do ln -sfn "$PWD/$path" "$view/$path"; done
cd "$view"
# Python and its other extensions are not built for this, so leaks are not looked for, and frees are not matched.
export ASAN_OPTIONS=detect_leaks=0,alloc_dealloc_mismatch=0 UBSAN_OPTIONS=print_stacktrace=1
export LD_PRELOAD="$(cc -print-file-name=libasan.so):$(cc -print-file-name=libubsan.so)"
exec "$python" -m pytest -q -p no:cacheprovider tests/codec "$@"
