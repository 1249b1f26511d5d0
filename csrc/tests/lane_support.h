// A device whose lanes are threads, and transports on it: what a CUDA device and NCCL are to a LaneCommunicator.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/lane_transport.h"
#include "kernels/cpu_device.h"

namespace zb::test {

// Opens once.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_open_; });
  }
  bool is_open() {
    const std::lock_guard lock(mutex_);
    return is_open_;
  }

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
  ThreadLane() : thread_([this] { run(); }) {}
  ~ThreadLane() {
    put([this] { must_end_ = true; });
    thread_.join();
  }
  void put(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

 private:
  void run() {
    while (!must_end_) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

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
  MarkPtr mark(Lane lane) override {
    auto mark = std::make_shared<GateMark>();
    put(lane, [gate = mark->gate] { gate->open(); });
    mark->counted = counted_;
    return mark;
  }
  void wait(Lane lane, const MarkPtr& mark) override {
    if (mark) put(lane, [gate = gate_of(mark)] { gate->pass(); });
  }
  bool has_passed(const MarkPtr& mark) override { return !mark || gate_of(mark)->is_open(); }
  long living_marks() const noexcept { return counted_.use_count() - 1; }
  void synchronize(const MarkPtr& mark) override {
    if (mark) gate_of(mark)->pass();
  }
  void synchronize() override {
    for (std::size_t lane = 0; lane < kLaneNum; ++lane) synchronize(mark(static_cast<Lane>(lane)));
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string_view what) override {
    return host_->allocate(bytes, what);
  }
  std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes) override { return host_->allocate_pinned(bytes); }
  void cast(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
            std::size_t numel) override {
    host_->cast(lane, destination, destination_dtype, source, source_dtype, numel);
  }
  void add(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
           std::size_t numel) override {
    host_->add(lane, destination, destination_dtype, source, source_dtype, numel);
  }
  void sum(Lane lane, void* destination, std::span<const void* const> sources, DType dtype,
           std::size_t numel) override {
    put(lane, [=, this, held = std::vector<const void*>(sources.begin(), sources.end())] {
      host_->sum(lane, destination, held, dtype, numel);
    });
  }
  void pack(Lane lane, std::span<const PackItem> items) override { host_->pack(lane, items); }
  void zero(Lane lane, void* destination, std::size_t bytes) override { host_->zero(lane, destination, bytes); }
  void copy(Lane lane, void* destination, const void* source, std::size_t bytes) override {
    put(lane, [=] { std::memmove(destination, source, bytes); });
  }
  void copy_to_pinned(Lane lane, std::byte* host, const void* source, std::size_t bytes) override {
    copy(lane, host, source, bytes);
  }
  void copy_from_pinned(Lane lane, void* destination, const std::byte* host, std::size_t bytes) override {
    copy(lane, destination, host, bytes);
  }
  void sums_of_squares(Lane lane, DType dtype, std::span<const SquareSum> sums) override {
    host_->sums_of_squares(lane, dtype, sums);
  }
  void combine_norm(Lane lane, const NormArguments& arguments) override { host_->combine_norm(lane, arguments); }
  void download(void* host, const void* source, std::size_t bytes) override { host_->download(host, source, bytes); }
  void upload(void* destination, const void* host, std::size_t bytes) override {
    host_->upload(destination, host, bytes);
  }

 private:
  static std::shared_ptr<Gate> gate_of(const MarkPtr& mark) { return static_cast<const GateMark&>(*mark).gate; }

  std::shared_ptr<Device> host_ = make_cpu_device();
  std::shared_ptr<int> counted_ = std::make_shared<int>();
  std::array<ThreadLane, kLaneNum> lanes_;
};

// Collectives of a communicator of host memory, run by the lane's thread.
class HostTransport final : public LaneTransport {
 public:
  HostTransport(std::shared_ptr<ThreadDevice> device, Lane lane, std::unique_ptr<Communicator> data)
      : device_(std::move(device)), lane_(lane), data_(std::move(data)) {}
  ~HostTransport() override { device_->synchronize(device_->mark(lane_)); }

  // Collective here: peers read the memory where it lies.
  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole, std::string_view) override {
    auto buffer = data_->allocate(bytes, BufferRole::kShared, nullptr, Category::kStaging);
    buffers_[buffer->data()] = buffer;
    return {buffer, buffer->data()};
  }
  void put_in(std::span<const LaneCall> calls) override {
    device_->put(lane_, [this, calls = std::vector<LaneCall>(calls.begin(), calls.end())] {
      for (const LaneCall& call : calls) run(call);
    });
  }
  bool is_finished() const noexcept { return is_finished_; }
  void finish() noexcept override { is_finished_ = true; }

 private:
  Region region(const std::byte* data) const {
    const auto& [begin, buffer] = *std::prev(buffers_.upper_bound(data));
    return {buffer, static_cast<std::size_t>(data - begin)};
  }
  void run(const LaneCall& call) {
    const Region source = region(call.source);
    const Region destination = region(call.destination);
    WorkPtr work;
    switch (call.kind) {
      case Collective::kAllGather:
        work = data_->start_all_gather({source, destination, call.num, "lane"});
        break;
      case Collective::kReduceScatter:
        work = data_->start_reduce_scatter({source, destination, call.num, call.dtype, "lane"});
        break;
      case Collective::kAllReduce:
        work = data_->start_all_reduce({source, call.num, call.dtype, "lane"});
        break;
      default:
        work = data_->start_broadcast({source, call.num, call.root, "lane"});
    }
    work->wait();
    work->wait_source_free();
  }

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

  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole, std::string_view what) override {
    return device_->allocate(bytes, what);
  }
  void put_in(std::span<const LaneCall>) override {
    device_->put(lane_, [gate = aborted_] { gate->pass(); });
    is_used_ = true;
  }
  std::optional<std::string> failure() override { return is_used_ ? failure_ : std::nullopt; }
  bool abort() noexcept override {
    if (--aborts_needed_ > 0) return false;
    aborted_->open();
    return true;
  }

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
