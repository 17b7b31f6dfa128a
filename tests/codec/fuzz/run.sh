#!/usr/bin/env bash
# Build the C code of the codec with sanitizers and fuzz it.
#   run.sh [iterations] [seed]          a deterministic run of fuzz.c
#   CC=clang FUZZER=1 run.sh ARGS...    libFuzzer, with its own arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
build=build/fuzz
mkdir -p "$build"
flags=(-O1 -g -Wall -Wextra -Werror -fno-omit-frame-pointer -fno-sanitize-recover=all -Iext)
if [[ -n ${FUZZER:-} ]]; then
    "${CC:-clang}" "${flags[@]}" -fsanitize=address,undefined,fuzzer -DMC_LIBFUZZER tests/codec/fuzz/fuzz.c ext/mc_*.c -lzstd -lm -o "$build/libfuzzer"
    exec "$build/libfuzzer" "$@"
fi
# fuzz.c stands between the encoder and these, to damage what they write.
flags+=(-Wl,--wrap=mc_zstd_pack,--wrap=mc_models_write)
"${CC:-cc}" "${flags[@]}" -fsanitize=address,undefined tests/codec/fuzz/fuzz.c ext/mc_*.c -lzstd -lm -o "$build/fuzz"
exec "$build/fuzz" "${1:-20000}" "${2:-0}"
