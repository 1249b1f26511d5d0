#include "comm/solo_communicator.h"

#include <cstring>
#include <string>

#include "comm/arguments.h"
#include "comm/buffer.h"
#include "comm/cause.h"
#include "comm/finished_work.h"
#include "kernels/cpu_kernels.h"

namespace zb {
namespace {

class SoloCommunicator final : public Communicator {
 public:
  SoloCommunicator() : Communicator(0, 1), caller_{0, 1, SourceRule::kShared} {}

  std::string_view kind() const noexcept override { return "shm"; }
  bool runs_in_background() const noexcept override { return false; }

  std::shared_ptr<RegisteredBuffer> allocate(std::size_t bytes, BufferRole role, Ledger* ledger,
                                             Category category) override {
    cause_.check();
    return allocate_local(bytes, role, ledger, category);
  }

  WorkPtr start_all_gather(const AllGather& args) override {
    check_all_gather(caller_, args);
    return copy(Collective::kAllGather, args.destination, args.source, args.shard_bytes);
  }

  WorkPtr start_reduce_scatter(const ReduceScatter& args) override {
    check_reduce_scatter(caller_, args);
    return copy(Collective::kReduceScatter, args.destination, args.source, args.shard_numel * dtype_bytes(args.dtype));
  }

  WorkPtr start_all_reduce(const AllReduce& args) override {
    check_all_reduce(caller_, args);
    return copy(Collective::kAllReduce, args.buffer, args.buffer, args.numel * dtype_bytes(args.dtype));
  }

  WorkPtr start_broadcast(const Broadcast& args) override {
    check_broadcast(caller_, args);
    return copy(Collective::kBroadcast, args.buffer, args.buffer, args.bytes);
  }

  void barrier(std::string_view) override {
    cause_.check();
    count(Collective::kBarrier, 0);
  }

  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) override {
    cause_.check();
    check_exchange(caller_, mine.size(), all.size(), label);
    count(Collective::kExchange, all.size());
    if (!mine.empty()) std::memmove(all.data(), mine.data(), mine.size());
  }

  void progress() override { cause_.check(); }

  void abort(std::string_view reason) noexcept override { cause_.set("rank 0 aborted: " + std::string(reason), 0); }
  std::optional<CommunicationError> poisoned() const noexcept override { return cause_.get(); }

 private:
  WorkPtr copy(Collective collective, const Region& destination, const Region& source, std::size_t bytes) {
    cause_.check();
    count(collective, bytes);
    if (destination.data() != source.data() && bytes != 0) {
      cpu_kernels().copy(destination.data(), source.data(), bytes);
    }
    return done_;
  }

  Caller caller_;
  WorkPtr done_ = std::make_shared<FinishedWork>();
  Cause cause_;
};

}  // namespace

std::unique_ptr<Communicator> make_solo_communicator() { return std::make_unique<SoloCommunicator>(); }

}  // namespace zb
