"""The rules of advice, in the order in which they speak. docs/explain/choosing.md is generated from this table."""

from __future__ import annotations

from functools import partial

from zerobench.report.advice import bottleneck, fastest, memory, no_gain
from zerobench.report.advice.rule import Rule

RULES = (
    Rule(
        id="only-row",
        topic="fastest",
        when="One row alone is correct and comparable.",
        find=fastest.only_row,
        sentence="{best} is the only row that is correct and comparable: {time}.",
    ),
    Rule(
        id="too-few-samples",
        topic="fastest",
        when="A row has fewer than six measured steps or windows, so its noise is unknown.",
        find=fastest.too_few_samples,
        sentence="{best} took the least time of {count} correct rows, {time}, but {steps} too little about the "
        "noise to call it the fastest.",
        cure="Measure {enough} ({option}).",
    ),
    Rule(
        id="fastest",
        topic="fastest",
        when="One row takes less time per token than every other, by more than the noise.",
        find=fastest.clearly_fastest,
        sentence="{best} is the fastest of {count} correct rows: {time}.",
    ),
    Rule(
        id="too-noisy",
        topic="fastest",
        when="Rows tie with the fastest, and the error of their ratio is 10 % or more.",
        find=fastest.too_noisy_to_rank,
        sentence="Too noisy to rank: {names} may each be the fastest of {count} correct rows, {rates} with errors of "
        "up to {error}.",
        cure="Measure more {more}, on a quieter machine.",
    ),
    Rule(
        id="tie",
        topic="fastest",
        when="Rows tie with the fastest: the interval of their ratio contains 1.",
        find=fastest.tie_for_fastest,
        sentence="{names} tie as the fastest of {count} correct rows, {rates}: their differences are below the noise.",
    ),
    Rule(
        id="measured-apart",
        topic="fastest",
        when="Rows did not fit into memory with the others, so they were measured in passes, in too few to rank "
        "them.",
        find=fastest.measured_apart,
        sentence="{names} {were} measured in passes, too few to rank.",
        cure="Measure more of them (--repeats).",
    ),
    Rule(
        id="less-memory",
        topic="memory",
        when="A row within 10 % of the fastest has a peak at least 2 % lower.",
        find=memory.less_memory,
        sentence="Within 10 % of the fastest, {least} needs the least memory: {peak} peak, {saved} below {best}, "
        "{cost}.",
    ),
    Rule(
        id="no-less-memory",
        topic="memory",
        when="No row within 10 % of the fastest has a notably lower peak.",
        find=memory.no_less_memory,
        sentence="No row within 10 % of {best} needs notably less memory than its {peak} peak.",
    ),
    Rule(
        id="only-offload-fits",
        topic="memory",
        when="A row fits with offload, and the same row without it runs out of memory.",
        find=memory.only_offload_fits,
        sentence="{least} fits, with a peak of {peak}, where {strategy} without offload does not.",
    ),
    Rule(
        id="offload-saves",
        topic="memory",
        when="The row with offload that peaks lowest needs at least 2 % less than the same row without.",
        find=memory.offload_saves,
        sentence="{least} peaks at {peak}, {saved} below {kept}, for {times} times the latter's step time.",
    ),
    Rule(
        id="one-rank",
        topic="no gain",
        when="Every row ran on one rank, and some of them shard.",
        find=no_gain.one_rank,
        sentence="All rows ran on one rank: there is nothing to shard, so no ZeRO stage can save memory here.",
        cure="Measure on more ranks (--world-size), or offload.",
    ),
    Rule(
        id="little-to-shard",
        topic="no gain",
        when="The smallest row that shards peaks above 95 % of the smallest one that replicates, otherwise alike.",
        find=no_gain.little_saved,
        sentence="Sharding saves little memory here: {least} peaks at {least_peak}, {plain} at {plain_peak}. "
        "Most of it is not sharded, such as activations.",
        cure="Recompute activations (--checkpointing) or take a smaller --batch-size.",
    ),
    Rule(
        id="memory-to-spare",
        topic="no gain",
        when="Rows need less memory than the best row and are slower at the same work, and the best row leaves "
        "at least 40 % of the device unused.",
        find=no_gain.memory_to_spare,
        sentence="{names} {save} memory that is not needed: {best} is faster and leaves {free} of its device "
        "unused.",
        cure="Use the free memory for a larger --batch-size or model.",
    ),
    Rule(
        id="slow-link",
        topic="no gain",
        when="The fastest row of a stage waits for other ranks in at least 25 % of its step, and takes at least 1.1 "
        "times as long as a row that shards less.",
        find=no_gain.link_too_slow,
        sentence="Sharding further does not pay on this link: {row} waits for other ranks in {share} of its step and "
        "takes {times} times the step of {other}.",
        cure="Shard less where it fits, or exchange less often (--grad-accum).",
    ),
    Rule(
        id="ranks-gain-nothing",
        topic="no gain",
        when="One rank processes more tokens a second than all ranks together, by more than the noise.",
        find=no_gain.ranks_gain_nothing,
        sentence="More ranks add no speed here: {alone} on one rank processes at least as many tokens/s as "
        "{together} on {ranks}.",
        cure="Give each rank more work (--batch-size), or its own cores or GPU.",
    ),
    Rule(
        id="offload-saves-nothing",
        topic="no gain",
        when="The row with offload that peaks lowest needs about as much device memory as the same row without.",
        find=memory.offload_saves_nothing,
        sentence="{least} peaks at {peak} and takes {times} times the step time of {kept}, which peaks at {kept_peak}: "
        "offload saves no notable amount of device memory here.",
    ),
    Rule(
        id="disk-untouched",
        topic="no gain",
        when="A row with NVMe offload read and wrote no byte of its files.",
        find=no_gain.disk_untouched,
        sentence="{names} never touched the disk, since host memory held all state: their step times do not "
        "measure NVMe.",
        cure="Lower --host-memory-gib to measure the disk, or use --offload cpu_optimizer.",
    ),
    Rule(
        id="bound-by-compute",
        topic="bottleneck",
        when="No wait takes 25 % of the step, and the power cap does not set the clocks.",
        find=partial(bottleneck.bound_by, "compute"),
        sentence="Compute is the bottleneck of {names}: {share} of the step.",
        cure="Compile (--compile block), a lower --precision or a faster device help; a faster link or disk does not.",
    ),
    Rule(
        id="bound-by-network",
        topic="bottleneck",
        when="Waiting for other ranks is the longest wait and takes at least 25 % of the step.",
        find=partial(bottleneck.bound_by, "network"),
        sentence="The network is the bottleneck of {names}: {share} of the step is waiting for other ranks.",
        cure="Exchange less often (--grad-accum, a larger --batch-size), take a lower stage, or use a faster link.",
    ),
    Rule(
        id="bound-by-pcie",
        topic="bottleneck",
        when="Waiting for offloaded state is the longest wait, and its transfers fill at least half of the step at the "
        "link's own rate.",
        find=partial(bottleneck.bound_by, "PCIe"),
        sentence="PCIe is the bottleneck of {names}: {share} of the step is waiting for offloaded state.",
        cure="Offload a smaller share (--offload-ratio), accumulate (--grad-accum), or check the link "
        "(`zerobench doctor`).",
    ),
    Rule(
        id="bound-by-host-memory",
        topic="bottleneck",
        when="Waiting for offloaded state is the longest wait, and neither link nor disk is full: CPUs update "
        "the state.",
        find=partial(bottleneck.bound_by, "host memory"),
        sentence="Host memory is the bottleneck of {names}: {share} of the step is waiting for updates on the CPU.",
        cure="Update during backward (--optimizer-in-backward on), offload a smaller share (--offload-ratio), or give "
        "each rank more cores.",
    ),
    Rule(
        id="bound-by-disk",
        topic="bottleneck",
        when="Waiting for files is the longest wait and takes at least 25 % of the step.",
        find=partial(bottleneck.bound_by, "disk"),
        sentence="The disk is the bottleneck of {names}: {share} of the step is waiting for files.",
        cure="Stripe over more disks (--nvme-path), keep more in host memory (--host-memory-gib), accumulate "
        "(--grad-accum), or tune (`zerobench tune io`).",
    ),
    Rule(
        id="bound-by-host",
        topic="bottleneck",
        when="The device waits for work from the host in at least 25 % of the step.",
        find=partial(bottleneck.bound_by, "host overhead"),
        sentence="Host overhead is the bottleneck of {names}: the device waits for work in {share} of the step.",
        cure="Give each launch more work (a larger --batch-size, --compile whole or block), or use faster cores.",
    ),
    Rule(
        id="bound-by-power",
        topic="bottleneck",
        when="No wait takes 25 % of the step, and the row's GPUs ran at their power cap in at least half of the "
        "samples.",
        find=bottleneck.bound_by_power,
        sentence="Power is the bottleneck of {names}: the GPUs ran at their cap in {share} of the samples.",
        cure="Raise the power limit, or move and compute less: compile, a lower --precision.",
    ),
    Rule(
        id="power-cap",
        topic="bottleneck",
        when="Every row within 10 % of the fastest ran at the GPUs' power cap in at least half of the samples.",
        find=bottleneck.power_sets_the_pace,
        sentence="{who} ran at the GPUs' power cap ({figures}): there, the energy of a step sets its time. "
        "Rows that move or compute less are faster, and communication costs time even where it overlaps "
        "with compute.",
    ),
    Rule(
        id="slow-gpu",
        topic="bottleneck",
        when="On its own, one GPU takes at least 2 % longer for forward and backward than another, beyond the noise.",
        find=bottleneck.slow_gpu,
        sentence="The GPU of rank {slowest} is the slowest of {count}: without communication, it takes {slower} "
        "longer for forward and backward than the GPU of rank {fastest}. Synchronised ranks run at the "
        "speed of the slowest.",
        cure="Check its clocks and cooling (`zerobench doctor`).",
    ),
    Rule(
        id="basis",
        topic="basis",
        when="Always.",
        find=fastest.basis,
        sentence="Based on {rows}, {runs}: {what}; {certainty}.",
    ),
)
"""Every rule of advice."""
