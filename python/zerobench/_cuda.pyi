"""The CUDA side of zerobench; importing it needs an NVIDIA driver."""

from collections.abc import Callable, Sequence

class DeviceInfo:
    @property
    def name(self) -> str: ...
    @property
    def pci_bus_id(self) -> str: ...
    @property
    def compute_major(self) -> int: ...
    @property
    def compute_minor(self) -> int: ...
    @property
    def multiprocessor_num(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def l2_cache_bytes(self) -> int: ...
    @property
    def memory_bus_width_bits(self) -> int: ...

def driver_version() -> int: ...
def runtime_version() -> int: ...
def nccl_version() -> int: ...
def device_count() -> int: ...
def device_info(device: int) -> DeviceInfo: ...
def fill(destination: int, *, value: float, numel: int, stream: int) -> None: ...

class Mark:
    """A point in a lane."""

class Memory:
    """Device or pinned memory, given back with the last reference."""

    @property
    def address(self) -> int: ...

class PackItem:
    """One tensor's way into a flat buffer; zeros without a source."""

    def __init__(
        self,
        *,
        destination: int,
        destination_dtype: str,
        source: int | None,
        source_dtype: str,
        numel: int,
        accumulate: bool,
    ) -> None: ...

class AdamRun:
    """One run of a shard and its hyperparameters."""

    def __init__(
        self,
        *,
        master: int | None,
        exp_avg: int,
        exp_avg_sq: int,
        gradient: int,
        gradient_dtype: str,
        low_precision: int | None,
        low_precision_dtype: str,
        numel: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        remainder: int | None = None,
    ) -> None: ...

class CudaDevice:
    """One device with its lanes, what computes on it, and its kernels. Lanes are compute, gather, reduce, to_host and
    from_host; addresses
    are those of device memory."""

    @property
    def ordinal(self) -> int: ...
    def parts(self) -> object: ...
    def stream(self, lane: str) -> int: ...
    def set_compute_stream(self, stream: int) -> None: ...
    def mark(self, lane: str) -> Mark: ...
    def wait(self, lane: str, mark: Mark) -> None: ...
    def has_passed(self, mark: Mark) -> bool: ...
    def synchronize(self, mark: Mark = ...) -> None: ...
    def allocate(self, size_bytes: int, *, what: str) -> Memory: ...
    def allocate_pinned(self, size_bytes: int) -> Memory: ...
    def download(self, source: int, *, size_bytes: int) -> bytes: ...
    def upload(self, destination: int, data: bytes) -> None: ...
    def cast(
        self,
        lane: str,
        *,
        destination: int,
        destination_dtype: str,
        source: int,
        source_dtype: str,
        numel: int,
    ) -> None: ...
    def add(
        self,
        lane: str,
        *,
        destination: int,
        destination_dtype: str,
        source: int,
        source_dtype: str,
        numel: int,
    ) -> None: ...
    def pack(self, lane: str, items: Sequence[PackItem]) -> None: ...
    def zero(self, lane: str, *, destination: int, size_bytes: int) -> None: ...
    def copy(self, lane: str, *, destination: int, source: int, size_bytes: int) -> None: ...
    def copy_to_pinned(self, lane: str, *, host: int, source: int, size_bytes: int) -> None: ...
    def sums_of_squares(
        self, lane: str, *, dtype: str, sums: Sequence[tuple[int, Sequence[tuple[int, int]]]]
    ) -> None: ...
    def combine_norm(
        self,
        lane: str,
        *,
        partial_sums: int,
        rank_num: int,
        flat_num: int,
        divisor: float,
        clip: float,
        flat_sums: int,
        scalars: int,
    ) -> None: ...
    def read_masters(self, lane: str, run: AdamRun, *, destination: int) -> None: ...
    def write_masters(self, lane: str, run: AdamRun, *, source: int) -> None: ...
    def copy_magnitudes(
        self, lane: str, destination: int, source: int, *, signs: int | None, numel: int
    ) -> None: ...
    def adam(self, lane: str, runs: Sequence[AdamRun], *, scalars: int) -> None: ...
    def push_range(self, name: str) -> None: ...
    def pop_range(self) -> None: ...
    def start_range(self, name: str) -> int: ...
    def end_range(self, id: int) -> None: ...

def make_device(device: int, *, on_out_of_memory: Callable[[], None]) -> CudaDevice: ...

class DeviceLink:
    """A link that ranks on GPUs pretend to have."""

    def __init__(self, *, device: CudaDevice, bytes_per_s: float, latency_s: float) -> None: ...

def make_nccl_communicator(
    *,
    device: CudaDevice,
    lane: str,
    control: object,
    timeout_s: float,
    symmetric: bool = False,
    link: DeviceLink | None = None,
) -> object:
    """NCCL in a lane of the device, over the capsule of a host communicator that names the ranks. A capsule, too.
    Collective. ``symmetric`` puts buffers into NCCL's symmetric windows, whose allocation is collective. Operations
    take the time that ``link`` needs, if it is given."""

def peer_obstacle(*, device: CudaDevice, control: object, timeout_s: float) -> str:
    """Why make_peer_communicator cannot connect these ranks, as one sentence; empty where it can. Collective. The
    capsule keeps its communicator."""

def make_peer_communicator(*, device: CudaDevice, lane: str, control: object, timeout_s: float) -> object:
    """GPUs of one host by copy engines, in a lane of the device, over the capsule of a host communicator that names
    the ranks. A capsule, too. Collective."""
