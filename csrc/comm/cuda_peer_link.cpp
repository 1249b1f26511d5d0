#include "comm/cuda_peer_link.h"

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <array>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/cuda_driver.h"
#include "comm/cuda_shared_memory.h"
#include "comm/cuda_watchdog.h"
#include "comm/or_abort.h"
#include "comm/shm_memory.h"
#include "common/cuda_check.h"
#include "common/error.h"
#include "common/page.h"
#include "common/round_up.h"

namespace zb {
namespace {

CUdeviceptr device_address(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

// Unmapping does not wait for the device, as freeing does.
void wait_for_all_work(CudaDevice& device) noexcept {
  try {
    device.bind_thread();
    static_cast<void>(cudaDeviceSynchronize());
  } catch (const std::exception&) {
    // The device has failed, and runs nothing any more.
  }
}

class CudaPeerMemory final : public PeerMemory {
 public:
  CudaPeerMemory(std::shared_ptr<CudaDevice> device, std::vector<MappedMemory> parts, std::size_t bytes,
                 std::shared_ptr<MemoryOverhead> overhead)
      : device_(std::move(device)), parts_(std::move(parts)), bytes_(bytes), overhead_(std::move(overhead)) {
    for (const MappedMemory& part : parts_) views_.push_back(part.data());
    overhead_->take(bytes_);
  }
  ~CudaPeerMemory() override {
    wait_for_all_work(*device_);
    overhead_->give_back(bytes_);
  }

  const MemoryHandle& handle(int rank) const noexcept { return parts_[static_cast<std::size_t>(rank)].handle(); }

 private:
  std::shared_ptr<CudaDevice> device_;
  std::vector<MappedMemory> parts_;  // by rank
  std::size_t bytes_;                // of each
  std::shared_ptr<MemoryOverhead> overhead_;
};

// Pages by handles of their own, since the driver maps whole handles only.
class CudaPeerPages final : public PeerPages {
 public:
  CudaPeerPages(std::shared_ptr<CudaDevice> device, int rank, std::size_t page_bytes, std::string_view what)
      : device_(std::move(device)), rank_(rank), page_bytes_(page_bytes), what_(what) {}

  std::size_t page_bytes() const noexcept override { return page_bytes_; }
  std::size_t page_num() const noexcept override { return pages_.size(); }
  void grow(std::size_t page_num) override {
    while (pages_.size() < page_num) pages_.push_back(MemoryHandle::create(*device_, page_bytes_, what_));
  }

  std::shared_ptr<std::byte> map(std::size_t first, std::size_t before_num, const std::shared_ptr<PeerMemory>& own,
                                 std::size_t after_num) override {
    std::vector<const MemoryHandle*> handles;
    for (std::size_t page = first; page < first + before_num; ++page) handles.push_back(&pages_[page]);
    if (own != nullptr) handles.push_back(&static_cast<const CudaPeerMemory&>(*own).handle(rank_));
    first += before_num;
    for (std::size_t page = first; page < first + after_num; ++page) handles.push_back(&pages_[page]);
    auto range = std::make_shared<AddressRange>(*device_, handles);
    return {range->data(), [device = device_, range](std::byte*) {
              wait_for_all_work(*device);
              range->reset();
            }};
  }

 private:
  std::shared_ptr<CudaDevice> device_;
  int rank_;
  std::size_t page_bytes_;
  std::string what_;
  std::vector<MemoryHandle> pages_;
};

enum class Outcome : std::uint8_t { kDone, kOutOfMemory, kFailed };

// What ranks tell each other about their part of an allocation. Plain bytes.
struct Report {
  std::uint64_t bytes = 0;
  std::uint64_t number = 0;
  Outcome outcome = Outcome::kDone;
  std::array<char, 447> error{};
};

// The same on all ranks, so that all of them raise.
void check_reports(const std::vector<Report>& reports) {
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const Report& report = reports[rank];
    const std::string text = "rank " + std::to_string(rank) + ": " + report.error.data();
    if (report.outcome == Outcome::kOutOfMemory) throw OutOfMemoryError(text);
    if (report.outcome == Outcome::kFailed) throw CudaError(text, cudaErrorUnknown);
    if (report.bytes == reports[0].bytes && report.number == reports[0].number) continue;
    throw CommunicationError("ranks allocate different shared memory: rank 0 " + std::to_string(reports[0].bytes) +
                                 " bytes as allocation number " + std::to_string(reports[0].number) + ", rank " +
                                 std::to_string(rank) + " " + std::to_string(report.bytes) +
                                 " bytes as allocation number " + std::to_string(report.number),
                             static_cast<int>(rank));
  }
}

void set_error(Report& report, Outcome outcome, std::string_view text) {
  report.outcome = outcome;
  text.copy(report.error.data(), report.error.size() - 1);
}

}  // namespace

// A rank's row of flags, pinned for this process.
class PinnedRow {
 public:
  PinnedRow(std::shared_ptr<CudaDevice> device, std::shared_ptr<shm::Mapping> mapping)
      : device_(std::move(device)), mapping_(std::move(mapping)) {
    device_->bind_thread();
    ZB_CUDA(cudaHostRegister(mapping_->data(), mapping_->bytes(), cudaHostRegisterMapped));
  }
  PinnedRow(const PinnedRow&) = delete;
  PinnedRow& operator=(const PinnedRow&) = delete;
  ~PinnedRow() { device_->unregister_host(mapping_->data()); }

  std::byte* data() const noexcept { return mapping_->data(); }
  std::byte* data_on_device() const {
    void* address = nullptr;
    ZB_CUDA(cudaHostGetDevicePointer(&address, mapping_->data(), 0));
    return static_cast<std::byte*>(address);
  }

