#include "comm/shm_communicator.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <system_error>

#include "comm/arguments.h"
#include "comm/shm_memory.h"
#include "comm/shm_queue.h"
#include "comm/shm_rendezvous.h"
#include "comm/solo_communicator.h"
#include "common/page.h"
#include "memory/host_limits.h"

namespace zb {
namespace shm {
namespace {

class ShmWork final : public Work {
 public:
  ShmWork(std::shared_ptr<Queue> queue, std::shared_ptr<Operation> operation)
      : queue_(std::move(queue)), operation_(std::move(operation)) {}
  // What an exchange writes to may go with its handle. The operation itself goes on: the peers count on it.
  ~ShmWork() override { operation_->messages = nullptr; }

  bool test() override { return queue_->test_done(*operation_); }
  void wait(Lane) override { queue_->wait_done(*operation_); }
  bool test_source_free() override { return queue_->test_source_free(*operation_); }
  void wait_source_free(Lane) override { queue_->wait_source_free(*operation_); }

 private:
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Operation> operation_;
};

// How one rank's part of an allocation went.
struct AllocationStatus {
  std::array<char, 256> error{};  // empty when it is there
};

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(const ShmOptions& options, Connection connection)
      : Communicator(options.rank, options.world_size),
        queue_(std::make_shared<Queue>(options, std::move(connection))),
        caller_{options.rank, options.world_size, SourceRule::kParts} {}

  ~ShmCommunicator() override { queue_->close(); }

  std::string_view kind() const noexcept override { return "shm"; }
  bool runs_in_background() const noexcept override { return false; }

  std::shared_ptr<RegisteredBuffer> allocate(std::size_t bytes, BufferRole role, Ledger* ledger,
                                             Category category) override {
    if (role == BufferRole::kPrivate) return allocate_local(bytes, role, ledger, category);
    const std::shared_ptr<Mapping> mapping = allocate_shared(bytes, category);
    Buffer::Parts parts{mapping, mapping->id(), mapping->data(), stride_of(bytes), rank(), world_size()};
    return std::make_shared<Buffer>(bytes, std::move(parts), Allocation(ledger, Tier::kDevice, category, bytes));
  }

  WorkPtr start_all_gather(const AllGather& args) override {
    auto operation = make(OperationKind::kAllGather, args.label, check_all_gather(caller_, args), args.source);
    operation->descriptor.bytes = args.shard_bytes;
    set_destination(*operation, args.destination);
    count(Collective::kAllGather, args.shard_bytes * ranks());
    return start(std::move(operation));
  }

  WorkPtr start_reduce_scatter(const ReduceScatter& args) override {
    auto operation = make(OperationKind::kReduceScatter, args.label, check_reduce_scatter(caller_, args), args.source);
    operation->descriptor.bytes = args.shard_numel * dtype_bytes(args.dtype);
    operation->descriptor.dtype = args.dtype;
    operation->numel = args.shard_numel;
    set_destination(*operation, args.destination);
    count(Collective::kReduceScatter, operation->descriptor.bytes * ranks());
    return start(std::move(operation));
  }

  WorkPtr start_all_reduce(const AllReduce& args) override {
    auto operation = make(OperationKind::kAllReduce, args.label, check_all_reduce(caller_, args), args.buffer);
    operation->descriptor.bytes = args.numel * dtype_bytes(args.dtype);
    operation->descriptor.dtype = args.dtype;
    operation->numel = args.numel;
    set_destination(*operation, args.buffer);
    count(Collective::kAllReduce, operation->descriptor.bytes);
    return start(std::move(operation));
  }

  WorkPtr start_broadcast(const Broadcast& args) override {
    auto operation = make(OperationKind::kBroadcast, args.label, check_broadcast(caller_, args), args.buffer);
    operation->descriptor.bytes = args.bytes;
    operation->descriptor.root = static_cast<std::uint16_t>(args.root);
    set_destination(*operation, args.buffer);
    count(Collective::kBroadcast, args.bytes);
    return start(std::move(operation));
  }

