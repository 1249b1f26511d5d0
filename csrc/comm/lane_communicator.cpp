#include "comm/lane_communicator.h"

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "comm/arguments.h"
#include "comm/collective_history.h"
#include "comm/lane_buffer.h"
#include "comm/or_abort.h"
#include "comm/solo_transport.h"
#include "comm/spliced_slot.h"
#include "comm/watchdog.h"

namespace zb {
namespace {

// What the operations of one group share.
struct Ticket {
  MarkPtr mark;
  bool is_put_in = false;
};

class LaneWork final : public Work {
 public:
  LaneWork(std::shared_ptr<Device> device, Lane lane, std::shared_ptr<const Cause> cause,
           std::shared_ptr<const Ticket> ticket)
      : device_(std::move(device)), lane_(lane), cause_(std::move(cause)), ticket_(std::move(ticket)) {}

  bool test() override {
    cause_->check();
    return ticket_->is_put_in;
  }
  void wait(Lane reader) override {
    cause_->check();
    ZB_EXPECT_STATE(ticket_->is_put_in,
                    "an operation of a group was waited for inside the group: wait after the group has ended");
    if (reader != lane_) device_->wait(reader, ticket_->mark);
  }
  bool test_source_free() override { return test(); }
  void wait_source_free(Lane writer) override { wait(writer); }

 private:
  std::shared_ptr<Device> device_;
  Lane lane_;
  std::shared_ptr<const Cause> cause_;
  std::shared_ptr<const Ticket> ticket_;
};

// An exchange over the control communicator that compares histories when it ends. Of use while its communicator lives.
class LaneExchange final : public Work {
 public:
  using Finish = std::function<void(CollectiveHistory::Exchange&)>;
  explicit LaneExchange(Finish finish) : finish_(std::move(finish)) {}

  CollectiveHistory::Exchange exchange;

  bool test() override { return exchange.work->test(); }
  void wait(Lane) override {
    if (finish_) std::exchange(finish_, nullptr)(exchange);
  }
  bool test_source_free() override { return test(); }
  void wait_source_free(Lane) override { wait(Lane::kCompute); }

 private:
  Finish finish_;
};

class LaneSplicedSlot final : public SplicedSlot {
 public:
  LaneSplicedSlot(int world_size, std::unique_ptr<SplicedMemory> memory, bool is_on_device, Allocation allocation)
      : ranks_(static_cast<std::size_t>(world_size)),
        memory_(std::move(memory)),
        is_on_device_(is_on_device),
        allocation_(std::move(allocation)) {}

  std::vector<Region> destinations(std::span<const SplicedPart> parts) override {
    std::vector<SplicedMemory::Part> places;
    for (const SplicedPart& part : parts) {
      places.push_back({part.own ? part.own.data() : nullptr, part.shard_bytes});
    }
    std::vector<std::shared_ptr<std::byte>> memories = memory_->destinations(places);
    allocation_.resize(memory_->bytes());
    std::vector<Region> regions;
    for (std::size_t index = 0; index < parts.size(); ++index) {
      regions.push_back({std::make_shared<LaneBuffer>(std::move(memories[index]), ranks_ * parts[index].shard_bytes,
                                                      is_on_device_, Allocation())});
    }
    return regions;
  }

 private:
  std::size_t ranks_;
  std::unique_ptr<SplicedMemory> memory_;
  bool is_on_device_;
  Allocation allocation_;
};

class LaneCommunicator final : public Communicator {
 public:
  LaneCommunicator(int rank, int world_size, LaneOptions options)
      : Communicator(rank, world_size),
        kind_(std::move(options.kind)),
        lane_(options.lane),
        caller_{rank, world_size, SourceRule::kRegistered, options.transport->takes_pushes()},
        overhead_(std::move(options.overhead)),
        watched_(std::make_shared<WatchedLane>()) {
    watched_->rank = rank;
    watched_->timeout = options.timeout;
    watched_->device = std::move(options.device);
    watched_->transport = std::move(options.transport);
    watched_->control = std::move(options.control);
    watched_->processes = std::move(options.processes);
    if (world_size > 1) watchdog_.emplace(watched_);
  }

  std::string_view kind() const noexcept override { return kind_; }
  bool runs_in_background() const noexcept override { return true; }
  Lane lane() const noexcept override { return lane_; }
  bool gathers_final_shards() const noexcept override { return watched_->transport->gathers_final_shards(); }
  bool takes_pushes() const noexcept override { return caller_.takes_pushes; }

