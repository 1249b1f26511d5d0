#!/usr/bin/env bash
# Runs the full forms of recipes on this machine's GPUs: benchmarks/recipes.sh [DIR [SECTION...]]
# Results go to DIR/SECTION (default: results/recipes). A section that is there goes on where it stopped, on the same
# machine alone. MINUTES limits each section (default 8). Installs nothing. Run it on a machine that does nothing else.
# Sections, all by default; precision, offload, compile-512 and compile-2048 run on one GPU, the others on all:
#   precision      GPT-2 at every stage in fp16, bf16 and fp32, next to a published study
#   offload        GPT-2 Medium with each offload; NVME names the folder for files (default: /tmp/nvme)
#   zero-stages    GPT-2 to GPT-2 XL at every stage
#   zero-stages-7b Llama 2 7B at stage 3, with and without offload; it takes 80 GiB of host memory
#   accumulation   GPT-2 with 1 to 16 micro-batches a step
#   compile-512    two layers of Llama 3 70B at sequence 512, eager and compiled: a row takes most of a minute, and the
#                  reference a file of 48 GB in TMPDIR, best in memory (TMPDIR=/dev/shm)
#   compile-2048   the same at sequence 2048
#   compile-moe    two layers of Mixtral 8x7B at sequence 1024, the same. The learning rate is 1e-4: at the default of
#                  1e-3 compiled rows fail verification
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/sections.sh"
out="${1:-results/recipes}"
shift || true
(($#)) || set -- precision offload zero-stages zero-stages-7b accumulation compile-512 compile-2048 compile-moe
nvme="${NVME:-/tmp/nvme}"
mkdir -p "$out" "$nvme"

# run SECTION RECIPE OPTION...: goes on with the section's folder where it is there.
run() {
  local folder="$out/$1" recipe="$2" to=--output-dir
  shift 2
  [[ ! -e "$folder/results.json" ]] || to=--resume
  python3 -m zerobench recipe run "$recipe" "$@" --max-minutes "${MINUTES:-8}" "$to" "$folder"
}

section() {
  case "$1" in
    precision) run "$1" precision --world-size 1 --references --rounds 6 ;;
    offload)
      run "$1" offload --world-size 1 --model gpt2-medium --batch-size 8 --seq-length 1024 --num-steps 4 --warmup-steps 1 \
        --rounds 6 --verify-layers 2 --nvme-path "$nvme"
      ;;
    zero-stages) run "$1" zero-stages --num-steps 10 --warmup-steps 10 --rounds 6 --verify-layers 2 ;;
    zero-stages-7b)
      run "$1" zero-stages --model meta-llama/Llama-2-7b-hf --strategies zero3 --offload none,cpu_optimizer --num-steps 5 \
        --warmup-steps 2 --rounds 0 --verify-layers 1
      ;;
    accumulation)
      run "$1" accumulation --strategies zero1,zero2,zero3,fsdp2,deepspeed2,deepspeed3 --rounds 0 --num-steps 6 \
        --warmup-steps 2 --verify-layers 2
      ;;
    compile-512 | compile-2048)
      run "$1" compile --world-size 1 --model meta-llama/Meta-Llama-3-70B --num-layers 2 --strategies zero3,fsdp2 \
        --compile none,block --batch-size 1,4 --seq-length "${1#compile-}" --rounds 0 --num-steps 10 --warmup-steps 5 \
        --verify-layers 1
      ;;
    compile-moe)
      run "$1" compile --model mistralai/Mixtral-8x7B-v0.1 --num-layers 2 --strategies zero3,fsdp2 --compile none,block \
        --batch-size 1 --seq-length 1024 --lr 1e-4 --rounds 0 --num-steps 10 --warmup-steps 5 --verify-layers 1
      ;;
    *) echo "no section $1: the head of $0 lists them" >&2; return 2 ;;
  esac
}

run_sections "$@"
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" >&2; exit 1; }
