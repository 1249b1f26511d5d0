#!/usr/bin/env bash
# Measures steps, collectives and Adam on this machine's GPUs: benchmarks/gpu.sh [DIR]
# Tables, results and logs go to DIR (default: results/gpu_bench). Installs nothing. Run it on a machine that does nothing
# else; the models and strategies of the tables in benchmarks/gpu_*.md.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-results/gpu_bench}"
mkdir -p "$out"
gpus="$(python3 -c 'import torch; print(torch.cuda.device_count())')"
strategies=compute_only,zero0,zero1,zero2,zero3,ddp,ddp_compress,fsdp1,fsdp2,fsdp2_keep,deepspeed1,deepspeed2,deepspeed3
strategies+=,mfsdp1,mfsdp2,mfsdp3

torchrun --nproc_per_node "$gpus" benchmarks/gpu_step.py \
  gpt2:32:128:20:floor,ddp,fsdp2,zero1,zero2,zero3,floor,zero1 \
  llama-1.3b:4:2048:8:floor,ddp,fsdp2,zero1,zero2,zero3,floor-block,fsdp2-block,zero1-block,zero3-block \
  2>"$out/step.log" | tee "$out/step.jsonl"
for setting in "hf:gpt2 32 128" "hf:gpt2 16 1024" "llama-1.3b 4 2048"; do
  read -r model batch_size seq_length <<<"$setting"
  python3 -m zerobench compare --model "$model" --batch-size "$batch_size" --seq-length "$seq_length" --precision bf16 \
    --strategies "$strategies" --output-dir "$out/${model//:/_}_${batch_size}x$seq_length"
done
python3 benchmarks/gpu_one.py 2>"$out/one.log" | tee "$out/one.jsonl"
if ((gpus >= 2)); then
  for communicator in nccl peer; do
    python3 -m zerobench bench comm --device cuda --communicator "$communicator" --output "$out/comm_$communicator.md"
  done
fi
python3 -m zerobench bench adam --device cuda --output "$out/adam.md"
