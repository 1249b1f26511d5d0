#!/usr/bin/env bash
# Runs the tests of our own kernels under NVIDIA's compute-sanitizer: tests/gpu/sanitize.sh [DIR] [TOOL...]
# Tools: memcheck and racecheck unless others are named. Logs go to DIR (default: results/gpu_sanitize). The installed
# zerobench is tested. The exit status tells whether a tool found anything or a test failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="${1:-results/gpu_sanitize}"
shift || true
(($#)) || set -- memcheck racecheck
mkdir -p "$out"
failed=0
for tool in "$@"; do
  # Only kernels of the module are instrumented: torch's own are NVIDIA's and PyTorch's to check, and many. Calls that
  # report an error are not findings: some tests run out of memory on purpose.
  timeout "${ZEROBENCH_FILE_TIMEOUT_S:-900}" compute-sanitizer --tool "$tool" --target-processes all \
    --report-api-errors no --kernel-name kernel_substring=N2zb --error-exitcode 77 \
    python3 -m pytest -n 0 -q -p no:cacheprovider \
    tests/gpu/test_kernels.py tests/gpu/test_adam_cuda.py tests/gpu/test_device.py >"$out/$tool.log" 2>&1
  code=$?
  ((code == 0)) || failed=1
  echo "$tool: exit status $code; $(grep -a -E '(ERROR|RACECHECK) SUMMARY' "$out/$tool.log" | tail -n 1); $(grep -a -E '[0-9]+ passed' "$out/$tool.log" | tail -n 1)"
done
exit "$failed"
