#include "thread_device.h"

#include <cstring>
#include <vector>

namespace zb::test {

void Gate::open() {
  const std::lock_guard lock(mutex_);
  is_open_ = true;
  changed_.notify_all();
}

void Gate::pass() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_open_; });
}

bool Gate::is_open() {
  const std::lock_guard lock(mutex_);
  return is_open_;
}

ThreadLane::ThreadLane() : thread_([this] { run(); }) {}

ThreadLane::~ThreadLane() {
  put([this] { must_end_ = true; });
  thread_.join();
}

void ThreadLane::put(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

void ThreadLane::run() {
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

MarkPtr ThreadDevice::mark(Lane lane) {
  auto mark = std::make_shared<GateMark>();
  put(lane, [gate = mark->gate] { gate->open(); });
  mark->counted = counted_;
  return mark;
}

void ThreadDevice::wait(Lane lane, const MarkPtr& mark) {
  if (mark) put(lane, [gate = gate_of(mark)] { gate->pass(); });
}

void ThreadDevice::synchronize(const MarkPtr& mark) {
  if (mark) gate_of(mark)->pass();
}

void ThreadDevice::synchronize() {
  for (std::size_t lane = 0; lane < kLaneNum; ++lane) synchronize(mark(static_cast<Lane>(lane)));
}

std::shared_ptr<std::byte> ThreadDevice::allocate(std::size_t bytes, std::string_view what) {
  return host_->allocate(bytes, what);
}

void ThreadDevice::cast(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
                        std::size_t numel) {
  host_->cast(lane, destination, destination_dtype, source, source_dtype, numel);
}

void ThreadDevice::add(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
                       std::size_t numel) {
  host_->add(lane, destination, destination_dtype, source, source_dtype, numel);
}

void ThreadDevice::sum(Lane lane, void* destination, std::span<const void* const> sources, DType dtype,
                       std::size_t numel) {
  put(lane, [=, this, held = std::vector<const void*>(sources.begin(), sources.end())] {
    host_->sum(lane, destination, held, dtype, numel);
  });
}

void ThreadDevice::copy(Lane lane, void* destination, const void* source, std::size_t bytes) {
  put(lane, [=] { std::memmove(destination, source, bytes); });
}

void ThreadDevice::copy_to_pinned(Lane lane, std::byte* host, const void* source, std::size_t bytes) {
  copy(lane, host, source, bytes);
}

void ThreadDevice::copy_from_pinned(Lane lane, void* destination, const std::byte* host, std::size_t bytes) {
  copy(lane, destination, host, bytes);
}

void ThreadDevice::sums_of_squares(Lane lane, DType dtype, std::span<const SquareSum> sums) {
  host_->sums_of_squares(lane, dtype, sums);
}

void ThreadDevice::upload(void* destination, const void* host, std::size_t bytes) {
  host_->upload(destination, host, bytes);
}

HostTransport::HostTransport(std::shared_ptr<ThreadDevice> device, Lane lane, std::unique_ptr<Communicator> data)
    : device_(std::move(device)), lane_(lane), data_(std::move(data)) {}

HostTransport::~HostTransport() { device_->synchronize(device_->mark(lane_)); }

std::shared_ptr<std::byte> HostTransport::allocate(std::size_t bytes, BufferRole, std::string_view) {
  auto buffer = data_->allocate(bytes, BufferRole::kShared, nullptr, Category::kStaging);
  buffers_[buffer->data()] = buffer;
  return {buffer, buffer->data()};
}

void HostTransport::put_in(std::span<const LaneCall> calls) {
  device_->put(lane_, [this, calls = std::vector<LaneCall>(calls.begin(), calls.end())] {
    for (const LaneCall& call : calls) run(call);
  });
}

Region HostTransport::region(const std::byte* data) const {
  const auto& [begin, buffer] = *std::prev(buffers_.upper_bound(data));
  return {buffer, static_cast<std::size_t>(data - begin)};
}

void HostTransport::run(const LaneCall& call) {
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

std::shared_ptr<std::byte> StuckTransport::allocate(std::size_t bytes, BufferRole, std::string_view what) {
  return device_->allocate(bytes, what);
}

void StuckTransport::put_in(std::span<const LaneCall>) {
  device_->put(lane_, [gate = aborted_] { gate->pass(); });
  is_used_ = true;
}

bool StuckTransport::abort() noexcept {
  if (--aborts_needed_ > 0) return false;
  aborted_->open();
  return true;
}

}  // namespace zb::test