  void barrier(std::string_view label) override {
    auto operation = std::make_shared<Operation>();
    operation->descriptor.kind = OperationKind::kBarrier;
    operation->label = label;
    count(Collective::kBarrier, 0);
    queue_->start(operation);
    queue_->wait_done(*operation);
  }

  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) override {
    check_exchange(caller_, mine.size(), all.size(), label);
    count(Collective::kExchange, all.size());
    std::size_t begin = 0;
    do {
      const std::size_t bytes = std::min(mine.size() - begin, kPayloadBytes);
      exchange_chunk(OperationKind::kExchange, mine.size() - begin, mine.subspan(begin, bytes), all.data() + begin,
                     mine.size(), label);
      begin += bytes;
    } while (begin < mine.size());
  }

  WorkPtr start_exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) override {
    if (mine.size() > kPayloadBytes) return Communicator::start_exchange(mine, all, label);
    check_exchange(caller_, mine.size(), all.size(), label);
    count(Collective::kExchange, all.size());
    return start(make_exchange(OperationKind::kExchange, mine.size(), mine, all.data(), mine.size(), label));
  }

  void progress() override { queue_->advance(); }

  void serve_while_blocked(Communicator& other) override {
    auto* const shm = dynamic_cast<ShmCommunicator*>(&other);
    ZB_EXPECT(shm != nullptr && shm != this && shm->rank() == rank() && shm->world_size() == world_size(),
              "only another shm communicator of the same ranks can be served while this one blocks");
    queue_->serve_while_blocked(shm->queue_);
  }

  void abort(std::string_view reason) noexcept override {
    std::array<char, kReasonBytes> text{};  // without memory that may be lacking
    std::snprintf(text.data(), text.size(), "rank %d aborted: %.*s", rank(), static_cast<int>(reason.size()),
                  reason.data());
    queue_->peers().poison(rank(), text.data());
  }

  std::optional<CommunicationError> poisoned() const noexcept override { return queue_->peers().cause(); }

  void stop(std::string_view why, std::uint32_t stop_num) noexcept override { queue_->peers().stop(why, stop_num); }
  void go_on(std::uint32_t stop_num) noexcept override { queue_->peers().go_on(stop_num); }
  void tell_put_in(std::uint64_t num) noexcept override { queue_->peers().tell_put_in(num); }
  std::optional<AbsentPeer> absent_peer(std::uint64_t num) override { return queue_->peers().absent_peer(num); }

 private:
  std::size_t ranks() const noexcept { return static_cast<std::size_t>(world_size()); }
  static std::size_t stride_of(std::size_t bytes) { return round_up_to_page(std::max<std::size_t>(bytes, 1)); }

  static std::shared_ptr<Operation> make(OperationKind kind, std::string_view label, std::shared_ptr<Buffer> buffer,
                                         const Region& source) {
    auto operation = std::make_shared<Operation>();
    operation->descriptor.kind = kind;
    operation->descriptor.buffer_id = buffer->parts().id;
    operation->descriptor.offset_bytes = source.offset_bytes;
    operation->label = label;
    operation->source = std::move(buffer);
    return operation;
  }

  static void set_destination(Operation& operation, const Region& destination) {
    operation.destination_owner = destination.buffer;
    operation.destination = destination.data();
  }

  WorkPtr start(std::shared_ptr<Operation> operation) {
    queue_->start(operation);
    return std::make_shared<ShmWork>(queue_, std::move(operation));
  }

  // `key_bytes` is what ranks must agree on.
  std::shared_ptr<Operation> make_exchange(OperationKind kind, std::size_t key_bytes,
                                           std::span<const std::byte> message, std::byte* messages,
                                           std::size_t stride_bytes, std::string_view label) {
    auto operation = std::make_shared<Operation>();
    operation->descriptor.kind = kind;
    operation->descriptor.bytes = key_bytes;
    operation->label = label;
    operation->message = message;
    operation->messages = messages;
    operation->message_stride_bytes = stride_bytes;
    operation->payload_index = queue_->next_payload_index();
    return operation;
  }