  std::shared_ptr<RegisteredBuffer> allocate(std::size_t bytes, BufferRole role, Ledger* ledger,
                                             Category category) override {
    check();
    std::shared_ptr<std::byte> memory;
    with_control([&] { memory = watched_->transport->allocate(bytes, role, category_name(category)); });
    if (overhead_ && role != BufferRole::kPrivate) memory = overhead_->hand_out(std::move(memory), bytes, ledger);
    return std::make_shared<LaneBuffer>(std::move(memory), bytes, watched_->device->is_async(),
                                        Allocation(ledger, Tier::kDevice, category, bytes));
  }

  bool splices() const noexcept override { return watched_->transport->splices(); }
  std::unique_ptr<SplicedSlot> make_spliced_slot(Ledger* ledger, Category category) override {
    check();
    return std::make_unique<LaneSplicedSlot>(
        world_size(), watched_->transport->make_spliced_memory(category_name(category)), watched_->device->is_async(),
        Allocation(ledger, Tier::kDevice, category, 0));
  }

  void begin_group() override {
    ZB_EXPECT_STATE(group_ == nullptr, "a group of collectives began inside of another; groups cannot be nested");
    group_ = std::make_shared<Ticket>();
  }

  void end_group() override {
    ZB_EXPECT_STATE(group_ != nullptr, "a group of collectives was ended, but none had begun");
    const std::shared_ptr<Ticket> ticket = std::exchange(group_, nullptr);
    if (!calls_.empty()) put_in(*ticket);
  }

  WorkPtr start_all_gather(const AllGather& args) override {
    check_all_gather(caller_, args);
    count(Collective::kAllGather, args.shard_bytes * ranks());
    return start({.name = {Collective::kAllGather, args.label}, .bytes = args.shard_bytes},
                 {.kind = Collective::kAllGather,
                  .source = args.source.data(),
                  .destination = args.destination.data(),
                  .num = args.shard_bytes,
                  .is_final = args.is_final,
                  .holds_own_part = args.holds_own_part});
  }

  WorkPtr start_reduce_scatter(const ReduceScatter& args) override {
    check_reduce_scatter(caller_, args);
    const std::size_t shard_bytes = args.shard_numel * dtype_bytes(args.dtype);
    count(Collective::kReduceScatter, shard_bytes * ranks());
    return start({.name = {Collective::kReduceScatter, args.label},
                  .dtype = args.dtype,
                  .is_pushed = args.is_pushed,
                  .bytes = shard_bytes},
                 {.kind = Collective::kReduceScatter,
                  .source = args.source.data(),
                  .destination = args.destination.data(),
                  .num = args.shard_numel,
                  .dtype = args.dtype,
                  .is_pushed = args.is_pushed});
  }

  void push(const Push& args) override {
    check_push(caller_, args);
    check();
    const OperationName name{Collective::kReduceScatter, args.label};
    guarded(name, [&] {
      watched_->transport->push({.kind = Collective::kReduceScatter,
                                 .source = args.source.data(),
                                 .num = args.shard_numel,
                                 .dtype = args.dtype,
                                 .is_pushed = true},
                                args.items, args.copy_bytes);
    });
  }

  WorkPtr start_all_reduce(const AllReduce& args) override {
    check_all_reduce(caller_, args);
    const std::size_t bytes = args.numel * dtype_bytes(args.dtype);
    count(Collective::kAllReduce, bytes);
    return start({.name = {Collective::kAllReduce, args.label}, .dtype = args.dtype, .bytes = bytes},
                 {.kind = Collective::kAllReduce,
                  .source = args.buffer.data(),
                  .destination = args.buffer.data(),
                  .num = args.numel,
                  .dtype = args.dtype});
  }

  WorkPtr start_broadcast(const Broadcast& args) override {
    check_broadcast(caller_, args);
    count(Collective::kBroadcast, args.bytes);
    return start({.name = {Collective::kBroadcast, args.label},
                  .root = static_cast<std::uint16_t>(args.root),
                  .bytes = args.bytes},
                 {.kind = Collective::kBroadcast,
                  .source = args.buffer.data(),
                  .destination = args.buffer.data(),
                  .num = args.bytes,
                  .root = args.root});
  }

  void barrier(std::string_view label) override {
    check();
    count(Collective::kBarrier, 0);
    exchange_over_control({}, {}, label);
  }

  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) override {
    check();
    check_exchange(caller_, mine.size(), all.size(), label);
    count(Collective::kExchange, all.size());
    exchange_over_control(mine, all, label);
  }

  WorkPtr start_exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) override {
    check();
    check_exchange(caller_, mine.size(), all.size(), label);
    count(Collective::kExchange, all.size());
    auto work = std::make_shared<LaneExchange>([this](CollectiveHistory::Exchange& exchange) {
      with_control([&] { history_.finish(*watched_->control, exchange); });
    });
    with_control([&] { history_.start(*watched_->control, mine, all, label, work->exchange); });
    return work;
  }