 private:
  std::shared_ptr<CudaDevice> device_;
  std::shared_ptr<shm::Mapping> mapping_;
};

struct CudaPeerLink::Flags {
  std::vector<std::unique_ptr<PinnedRow>> rows;  // by rank
  std::optional<PeerFlags> on_host;
  std::optional<PeerFlags> on_device;  // the same, where the device sees them
};

CudaPeerLink::CudaPeerLink(std::shared_ptr<CudaDevice> device, Lane lane, Communicator& control,
                           std::chrono::milliseconds timeout, std::shared_ptr<MemoryOverhead> overhead)
    : device_(std::move(device)),
      control_(control),
      stream_(device_->cuda_stream(lane)),
      rank_(control.rank()),
      world_size_(control.world_size()),
      granularity_bytes_(mapping_granularity_bytes(*device_)),
      overhead_(std::move(overhead)),
      mesh_(control, timeout),
      flags_(std::make_unique<Flags>()) {
  const std::size_t row_bytes = round_up_to_page(PeerFlags::row_bytes(world_size_));
  const shm::FileDescriptor own = or_abort(control_, [&] { return shm::create_memfd(row_bytes); });
  const std::vector<shm::FileDescriptor> all = mesh_.exchange(own, next_number_++);
  std::vector<std::byte*> on_host;
  std::vector<std::byte*> on_device;
  for (int rank = 0; rank < world_size_; ++rank) {
    const shm::FileDescriptor& memfd = rank == rank_ ? own : all[static_cast<std::size_t>(rank)];
    flags_->rows.push_back(std::make_unique<PinnedRow>(device_, shm::Mapping::of_file(memfd, row_bytes)));
    on_host.push_back(flags_->rows.back()->data());
    on_device.push_back(flags_->rows.back()->data_on_device());
  }
  flags_->on_host.emplace(rank_, std::move(on_host));
  flags_->on_device.emplace(rank_, std::move(on_device));
}

CudaPeerLink::~CudaPeerLink() = default;

// Does a rank's part of an allocation. Where that fails on one rank, all of them raise what happened there.
template <typename Part>
void CudaPeerLink::agree(std::size_t bytes, std::uint64_t number, std::string_view what, const Part& part) {
  Report report{.bytes = bytes, .number = number};
  try {
    part();
  } catch (const OutOfMemoryError& error) {
    set_error(report, Outcome::kOutOfMemory, error.what());
  } catch (const std::exception& error) {
    set_error(report, Outcome::kFailed, error.what());
  }
  std::vector<Report> reports(static_cast<std::size_t>(world_size_));
  control_.exchange(std::as_bytes(std::span(&report, 1)), std::as_writable_bytes(std::span(reports)), what);
  check_reports(reports);
}

std::shared_ptr<PeerMemory> CudaPeerLink::allocate(std::size_t bytes, std::string_view what) {
  const std::size_t mapped_bytes = round_up(bytes, granularity_bytes_);
  const std::uint64_t number = next_number_++;
  MappedMemory mine;
  shm::FileDescriptor descriptor;
  agree(mapped_bytes, number, what, [&] {
    mine = MappedMemory::create(*device_, mapped_bytes, what);
    descriptor = mine.handle().export_descriptor();
  });
  const std::vector<shm::FileDescriptor> theirs = mesh_.exchange(descriptor, number);
  std::vector<MappedMemory> parts(static_cast<std::size_t>(world_size_));
  agree(mapped_bytes, number, what, [&] {
    for (int rank = 0; rank < world_size_; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      parts[index] = rank == rank_ ? std::move(mine) : MappedMemory::import(*device_, mapped_bytes, theirs[index]);
    }
  });
  return std::make_shared<CudaPeerMemory>(device_, std::move(parts), mapped_bytes, overhead_);
}

std::unique_ptr<PeerPages> CudaPeerLink::make_pages(std::string_view what) {
  return std::make_unique<CudaPeerPages>(device_, rank_, granularity_bytes_, what);
}

template <typename Describe>
void CudaPeerLink::put_in_for_peers(const Describe& describe) {
  std::vector<CUstreamBatchMemOpParams> operations;  // fewer than 256
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer != rank_) describe(peer, operations.emplace_back());
  }
  device_->bind_thread();
  const auto num = static_cast<unsigned>(operations.size());
  check_driver(cuda_driver().stream_batch_mem_op(stream_, num, operations.data(), 0), "cuStreamBatchMemOp");
}

// A write waits until what stood before it in the stream can be seen by all.
void CudaPeerLink::announce() {
  ++meeting_;
  put_in_for_peers([&](int peer, CUstreamBatchMemOpParams& operation) {
    operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    operation.writeValue.address = device_address(&flags_->on_device->word(peer, rank_));
    operation.writeValue.value64 = meeting_;
    operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  });
}

void CudaPeerLink::await() {
  put_in_for_peers([&](int peer, CUstreamBatchMemOpParams& operation) {
    operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    operation.waitValue.address = device_address(&flags_->on_device->word(rank_, peer));
    operation.waitValue.value64 = meeting_;
    operation.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  });
}

void CudaPeerLink::enter_thread() { enter_watchdog_thread(*device_); }

void CudaPeerLink::release() noexcept { flags_->on_host->release(); }

bool CudaPeerLink::is_idle() noexcept {
  const cudaError_t code = cudaStreamQuery(stream_);
  if (code == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
  return code != cudaErrorNotReady;
}

}  // namespace zb