  void exchange_chunk(OperationKind kind, std::size_t key_bytes, std::span<const std::byte> message,
                      std::byte* messages, std::size_t stride_bytes, std::string_view label) {
    start(make_exchange(kind, key_bytes, message, messages, stride_bytes, label))->wait();
  }

  // Runs one step of an allocation on this rank; throws OutOfMemoryError on all ranks when it failed on one.
  void agree(std::size_t bytes, Category category, const std::function<void()>& own_step) {
    AllocationStatus mine;
    try {
      own_step();
    } catch (const OutOfMemoryError& error) {
      std::string_view(error.what()).copy(mine.error.data(), mine.error.size() - 1);
    }
    std::vector<AllocationStatus> all(ranks());
    exchange_chunk(OperationKind::kAllocate, bytes, std::as_bytes(std::span(&mine, 1)),
                   std::as_writable_bytes(std::span(all)).data(), sizeof(AllocationStatus), category_name(category));
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
      if (all[peer].error[0] == '\0') continue;
      throw OutOfMemoryError("rank " + std::to_string(peer) + " " + all[peer].error.data());
    }
  }

  std::shared_ptr<Mapping> allocate_shared(std::size_t bytes, Category category) {
    try {
      return map_shared(bytes, category);
    } catch (const OutOfMemoryError&) {
      throw;  // on all ranks
    } catch (const std::exception& error) {
      abort(error.what());  // the peers wait for this rank's step
      throw;
    }
  }

  // One memfd made by rank 0 holds the parts of all ranks; each rank gives its own part memory, on its NUMA node.
  std::shared_ptr<Mapping> map_shared(std::size_t bytes, Category category) {
    const std::size_t total_bytes = stride_of(bytes) * ranks();
    FileDescriptor memfd;
    agree(bytes, category, [&] {
      const std::size_t available = available_host_bytes();
      if (bytes > available / ranks()) {
        throw_out_of_memory(bytes, "with " + std::to_string(ranks()) + " ranks, only " + std::to_string(available) +
                                       " bytes are available");
      }
      if (rank() == 0) memfd = create_memfd(total_bytes);
    });
    FileDescriptor received = queue_->peers().distribute(memfd, allocation_num_++);
    if (rank() != 0) memfd = std::move(received);
    std::shared_ptr<Mapping> mapping;
    agree(bytes, category, [&] {
      mapping = Mapping::of_file(memfd, total_bytes);
      const std::size_t offset_bytes = stride_of(bytes) * static_cast<std::size_t>(rank());
      const int error_number = populate_file(memfd, *mapping, offset_bytes, stride_of(bytes));
      if (error_number != 0) throw_out_of_memory(bytes, std::generic_category().message(error_number));
    });
    return mapping;
  }

  std::shared_ptr<Queue> queue_;
  Caller caller_;
  std::uint64_t allocation_num_ = 0;
};

}  // namespace
}  // namespace shm

std::unique_ptr<Communicator> make_shm_communicator(const ShmOptions& options) {
  ZB_EXPECT(options.world_size >= 1 && options.world_size <= shm::kMaxRanks,
            "world_size " + std::to_string(options.world_size) +
                " is out of range: the shm communicator connects 1 to " + std::to_string(shm::kMaxRanks) + " ranks");
  ZB_EXPECT(options.rank >= 0 && options.rank < options.world_size,
            "rank " + std::to_string(options.rank) + " is out of range: with world_size " +
                std::to_string(options.world_size) + ", ranks are 0 to " + std::to_string(options.world_size - 1));
  ZB_EXPECT(options.timeout.count() > 0, "the timeout must be positive");
  if (options.world_size == 1) return make_solo_communicator();
  ZB_EXPECT(!options.rendezvous.empty(), "the rendezvous is empty: give a text that only the ranks of this run know");
  return std::make_unique<shm::ShmCommunicator>(options, shm::connect_ranks(options));
}

}  // namespace zb
