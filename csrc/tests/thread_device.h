// A device whose lanes are threads, and transports on it: what a CUDA device and NCCL are to a LaneCommunicator.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "comm/lane_transport.h"
#include "kernels/cpu_device.h"

namespace zb::test {

// Opens once.
class Gate {
 public:
  void open();
  void pass();
  bool is_open();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

struct GateMark final : Mark {
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
  std::shared_ptr<void> counted;  // one share a mark
};

class ThreadLane {
 public:
  ThreadLane();
  ~ThreadLane();
  void put(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool must_end_ = false;  // of the thread alone
  std::thread thread_;
};

// Lanes, marks, memory and copies; arithmetic runs at once, as nothing here needs it in a lane.
class ThreadDevice final : public Device {
 public:
  void put(Lane lane, std::function<void()> task) { lanes_[static_cast<std::size_t>(lane)].put(std::move(task)); }

  bool is_async() const noexcept override { return true; }
  void* stream(Lane) const noexcept override { return nullptr; }
  MarkPtr mark(Lane lane) override;
  void wait(Lane lane, const MarkPtr& mark) override;
  bool has_passed(const MarkPtr& mark) override { return !mark || gate_of(mark)->is_open(); }
  long living_marks() const noexcept { return counted_.use_count() - 1; }
  void synchronize(const MarkPtr& mark) override;
  void synchronize() override;
  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string_view what) override;
  std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes) override { return host_->allocate_pinned(bytes); }
  void cast(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
            std::size_t numel) override;
  void add(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
           std::size_t numel) override;
  void sum(Lane lane, void* destination, std::span<const void* const> sources, DType dtype, std::size_t numel) override;
  void pack(Lane lane, std::span<const PackItem> items) override { host_->pack(lane, items); }
  void zero(Lane lane, void* destination, std::size_t bytes) override { host_->zero(lane, destination, bytes); }
  void copy(Lane lane, void* destination, const void* source, std::size_t bytes) override;
  void copy_to_pinned(Lane lane, std::byte* host, const void* source, std::size_t bytes) override;
  void copy_from_pinned(Lane lane, void* destination, const std::byte* host, std::size_t bytes) override;
  void sums_of_squares(Lane lane, DType dtype, std::span<const SquareSum> sums) override;
  void combine_norm(Lane lane, const NormArguments& arguments) override { host_->combine_norm(lane, arguments); }
  void download(void* host, const void* source, std::size_t bytes) override { host_->download(host, source, bytes); }
  void upload(void* destination, const void* host, std::size_t bytes) override;

 private:
  static std::shared_ptr<Gate> gate_of(const MarkPtr& mark) { return static_cast<const GateMark&>(*mark).gate; }

  std::shared_ptr<Device> host_ = make_cpu_device();
  std::shared_ptr<int> counted_ = std::make_shared<int>();
  std::array<ThreadLane, kLaneNum> lanes_;
};

// Collectives of a communicator of host memory, run by the lane's thread.
class HostTransport final : public LaneTransport {
 public:
  HostTransport(std::shared_ptr<ThreadDevice> device, Lane lane, std::unique_ptr<Communicator> data);
  ~HostTransport() override;

  // Collective here: peers read the memory where it lies.
  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole, std::string_view) override;
  void put_in(std::span<const LaneCall> calls) override;
  bool is_finished() const noexcept { return is_finished_; }
  void finish() noexcept override { is_finished_ = true; }

 private:
  Region region(const std::byte* data) const;
  void run(const LaneCall& call);

  std::shared_ptr<ThreadDevice> device_;
  Lane lane_;
  std::unique_ptr<Communicator> data_;
  std::map<const std::byte*, std::shared_ptr<RegisteredBuffer>> buffers_;
  std::atomic<bool> is_finished_ = false;
};

// A lane that waits for a peer for ever, until it is aborted, once or as often as it needs.
class StuckTransport final : public LaneTransport {
 public:
  StuckTransport(std::shared_ptr<ThreadDevice> device, Lane lane) : device_(std::move(device)), lane_(lane) {}

  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole, std::string_view what) override;
  void put_in(std::span<const LaneCall>) override;
  std::optional<std::string> failure() override { return is_used_ ? failure_ : std::nullopt; }
  bool abort() noexcept override;

  void need_aborts(int num) { aborts_needed_ = num; }                      // before it is watched
  void fail_when_used(const std::string& failure) { failure_ = failure; }  // before it is watched

 private:
  std::shared_ptr<ThreadDevice> device_;
  Lane lane_;
  std::shared_ptr<Gate> aborted_ = std::make_shared<Gate>();
  std::atomic<bool> is_used_ = false;
  std::optional<std::string> failure_;
  int aborts_needed_ = 1;
};

}  // namespace zb::test