  void progress() override { check(); }

  void abort(std::string_view reason) noexcept override {
    if (watched_->give_up(reason)) wake();
  }
  void stop(std::string_view why, std::uint32_t stop_num) noexcept override { watched_->control->stop(why, stop_num); }
  void go_on(std::uint32_t stop_num) noexcept override { watched_->control->go_on(stop_num); }
  // A peer that gave up says so over the control communicator before its lane is let go. What that lane then does looks
  // well to this rank's, so the peer's cause counts from then on, not from the watchdog's next turn.
  std::optional<CommunicationError> poisoned() const noexcept override {
    if (auto cause = watched_->cause->get()) return cause;
    return watched_->control->poisoned();
  }

 private:
  std::size_t ranks() const noexcept { return static_cast<std::size_t>(world_size()); }
  void check() {
    watched_->cause->check();
    if (const auto theirs = watched_->control->poisoned()) fail(theirs->what(), theirs->rank());
  }
  void wake() noexcept {
    if (watchdog_) watchdog_->wake();
  }

  // Makes this rank's failure everybody's, or finds that it follows from an earlier one, and raises the cause.
  [[noreturn]] void fail(const std::string& reason, int fault_rank) {
    watched_->poison(reason, fault_rank);
    wake();
    check();
    throw CommunicationError(reason, fault_rank);
  }

  WorkPtr start(StartedCollective started, const LaneCall& call) {
    check();
    started.place = watched_->transport->place_of(call);
    std::optional<std::uint64_t> number;
    if (!call.is_final) {
      history_.add(started);
      number = history_.num();
    }
    if (watchdog_) watched_->log.start(started.name, number);  // nobody else takes it out again
    if (calls_.empty()) first_name_ = started.name;
    calls_.push_back(call);
    std::shared_ptr<Ticket> ticket = group_;
    if (!ticket) {
      ticket = std::make_shared<Ticket>();
      put_in(*ticket);
    }
    return std::make_shared<LaneWork>(watched_->device, lane_, watched_->cause, std::move(ticket));
  }

  void put_in(Ticket& ticket) {
    const std::vector<LaneCall> calls = std::exchange(calls_, {});
    check();
    guarded(first_name_, [&] {
      watched_->transport->put_in(calls);
      ticket.mark = watched_->device->mark(lane_);
    });
    ticket.is_put_in = true;
    watched_->control->tell_put_in(history_.num());
    if (watchdog_) watched_->log.put_in(ticket.mark);
  }

  // A failure to put something in is everybody's.
  template <typename Body>
  void guarded(const OperationName& name, const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      or_abort(*watched_->control, [&] { watched_->poison_for_failure(name.text(), error.what()); });
      wake();
      check();
      throw;  // there was no memory to say so
    }
  }

  void exchange_over_control(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) {
    with_control([&] { history_.exchange(*watched_->control, mine, all, label); });
  }

  template <typename Body>
  void with_control(const Body& body) {
    try {
      body();
    } catch (const CommunicationError& error) {
      fail(error.what(), error.rank());
    }
  }

  std::string kind_;
  Lane lane_;
  Caller caller_;
  std::shared_ptr<MemoryOverhead> overhead_;
  CollectiveHistory history_;
  std::shared_ptr<Ticket> group_;  // of the open group
  std::vector<LaneCall> calls_;    // not put in yet
  OperationName first_name_;       // of calls_
  std::shared_ptr<WatchedLane> watched_;
  std::optional<Watchdog> watchdog_;  // a world of one rank needs none
};

}  // namespace

std::unique_ptr<Communicator> make_lane_communicator(LaneOptions options) {
  ZB_EXPECT(options.device != nullptr && options.transport != nullptr && options.control != nullptr,
            "a communicator in a lane needs a device, a transport and a control communicator");
  ZB_EXPECT(options.timeout.count() > 0, "the timeout must be positive");
  const int rank = options.control->rank();
  const int world_size = options.control->world_size();
  return std::make_unique<LaneCommunicator>(rank, world_size, std::move(options));
}

std::unique_ptr<Communicator> make_connected_communicator(LaneOptions options,
                                                          const std::function<void(LaneOptions&)>& connect) {
  ZB_EXPECT(options.device != nullptr && options.control != nullptr,
            "communicator '" + options.kind + "' needs a device and a control communicator");
  ZB_EXPECT(options.timeout.count() > 0, "the timeout must be positive");
  if (options.control->world_size() == 1) {
    options.transport = std::make_unique<SoloTransport>(options.device, options.lane);
    return make_lane_communicator(std::move(options));
  }
  or_abort(*options.control, [&] { connect(options); });
  return make_lane_communicator(std::move(options));
}

}  // namespace zb
