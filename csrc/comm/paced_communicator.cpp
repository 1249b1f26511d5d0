#include "comm/paced_communicator.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

namespace zb {
namespace {

using Time = PacedLink::Time;

Time now() noexcept { return std::chrono::steady_clock::now(); }

// Raises what poisons the communicator meanwhile.
void wait_until(Time arrival, const Communicator& inner) {
  constexpr std::chrono::milliseconds kTurn{20};
  for (Time at = now(); at < arrival; at = now()) {
    if (const auto cause = inner.poisoned()) throw CommunicationError(*cause);
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(arrival - at, kTurn));
  }
}

// The source is in use for as long as it is on its way.
class PacedWork final : public Work {
 public:
  PacedWork(std::shared_ptr<Communicator> inner, WorkPtr work, Time arrival)
      : inner_(std::move(inner)), work_(std::move(work)), arrival_(arrival) {}

  bool test() override { return work_->test() && now() >= arrival_; }
  void wait(Lane reader) override {
    work_->wait(reader);
    wait_until(arrival_, *inner_);
  }
  bool test_source_free() override { return work_->test_source_free() && now() >= arrival_; }
  void wait_source_free(Lane writer) override {
    work_->wait_source_free(writer);
    wait_until(arrival_, *inner_);
  }

 private:
  std::shared_ptr<Communicator> inner_;
  WorkPtr work_;
  Time arrival_;
};

class PacedCommunicator final : public Communicator {
 public:
  PacedCommunicator(std::shared_ptr<Communicator> inner, Algorithms algorithms, std::shared_ptr<PacedLink> link)
      : Communicator(inner->rank(), inner->world_size()),
        inner_(std::move(inner)),
        algorithms_(algorithms),
        link_(std::move(link)) {}

  std::string_view kind() const noexcept override { return inner_->kind(); }
  bool runs_in_background() const noexcept override { return inner_->runs_in_background(); }
  Lane lane() const noexcept override { return inner_->lane(); }
  std::shared_ptr<RegisteredBuffer> allocate(std::size_t bytes, BufferRole role, Ledger* ledger,
                                             Category category) override {
    return inner_->allocate(bytes, role, ledger, category);
  }
  void begin_group() override { inner_->begin_group(); }
  void end_group() override { inner_->end_group(); }

  WorkPtr start_all_gather(const AllGather& args) override {
    return paced(Collective::kAllGather, args.shard_bytes * ranks(), [&] { return inner_->start_all_gather(args); });
  }
  WorkPtr start_reduce_scatter(const ReduceScatter& args) override {
    return paced(Collective::kReduceScatter, args.shard_numel * dtype_bytes(args.dtype) * ranks(),
                 [&] { return inner_->start_reduce_scatter(args); });
  }
  WorkPtr start_all_reduce(const AllReduce& args) override {
    return paced(Collective::kAllReduce, args.numel * dtype_bytes(args.dtype),
                 [&] { return inner_->start_all_reduce(args); });
  }
  WorkPtr start_broadcast(const Broadcast& args) override {
    return paced(Collective::kBroadcast, args.bytes, [&] { return inner_->start_broadcast(args); });
  }
  WorkPtr start_exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) override {
    return paced(Collective::kExchange, all.size(), [&] { return inner_->start_exchange(mine, all, label); });
  }
  void barrier(std::string_view label) override {
    const Time arrival = charge(Collective::kBarrier, 0);
    inner_->barrier(label);
    wait_until(arrival, *inner_);
  }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) override {
    const Time arrival = charge(Collective::kExchange, all.size());
    inner_->exchange(mine, all, label);
    wait_until(arrival, *inner_);
  }

  void progress() override { inner_->progress(); }
  void serve_while_blocked(Communicator& other) override {
    auto* const paced = dynamic_cast<PacedCommunicator*>(&other);
    inner_->serve_while_blocked(paced == nullptr ? other : *paced->inner_);
  }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }
  void stop(std::string_view why, std::uint32_t stop_num) noexcept override { inner_->stop(why, stop_num); }
  void go_on(std::uint32_t stop_num) noexcept override { inner_->go_on(stop_num); }
  void tell_put_in(std::uint64_t num) noexcept override { inner_->tell_put_in(num); }
  std::optional<AbsentPeer> absent_peer(std::uint64_t num) override { return inner_->absent_peer(num); }
  std::optional<CommunicationError> poisoned() const noexcept override { return inner_->poisoned(); }

 private:
  std::uint64_t ranks() const noexcept { return static_cast<std::uint64_t>(world_size()); }

  Time charge(Collective collective, std::uint64_t full_bytes) {
    count(collective, full_bytes);
    return link_->arrival(wire_cost(algorithms_, collective, full_bytes, world_size()), now());
  }

  template <typename Start>
  WorkPtr paced(Collective collective, std::uint64_t full_bytes, const Start& start) {
    const Time arrival = charge(collective, full_bytes);  // before: what copies its source takes time
    return std::make_shared<PacedWork>(inner_, start(), arrival);
  }

  std::shared_ptr<Communicator> inner_;
  Algorithms algorithms_;
  std::shared_ptr<PacedLink> link_;
};

}  // namespace

std::unique_ptr<Communicator> make_paced_communicator(std::unique_ptr<Communicator> inner, Algorithms algorithms,
                                                      std::shared_ptr<PacedLink> link) {
  ZB_EXPECT(inner != nullptr && link != nullptr, "a paced communicator needs a communicator and a link");
  return std::make_unique<PacedCommunicator>(std::move(inner), algorithms, std::move(link));
}

}  // namespace zb
