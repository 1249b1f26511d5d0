#include "comm/c10d_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>

#include "comm/arguments.h"
#include "comm/buffer.h"
#include "comm/c10d_dtype.h"
#include "comm/cause.h"

namespace zb {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using BackendWork = c10::intrusive_ptr<c10d::Work>;

using Owner = std::shared_ptr<const void>;

// The backend's threads may hold the tensor longer than anyone here: it keeps its memory.
at::Tensor tensor_at(const Owner& owner, const std::byte* data, std::size_t numel, at::ScalarType type) {
  return at::from_blob(
      const_cast<std::byte*>(data), {static_cast<std::int64_t>(numel)}, [owner](void*) {}, at::TensorOptions(type));
}

// One started operation.
struct Started {
  BackendWork work;              // null when there was nothing to move
  std::string text;              // "all_gather of 'h.3'"
  std::function<void()> finish;  // after the work: copies out of the staging buffer
  bool is_done = false;
};

// Ends operations in the order in which they were started, and keeps the first failure.
class Line {
 public:
  Line(int rank, std::shared_ptr<PeerHosts> hosts) : rank_(rank), hosts_(std::move(hosts)) {}

  void check() const { cause_.check(); }
  void poison(const std::string& reason, int rank) { cause_.set(reason, rank); }
  std::optional<CommunicationError> cause() const noexcept { return cause_.get(); }

  void run(const std::string& text, const std::function<void()>& call) {
    check();
    try {
      call();
    } catch (const std::exception& error) {
      blame(text, first_line(error.what()));
      check();
    }
  }

  void push(std::shared_ptr<Started> started) { started_.push_back(std::move(started)); }

  bool test(const Started& last) {
    while (!last.is_done) {
      check();
      const BackendWork& work = started_.front()->work;
      if (work && !work->isCompleted()) return false;
      finish_front();
    }
    return true;
  }
  void wait(const Started& last) {
    while (!last.is_done) finish_front();
  }
  void progress() {
    check();
    while (!started_.empty() && (!started_.front()->work || started_.front()->work->isCompleted())) finish_front();
  }

 private:
  // What a process leaves at its end closes piece by piece: a peer can notice before the process is gone.
  static constexpr std::chrono::milliseconds kPatience{500};

  void blame(const std::string& text, const std::string& reason) {
    if (const auto lost = hosts_ ? hosts_->find_lost_rank(kPatience) : std::optional<LostRank>()) {
      poison(lost->text + " during " + text + " (noticed by rank " + std::to_string(rank_) + ": " + reason + ")",
             lost->rank);
    } else {
      poison(text + " failed: " + reason, -1);
    }
  }

  // c10's messages carry a stack trace below the first line.
  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  void finish_front() {
    const std::shared_ptr<Started> front = started_.front();
    run(front->text, [&] {
      if (front->work) front->work->wait();
      if (front->finish) front->finish();
    });
    started_.pop_front();
    front->is_done = true;
    front->finish = nullptr;
    front->work.reset();
  }

  int rank_;
  std::shared_ptr<PeerHosts> hosts_;  // null where they are not known
  std::deque<std::shared_ptr<Started>> started_;
  Cause cause_;
};

// A backend's work is over when the local buffers are free, so the source is free when the destination is readable.
class C10dWork final : public Work {
 public:
  C10dWork(std::shared_ptr<Line> line, std::shared_ptr<Started> started)
      : line_(std::move(line)), started_(std::move(started)) {}

  bool test() override { return line_->test(*started_); }
  void wait(Lane) override { line_->wait(*started_); }
  bool test_source_free() override { return test(); }
  void wait_source_free(Lane) override { wait(Lane::kCompute); }

 private:
  std::shared_ptr<Line> line_;
  std::shared_ptr<Started> started_;
};

class C10dCommunicator final : public Communicator {
 public:
  C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, BackendPtr backend, std::shared_ptr<PeerHosts> hosts)
      : Communicator(group->getRank(), group->getSize()),
        group_(std::move(group)),
        backend_(std::move(backend)),
        is_gloo_(backend_->getBackendName() == "gloo"),
        caller_{rank(), world_size(), SourceRule::kShared},
        line_(std::make_shared<Line>(rank(), std::move(hosts))) {}

