#!/usr/bin/env bash
# Measures on this machine's GPUs what the tables of benchmarks/gpu_*.md show: benchmarks/gpu.sh [DIR [SECTION...]]
# Tables, results and logs go to DIR (default: results/gpu_bench); targets.md there holds every comparison against the
# targets (benchmarks/targets.py). Installs nothing. Run it on a machine that does nothing else. STRATEGIES=zero1,ddp,...
# takes these rows alone, in that order, where there is no time for all: a row of Llama 1.3B takes some 40 s, one of
# DeepCompile minutes. Sections, all by default; each takes some ten minutes or less on two to four GPUs:
#   llama, llama-compiled    Llama 1.3B, 4x2048: eager; by block and as a whole
#   gpt2, gpt2-compiled      GPT-2 124M, 32x128, the same
#   gpt2-long, gpt2-long-compiled   GPT-2 124M, 16x1024, the same
#   parity                   bits and losses of the stages
#   steps                    the bare loop, without anything of `compare` around it
#   one                      one GPU: the stages beside plain PyTorch
#   comm, adam               collectives over NCCL and peer memory; Adam
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source benchmarks/sections.sh
out="${1:-results/gpu_bench}"
shift || true
(($#)) || set -- llama llama-compiled gpt2 gpt2-compiled gpt2-long gpt2-long-compiled parity steps one comm adam
mkdir -p "$out"
gpus="$(python3 -c 'import torch; print(torch.cuda.device_count())')"
ours=compute_only,zero1,zero2,zero3
eager="$ours",ddp,ddp_compress,ddp_master,fsdp2,fsdp2_keep,deepspeed1,deepspeed2,deepspeed3,deepspeed3_leaves,mfsdp1,mfsdp2,mfsdp3
compiled="$ours",ddp,ddp_master,fsdp2,deepspeed1,deepspeed2,deepspeed3_leaves,mfsdp1,mfsdp2,mfsdp3
deepcompile=deepcompile3,deepcompile3_prefetch,deepcompile3_selective,deepcompile3_both

# compare NAME MODEL BATCH SEQ STEPS STRATEGIES [OPTION...]: a step is timed alike in every row of one call.
compare() {
  local name="$1" model="$2" batch_size="$3" seq_length="$4" num_steps="$5" strategies="${STRATEGIES:-$6}"
  shift 6
  python3 -m zerobench compare --model "$model" --batch-size "$batch_size" --seq-length "$seq_length" --precision bf16 \
    --num-steps "$num_steps" --warmup-steps 20 --verify-layers 2 --strategies "$strategies" "$@" --output-dir "$out/$name"
}

section() {
  case "$1" in
    llama) compare llama llama-1.3b 4 2048 16 "$eager" ;;
    llama-compiled) compare llama-compiled llama-1.3b 4 2048 16 "$ours,ddp_master,fsdp2,$deepcompile" --compile block,whole ;;
    gpt2) compare gpt2 hf:gpt2 32 128 40 "$eager" ;;
    gpt2-compiled) compare gpt2-compiled hf:gpt2 32 128 40 "$compiled,$deepcompile" --compile block,whole ;;
    gpt2-long) compare gpt2-long hf:gpt2 16 1024 30 "$eager" ;;
    gpt2-long-compiled) compare gpt2-long-compiled hf:gpt2 16 1024 30 "$compiled,$deepcompile" --compile block,whole ;;
    parity) torchrun --nproc_per_node "$gpus" benchmarks/parity_gpu.py --output "$out/parity.md" 2>"$out/parity.log" ;;
    steps)
      torchrun --nproc_per_node "$gpus" benchmarks/gpu_step.py \
        gpt2:32:128:20:floor,ddp,fsdp2,zero1,zero2,zero3,floor,zero1 \
        llama-1.3b:4:2048:8:floor,ddp,fsdp2,zero1,zero2,zero3,floor-block,fsdp2-block,zero1-block,zero3-block \
        2>"$out/step.log" | tee "$out/step.jsonl"
      ;;
    one) CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" python3 benchmarks/gpu_one.py 2>"$out/one.log" | tee "$out/one.jsonl" ;;
    comm)
      ((gpus >= 2)) || { echo "comm needs two GPUs, and this machine has $gpus" >&2; return 1; }
      for communicator in nccl peer; do
        python3 -m zerobench bench comm --device cuda --communicator "$communicator" --output "$out/comm_$communicator.md"
      done
      ;;
    adam) python3 -m zerobench bench adam --device cuda --output "$out/adam.md" ;;
    *) echo "no section $1: the head of $0 lists them" >&2; return 2 ;;
  esac
}

run_sections "$@"
compared=("$out"/*/results.json)
if [[ -e "${compared[0]}" ]]; then
  python3 benchmarks/targets.py "${compared[@]}" --output "$out/targets.md" || failed+=(targets)
fi
((${#failed[@]} == 0)) || { echo "failed or missed: ${failed[*]}" >&2; exit 1; }
