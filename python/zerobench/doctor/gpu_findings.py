"""Examine the GPUs, their links and the software that uses them: one function a subject, which yields what it finds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from zerobench.doctor.finding import Facts, Finding


def gpus_are_usable(facts: Facts) -> Iterator[Finding]:
    """Find a driver without visible GPUs, and a machine without any."""
    reason = facts["machine"].get("no_gpus")
    if reason is None:
        return
    has_driver = "no NVIDIA driver" not in reason
    yield Finding(
        level="error" if has_driver else "note",
        subject="GPUs",
        what=f"No GPU is usable: {reason}.",
        cost="Training and comparisons run on CPU ranks.",
        cure="Install a CUDA build of torch (`pip install torch`), and check `nvidia-smi` and CUDA_VISIBLE_DEVICES."
        if has_driver
        else "None, unless this machine has an NVIDIA GPU: then install its driver.",
    )


def cuda_module_loads(facts: Facts) -> Iterator[Finding]:
    """Find a CUDA module that is missing or does not load where there are GPUs."""
    machine = facts["machine"]
    module = machine.get("cuda_module", {})
    if not machine.get("gpus") or module.get("loads"):
        return
    why = module.get("problem") if module.get("built") else module.get("reason")
    yield Finding(
        level="error",
        subject="zerobench._cuda",
        what=f"The CUDA module {'does not load' if module.get('built') else 'was not built'}: {why}.",
        cost="zerobench's own strategies cannot use the GPUs.",
        cure="Run `pip install .` again in this environment, next to the torch that you train with.",
    )


def versions_agree(facts: Facts) -> Iterator[Finding]:
    """Find a torch other than the one the core was built for, and a CUDA that the driver is too old for."""
    machine = facts["machine"]
    build = machine["details"].get("build", {})
    installed, built = facts["versions"].get("torch"), build.get("torch_minor")
    if installed and built and minor(installed) != built:
        yield Finding(
            level="error",
            subject="torch",
            what=f"zerobench was built for torch {built}, and torch {installed} is installed.",
            cost="The core does not load.",
            cure="Run `pip install --force-reinstall --no-deps .` in this environment.",
        )
    wanted, served = build.get("torch_cuda"), machine.get("cuda")
    if wanted and served and major(wanted) > major(served):
        yield Finding(
            level="error",
            subject="driver",
            what=f"torch uses CUDA {wanted}, and driver {machine.get('driver')} serves CUDA {served}.",
            cost="torch cannot use the GPUs.",
            cure="Update the driver, or install a torch build for an older CUDA.",
        )


def links_are_whole(facts: Facts) -> Iterator[Finding]:
    """Find several GPUs without NVLink, GPUs with fewer links than others, and narrow or slow PCIe slots."""
    gpus = facts["machine"].get("gpus", [])
    links = {gpu["index"]: gpu.get("nvlinks_active") for gpu in gpus}
    known = [number for number in links.values() if number is not None]
    if len(gpus) > 1 and not any(known):
        yield Finding(
            level="note",
            subject="NVLink",
            what=f"The {len(gpus)} GPUs have no NVLink.",
            cost="Collectives go over PCIe, at a tenth or less of NVLink's bandwidth: sharded stages gain memory and "
            "lose time.",
            cure="Prefer stage 1 or DDP where the model fits, and larger batches or accumulation.",
        )
    for index, number in links.items():
        if number is not None and number < max(known):
            yield Finding(
                level="warning",
                subject=f"GPU {index}",
                what=f"{number} NVLinks are active, and {max(known)} on another GPU.",
                cost=f"Collectives run at about {100 * number / max(known):.0f} % of the bandwidth.",
                cure="Look at `nvidia-smi nvlink --status`; reseat or replace the GPU or its bridge.",
            )
    for gpu in gpus:
        yield from pcie_is_whole(gpu)


def pcie_is_whole(gpu: Facts) -> Iterator[Finding]:
    """Find a slot of fewer lanes or of an older generation than the GPU could use."""
    width, width_max = gpu.get("pcie_width"), gpu.get("pcie_width_max")
    if width and width_max and width < width_max:
        yield Finding(
            level="warning",
            subject=f"GPU {gpu['index']}",
            what=f"Its PCIe link has {width} of {width_max} lanes.",
            cost=f"Transfers to the host, so offload, run at {100 * width / width_max:.0f} % of the bandwidth.",
            cure="Move the GPU to a slot with all lanes, or reseat it.",
        )
    slot, own = gpu.get("pcie_generation_max"), gpu.get("pcie_generation_of_gpu")
    if slot and own and slot < own:
        yield Finding(
            level="note",
            subject=f"GPU {gpu['index']}",
            what=f"Its slot has PCIe {slot}, and the GPU could use PCIe {own}.",
            cost=f"Transfers to the host, so offload, run at about {100 / 2 ** (own - slot):.0f} % of the bandwidth.",
            cure="A mainboard of that generation; or check the BIOS, which may hold the slot down.",
        )


def gpus_run_free(facts: Facts) -> Iterator[Finding]:
    """Find lowered power limits, GPUs that are split, and a driver that unloads between runs."""
    for gpu in facts["machine"].get("gpus", []):
        subject = f"GPU {gpu['index']}"
        limit, default = gpu.get("power_limit_w"), gpu.get("power_limit_default_w")
        if limit and default and limit < default:
            yield Finding(
                level="warning",
                subject=subject,
                what=f"Its power is limited to {limit:.0f} W; the default is {default:.0f} W.",
                cost="Clocks fall under load, so compute-bound steps take longer.",
                cure=f"`sudo nvidia-smi -i {gpu['index']} -pl {default:.0f}`",
            )
        if gpu.get("mig"):
            yield Finding(
                level="warning",
                subject=subject,
                what="It is split by MIG.",
                cost="Instances cannot reach each other's memory: several ranks communicate through the host.",
                cure=f"`sudo nvidia-smi -i {gpu['index']} -mig 0`, where the whole GPU is yours.",
            )
        if gpu.get("persistence_mode") is False:
            yield Finding(
                level="note",
                subject=subject,
                what="Persistence mode is off.",
                cost="The first process on an idle GPU waits a second or more for the driver.",
                cure="`sudo nvidia-smi -pm 1`, or the nvidia-persistenced service.",
            )


def minor(version: str) -> str:
    """Return "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def major(version: str) -> int:
    """Return 13 of "13.0"."""
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
