// Ranks as threads of which one runs at a time, and communicators in the lanes of their SimDevices.
//
// Who runs next is chance with a seed, so what goes wrong goes wrong again. Collectives are those of
// make_lane_communicator over a transport that behaves like NCCL at its worst: a rank's part begins when it stands
// first in its lane, spoils the destination, reads the peers' sources when the last rank is there, and ends for each
// rank some time after that.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>

#include "comm/cause.h"
#include "comm/lane_transport.h"
#include "sim/sim_device.h"
#include "sim/sim_peers.h"

namespace zb::test {

inline constexpr std::chrono::seconds kLongestStandstill{20};

// Hands one turn around among the ranks.
class RankTurns {
 public:
  RankTurns(int rank_num, std::uint32_t seed);

  void enter(int rank);
  void leave(int rank);
  void pause(int rank);
  void idle(int rank);
  void progressed();

 private:
  enum class State : std::uint8_t { kMissing, kRunning, kGone };
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

  void hand_over(int from);
  void await_turn(std::unique_lock<std::mutex>& lock, int rank);

  std::mutex mutex_;
  std::mt19937 random_;
  std::vector<State> states_;
  std::vector<std::condition_variable> changed_;  // by rank
  int turn_ = -1;
  std::size_t idle_num_ = 0;  // in a row, of all ranks
  std::chrono::steady_clock::time_point standstill_;
};

// One rank's view of them.
class RankPeers final : public Peers {
 public:
  RankPeers(RankTurns& turns, int rank) : turns_(turns), rank_(rank) {}
  void pause() override { turns_.pause(rank_); }
  void idle() override { turns_.idle(rank_); }
  void progressed() override { turns_.progressed(); }

 private:
  RankTurns& turns_;
  int rank_;
};

// Where the ranks of one communicator meet. The watchdogs' threads call abort and cause.
class MeetingPoint {
 public:
  explicit MeetingPoint(int rank_num) : rank_num_(static_cast<std::size_t>(rank_num)), is_aborted_(rank_num_, false) {}

  // A rank's part of its `number`-th group. True once it has ended.
  bool meet(int rank, std::uint64_t number, const std::vector<LaneCall>& calls);
  void abort(int rank);

  // Messages of the control communicator.
  void post(int rank, std::uint64_t number, std::span<const std::byte> message);
  bool is_complete(std::uint64_t number);
  void copy_messages(std::uint64_t number, std::span<std::byte> all);
  Cause& cause() { return cause_; }

 private:
  struct Meeting {
    std::vector<const std::vector<LaneCall>*> calls;  // by rank
    bool is_done = false;
    std::size_t ended_num = 0;
  };
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

  std::size_t bytes_of(const LaneCall& call) const;

  // Until a collective has ended its destination may hold anything, but for what is its source too.
  void spoil(const LaneCall& call, std::size_t rank) const;

  // What does not match never ends.
  static bool is_same(const Meeting& meeting);

  void run(const Meeting& meeting, std::size_t index) const;

  std::vector<std::byte> result_of(const Meeting& meeting, std::size_t index, std::size_t rank) const;

  std::size_t rank_num_;
  std::mutex mutex_;
  std::vector<bool> is_aborted_;
  std::map<std::uint64_t, Meeting> meetings_;
  std::map<std::uint64_t, std::vector<std::optional<std::vector<std::byte>>>> messages_;
  Cause cause_;
};

class MeetingTransport final : public LaneTransport {
 public:
  MeetingTransport(std::shared_ptr<SimDevice> device, std::shared_ptr<MeetingPoint> point, int rank, int world_size,
                   Lane lane);

  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole, std::string_view what) override;
  void put_in(std::span<const LaneCall> calls) override;
  bool abort() noexcept override;

 private:
  std::shared_ptr<SimDevice> device_;
  std::shared_ptr<MeetingPoint> point_;
  int rank_;
  int world_size_;
  Lane lane_;
  std::uint64_t next_number_ = 0;
};

// Control messages between the ranks. Its lanes run on while a rank waits here.
class MeetingControl final : public Communicator {
 public:
  MeetingControl(std::shared_ptr<SimDevice> device, std::shared_ptr<MeetingPoint> point, int rank, int world_size);

  std::string_view kind() const noexcept override { return "meeting"; }
  bool runs_in_background() const noexcept override { return false; }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) override;
  WorkPtr start_exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view) override;
  void abort(std::string_view reason) noexcept override;
  std::optional<CommunicationError> poisoned() const noexcept override { return point_->cause().get(); }

  std::shared_ptr<RegisteredBuffer> allocate(std::size_t, BufferRole, Ledger*, Category) override { return refuse(); }
  WorkPtr start_all_gather(const AllGather&) override { return refuse(); }
  WorkPtr start_reduce_scatter(const ReduceScatter&) override { return refuse(); }
  WorkPtr start_all_reduce(const AllReduce&) override { return refuse(); }
  WorkPtr start_broadcast(const Broadcast&) override { return refuse(); }
  void barrier(std::string_view) override { refuse(); }
  void progress() override {}

 private:
  class Exchange final : public Work {
   public:
    Exchange(std::shared_ptr<SimDevice> device, std::shared_ptr<MeetingPoint> point, std::uint64_t number,
             std::span<std::byte> all);

    bool test() override { return point_->is_complete(number_); }
    void wait(Lane) override;
    bool test_source_free() override { return test(); }
    void wait_source_free(Lane reader) override { wait(reader); }

   private:
    std::shared_ptr<SimDevice> device_;
    std::shared_ptr<MeetingPoint> point_;
    std::uint64_t number_;
    std::span<std::byte> all_;
  };

  static std::nullptr_t refuse();

  std::shared_ptr<SimDevice> device_;
  std::shared_ptr<MeetingPoint> point_;
  std::uint64_t next_number_ = 0;
};

// How the ranks' collectives are carried out.
enum class SimCollectives : std::uint8_t {
  kMet,     // all at once, when the last rank is there
  kPulled,  // by PeerTransport
};

// The schedule of this number: each policy in turn.
SimSchedule sim_schedule(std::uint32_t number);
// How its collectives are carried out: both ways in turn.
SimCollectives sim_collectives(std::uint32_t number);

// What the ranks of one run share.
class SimWorld {
 public:
  SimWorld(int rank_num, const SimSchedule& schedule, SimCollectives collectives = SimCollectives::kMet);

  // Some worlds push all gradients, some those of large units, some none.
  std::size_t push_gradient_bytes() const;
  // Some copy own parts of final shards in the compute lane.
  std::size_t own_part_beside_bytes() const { return schedule_.seed / 2 % 2 == 0 ? 0 : SIZE_MAX; }
  // Some splice all slots, some those of large shards, some none.
  std::size_t splice_bytes() const;
  RankTurns& turns() { return turns_; }
  std::string text() const;

  // `report` gets what the race detector finds; by default a failure of the test.
  std::shared_ptr<SimDevice> make_device(int rank, std::function<void(const std::string&)> report = nullptr);
  // `lane` is kGather or kReduce.
  std::unique_ptr<Communicator> make_communicator(const std::shared_ptr<SimDevice>& device, int rank, Lane lane,
                                                  std::chrono::milliseconds timeout);

 private:
  int rank_num_;
  SimSchedule schedule_;
  SimCollectives collectives_;
  RankTurns turns_;
  std::shared_ptr<MeetingPoint> gather_point_;
  std::shared_ptr<MeetingPoint> reduce_point_;
  std::shared_ptr<PeerWorld> gather_peers_;
  std::shared_ptr<PeerWorld> reduce_peers_;
};

}  // namespace zb::test
