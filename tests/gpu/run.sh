#!/usr/bin/env bash
# Builds zerobench against this machine's torch and runs the GPU tests: tests/gpu/run.sh [DIR [TEST_FILE...]]
# Logs go to DIR (default: results/gpu_tests). All test files run unless some are named; tests that need more GPUs than
# there are skip with that reason. With ZEROBENCH_NO_BUILD=1 the zerobench that is installed is tested. The exit status
# tells whether any test failed.
#
# The build is pip's own, in an environment that gets what it needs, NVIDIA's compiler where the machine has no nvcc. With
# ZEROBENCH_NO_ISOLATION=1 it uses what is installed (scikit-build-core, cmake, ninja, nvcc), for machines without network.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="${1:-results/gpu_tests}"
shift || true
(($#)) || set -- tests/gpu/test_*.py
mkdir -p "$out"
if [[ -z "${ZEROBENCH_NO_BUILD:-}" ]]; then
  options=()
  [[ -z "${ZEROBENCH_NO_ISOLATION:-}" ]] || options=(--no-build-isolation)
  python3 -m pip install "${options[@]}" '.[test]' >"$out/build.log" 2>&1 ||
    { echo "the build failed: $out/build.log" >&2; exit 1; }
fi
failed=0
# One file after the other: some measure memory and time, and expect the GPUs for themselves.
for file; do
  log="$out/$(basename "$file" .py).log"
  timeout "${ZEROBENCH_FILE_TIMEOUT_S:-900}" python3 -m pytest -n 0 -q -p no:cacheprovider "$file" >"$log" 2>&1
  code=$?
  ((code == 0 || code == 5)) || failed=1  # 5: nothing to run on this machine
  echo "$file: $(tail -n 1 "$log")"
done
exit "$failed"