  std::string_view kind() const noexcept override { return "c10d"; }
  bool runs_in_background() const noexcept override { return true; }

  std::shared_ptr<RegisteredBuffer> allocate(std::size_t bytes, BufferRole role, Ledger* ledger,
                                             Category category) override {
    line_->check();
    ledger_ = ledger;
    return allocate_local(bytes, role, ledger, category);
  }

  WorkPtr start_all_gather(const AllGather& args) override {
    check_all_gather(caller_, args);
    const std::size_t full_bytes = args.shard_bytes * ranks();
    count(Collective::kAllGather, full_bytes);
    auto started = make("all_gather", args.label);
    const std::byte* source = args.source.data();
    Owner owner = args.source.buffer;
    if (needs_staging(args.source, args.destination, args.shard_bytes, full_bytes)) {
      const auto staging = make_staging(args.shard_bytes);
      std::memcpy(staging->data(), source, args.shard_bytes);
      source = staging->data();
      owner = staging;
    }
    return start(std::move(started), full_bytes, [&] {
      at::Tensor in = tensor_at(owner, source, args.shard_bytes, at::kByte);
      at::Tensor out = tensor_at(args.destination.buffer, args.destination.data(), full_bytes, at::kByte);
      return backend_->_allgather_base(out, in, c10d::AllgatherOptions());
    });
  }

  WorkPtr start_reduce_scatter(const ReduceScatter& args) override {
    check_reduce_scatter(caller_, args);
    const std::size_t shard_bytes = args.shard_numel * dtype_bytes(args.dtype);
    count(Collective::kReduceScatter, shard_bytes * ranks());
    auto started = make("reduce_scatter", args.label);
    if (is_gloo_) return start_reduce_all(std::move(started), args, shard_bytes);
    std::byte* destination = args.destination.data();
    Owner owner = args.destination.buffer;
    if (needs_staging(args.destination, args.source, shard_bytes, shard_bytes * ranks())) {
      const auto staging = make_staging(shard_bytes);
      started->finish = [to = args.destination, staging, shard_bytes] {
        std::memcpy(to.data(), staging->data(), shard_bytes);
      };
      destination = staging->data();
      owner = staging;
    }
    return start(std::move(started), shard_bytes, [&] {
      at::Tensor in =
          tensor_at(args.source.buffer, args.source.data(), args.shard_numel * ranks(), scalar_type(args.dtype));
      at::Tensor out = tensor_at(owner, destination, args.shard_numel, scalar_type(args.dtype));
      return backend_->_reduce_scatter_base(out, in, c10d::ReduceScatterOptions());
    });
  }

  WorkPtr start_all_reduce(const AllReduce& args) override {
    check_all_reduce(caller_, args);
    const std::size_t bytes = args.numel * dtype_bytes(args.dtype);
    count(Collective::kAllReduce, bytes);
    return start(make("all_reduce", args.label), bytes, [&] {
      std::vector<at::Tensor> tensors{
          tensor_at(args.buffer.buffer, args.buffer.data(), args.numel, scalar_type(args.dtype))};
      return backend_->allreduce(tensors, c10d::AllreduceOptions());
    });
  }

  WorkPtr start_broadcast(const Broadcast& args) override {
    check_broadcast(caller_, args);
    count(Collective::kBroadcast, args.bytes);
    return start(make("broadcast", args.label), args.bytes, [&] {
      std::vector<at::Tensor> tensors{tensor_at(args.buffer.buffer, args.buffer.data(), args.bytes, at::kByte)};
      c10d::BroadcastOptions options;
      options.rootRank = args.root;
      return backend_->broadcast(tensors, options);
    });
  }

  void barrier(std::string_view label) override {
    count(Collective::kBarrier, 0);
    start(make("barrier", label), 1, [&] { return backend_->barrier(c10d::BarrierOptions()); })->wait();
  }

  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) override {
    check_exchange(caller_, mine.size(), all.size(), label);
    count(Collective::kExchange, all.size());
    // Their memory is the tensors' own: where the wait ends by an error, the backend may still be at work on it.
    at::Tensor in = at::empty({static_cast<std::int64_t>(mine.size())}, at::kByte);
    at::Tensor out = at::empty({static_cast<std::int64_t>(all.size())}, at::kByte);
    std::memcpy(in.data_ptr(), mine.data(), mine.size());
    const auto gather = [&] { return backend_->_allgather_base(out, in, c10d::AllgatherOptions()); };
    start(make("exchange", label), mine.size(), gather)->wait();
    std::memcpy(all.data(), out.data_ptr(), all.size());
  }

  void progress() override { line_->progress(); }

  void abort(std::string_view reason) noexcept override {
    try {
      line_->poison("rank " + std::to_string(rank()) + " aborted: " + std::string(reason), rank());
      backend_->abort();
    } catch (const std::exception&) {
      // The backend cannot close its connections early: peers notice at their timeout.
    }
  }
  std::optional<CommunicationError> poisoned() const noexcept override { return line_->cause(); }

 private:
  std::size_t ranks() const noexcept { return static_cast<std::size_t>(world_size()); }

  static std::shared_ptr<Started> make(std::string_view name, std::string_view label) {
    auto started = std::make_shared<Started>();
    started->text = operation_text(name, label);
    return started;
  }

  std::shared_ptr<HostBuffer> make_staging(std::size_t bytes) const {
    return std::make_shared<HostBuffer>(bytes, ledger_, Tier::kDevice, Category::kStaging);
  }

  // torch's gloo backend reduces a copy of the whole source on all ranks, in memory that nobody counts and in a work
  // that never says that it is completed. The same here, with the copy in the ledger and a work that can be tested.
  WorkPtr start_reduce_all(std::shared_ptr<Started> started, const ReduceScatter& args, std::size_t shard_bytes) {
    if (shard_bytes == 0) return start(std::move(started), 0, {});
    const auto staging = make_staging(shard_bytes * ranks());
    std::memcpy(staging->data(), args.source.data(), staging->bytes());
    const std::size_t begin = shard_bytes * static_cast<std::size_t>(rank());
    started->finish = [to = args.destination, staging, begin, shard_bytes] {
      std::memcpy(to.data(), staging->data() + begin, shard_bytes);
    };
    return start(std::move(started), shard_bytes, [&] {
      std::vector<at::Tensor> tensors{
          tensor_at(staging, staging->data(), args.shard_numel * ranks(), scalar_type(args.dtype))};
      return backend_->allreduce(tensors, c10d::AllreduceOptions());
    });
  }

  // Gloo gathers in memory of its own; other backends may forbid that source and destination overlap.
  bool needs_staging(const Region& part, const Region& full, std::size_t part_bytes, std::size_t full_bytes) const {
    const std::byte* begin = full.data();
    return !is_gloo_ && part_bytes != 0 && part.data() < begin + full_bytes && begin < part.data() + part_bytes;
  }

  WorkPtr start(std::shared_ptr<Started> started, std::size_t bytes, const std::function<BackendWork()>& call) {
    line_->check();
    if (bytes != 0) line_->run(started->text, [&] { started->work = call(); });
    line_->push(started);
    return std::make_shared<C10dWork>(line_, std::move(started));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  BackendPtr backend_;
  bool is_gloo_;
  Caller caller_;
  Ledger* ledger_ = nullptr;  // of the last allocation, outlives this; counts staging
  std::shared_ptr<Line> line_;
};

}  // namespace

std::unique_ptr<Communicator> make_c10d_communicator(const std::string& group_name, std::shared_ptr<PeerHosts> hosts) {
  try {
    auto group = c10d::resolve_process_group(group_name);
    BackendPtr backend = group->getBackend(c10::DeviceType::CPU);
    return std::make_unique<C10dCommunicator>(std::move(group), std::move(backend), std::move(hosts));
  } catch (const c10::Error& error) {
    throw ArgumentError("'" + group_name +
                        "' is not the name of a process group with a CPU backend: " + error.what_without_backtrace() +
                        "; pass the group_name of a group made by torch.distributed.new_group(backend='gloo')");
  }
}

}  // namespace zb
