#include "sim/sim_ranks.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "comm/arguments.h"
#include "comm/lane_communicator.h"
#include "comm/solo_communicator.h"
#include "comm/solo_transport.h"
#include "common/error.h"

namespace zb::test {
namespace {

constexpr long kShortSleepNs = 1'000'000;  // longer ones wait for what takes no turns, as watchdogs
thread_local bool takes_turns = false;

}  // namespace

// What the tests call as nanosleep (CMakeLists.txt). For ranks that take turns time is turns, so one that sleeps
// between two looks at the device would only keep all others from going on.
extern "C" int __real_nanosleep(const timespec* duration, timespec* left);
extern "C" int __wrap_nanosleep(const timespec* duration, timespec* left) {
  if (takes_turns && duration->tv_sec == 0 && duration->tv_nsec < kShortSleepNs) return 0;
  return __real_nanosleep(duration, left);
}

RankTurns::RankTurns(int rank_num, std::uint32_t seed)
    : random_(seed * 104729 + 3),
      states_(static_cast<std::size_t>(rank_num), State::kMissing),
      changed_(states_.size()) {}

void RankTurns::enter(int rank) {
  std::unique_lock lock(mutex_);
  takes_turns = true;
  states_[at(rank)] = State::kRunning;
  if (std::find(states_.begin(), states_.end(), State::kMissing) == states_.end()) hand_over(rank);
  await_turn(lock, rank);
}

void RankTurns::leave(int rank) {
  const std::lock_guard lock(mutex_);
  takes_turns = false;
  states_[at(rank)] = State::kGone;
  hand_over(rank);
}

void RankTurns::pause(int rank) {
  std::unique_lock lock(mutex_);
  hand_over(rank);
  await_turn(lock, rank);
}

void RankTurns::idle(int rank) {
  std::unique_lock lock(mutex_);
  if (++idle_num_ == 1) standstill_ = std::chrono::steady_clock::now();
  if (idle_num_ > 64 * states_.size()) {
    // Hosts that look a few times and give up have done so. Only a watchdog can end this.
    if (std::chrono::steady_clock::now() - standstill_ > kLongestStandstill) {
      throw std::runtime_error("the ranks wait for each other: nothing runs any more");
    }
    changed_[at(rank)].wait_for(lock, std::chrono::microseconds(200));
  }
  hand_over(rank);
  await_turn(lock, rank);
}

void RankTurns::progressed() {
  const std::lock_guard lock(mutex_);
  idle_num_ = 0;
}

void RankTurns::hand_over(int from) {
  std::vector<int> others;
  for (int rank = 0; rank < static_cast<int>(states_.size()); ++rank) {
    if (rank != from && states_[at(rank)] == State::kRunning) others.push_back(rank);
  }
  turn_ = others.empty() ? from : others[random_() % others.size()];
  changed_[at(turn_)].notify_one();
}

void RankTurns::await_turn(std::unique_lock<std::mutex>& lock, int rank) {
  changed_[at(rank)].wait(lock, [&] { return turn_ == rank; });
}

bool MeetingPoint::meet(int rank, std::uint64_t number, const std::vector<LaneCall>& calls) {
  const std::lock_guard lock(mutex_);
  if (is_aborted_[at(rank)]) return true;
  Meeting& meeting = meetings_[number];
  meeting.calls.resize(rank_num_, nullptr);
  if (meeting.calls[at(rank)] == nullptr) {
    meeting.calls[at(rank)] = &calls;
    for (const LaneCall& call : calls) spoil(call, at(rank));
  }
  const bool has_aborted = std::find(is_aborted_.begin(), is_aborted_.end(), true) != is_aborted_.end();
  if (!meeting.is_done && !has_aborted &&
      std::find(meeting.calls.begin(), meeting.calls.end(), nullptr) == meeting.calls.end() && is_same(meeting)) {
    for (std::size_t index = 0; index < calls.size(); ++index) run(meeting, index);
    meeting.is_done = true;
  }
  if (!meeting.is_done) return false;
  if (++meeting.ended_num == rank_num_) meetings_.erase(number);
  return true;
}

void MeetingPoint::abort(int rank) {
  const std::lock_guard lock(mutex_);
  is_aborted_[at(rank)] = true;
}

void MeetingPoint::post(int rank, std::uint64_t number, std::span<const std::byte> message) {
  std::vector<std::optional<std::vector<std::byte>>>& round = messages_[number];
  round.resize(rank_num_);
  round[at(rank)].emplace(message.begin(), message.end());
}

bool MeetingPoint::is_complete(std::uint64_t number) {
  const auto& round = messages_[number];
  return std::all_of(round.begin(), round.end(), [](const auto& message) { return message.has_value(); });
}

void MeetingPoint::copy_messages(std::uint64_t number, std::span<std::byte> all) {
  auto next = all.begin();
  for (const auto& message : messages_[number]) next = std::copy(message->begin(), message->end(), next);
}

std::size_t MeetingPoint::bytes_of(const LaneCall& call) const {
  switch (call.kind) {
    case Collective::kAllGather:
      return call.num * rank_num_;
    case Collective::kBroadcast:
      return call.num;
    default:
      return call.num * dtype_bytes(call.dtype);
  }
}

void MeetingPoint::spoil(const LaneCall& call, std::size_t rank) const {
  const std::size_t bytes = bytes_of(call);
  switch (call.kind) {
    case Collective::kAllGather:
      for (std::size_t i = 0; i < rank_num_; ++i) {
        if (call.destination + i * call.num != call.source)
          std::memset(call.destination + i * call.num, 0xFF, call.num);
      }
      break;
    case Collective::kBroadcast:
      if (static_cast<int>(rank) != call.root) std::memset(call.destination, 0xFF, bytes);
      break;
    case Collective::kReduceScatter:
      if (call.destination != call.source + rank * bytes) std::memset(call.destination, 0xFF, bytes);
      break;
    default:
      break;
  }
}

bool MeetingPoint::is_same(const Meeting& meeting) {
  const std::vector<LaneCall>& first = *meeting.calls[0];
  return std::all_of(meeting.calls.begin(), meeting.calls.end(), [&](const std::vector<LaneCall>* calls) {
    return std::equal(first.begin(), first.end(), calls->begin(), calls->end(),
                      [](const LaneCall& a, const LaneCall& b) {
                        return a.kind == b.kind && a.num == b.num && a.dtype == b.dtype && a.root == b.root;
                      });
  });
}

void MeetingPoint::run(const Meeting& meeting, std::size_t index) const {
  std::vector<std::vector<std::byte>> results;
  for (std::size_t rank = 0; rank < rank_num_; ++rank) {
    results.push_back(result_of(meeting, index, rank));
  }
  for (std::size_t rank = 0; rank < rank_num_; ++rank) {
    std::copy(results[rank].begin(), results[rank].end(), (*meeting.calls[rank])[index].destination);
  }
}

std::vector<std::byte> MeetingPoint::result_of(const Meeting& meeting, std::size_t index, std::size_t rank) const {
  const LaneCall& call = (*meeting.calls[rank])[index];
  std::vector<std::byte> result;
  const auto source_of = [&](std::size_t peer) { return (*meeting.calls[peer])[index].source; };
  if (call.kind == Collective::kBroadcast) {
    const std::byte* source = source_of(at(call.root));
    return {source, source + call.num};
  }
  if (call.kind == Collective::kAllGather) {
    for (std::size_t peer = 0; peer < rank_num_; ++peer) {
      result.insert(result.end(), source_of(peer), source_of(peer) + call.num);
    }
    return result;
  }
  // In rank order in float, rounded once.
  const std::size_t begin = call.kind == Collective::kReduceScatter ? rank * bytes_of(call) : 0;
  std::vector<float> sums(call.num, 0.0F);
  for (std::size_t peer = 0; peer < rank_num_; ++peer) {
    const auto& kernel = peer == 0 ? cpu_kernels().cast : cpu_kernels().add;
    kernel(sums.data(), DType::kFloat32, source_of(peer) + begin, call.dtype, call.num);
  }
  result.resize(bytes_of(call));
  cpu_kernels().cast(result.data(), call.dtype, sums.data(), DType::kFloat32, call.num);
  return result;
}

MeetingTransport::MeetingTransport(std::shared_ptr<SimDevice> device, std::shared_ptr<MeetingPoint> point, int rank,
                                   int world_size, Lane lane)
    : device_(std::move(device)), point_(std::move(point)), rank_(rank), world_size_(world_size), lane_(lane) {}

std::shared_ptr<std::byte> MeetingTransport::allocate(std::size_t bytes, BufferRole, std::string_view what) {
  return device_->allocate(bytes, what);
}

void MeetingTransport::put_in(std::span<const LaneCall> calls) {
  std::vector<Touched> touched;
  std::string operation;
  for (const LaneCall& call : calls) {
    const auto ranks = static_cast<std::size_t>(world_size_);
    const std::size_t bytes = call.kind == Collective::kReduceScatter || call.kind == Collective::kAllReduce
                                  ? call.num * dtype_bytes(call.dtype)
                                  : call.num;
    const bool spreads = call.kind == Collective::kAllGather;
    const bool collects = call.kind == Collective::kReduceScatter;
    touched.push_back({call.source, collects ? ranks * bytes : bytes, false});
    touched.push_back({call.destination, spreads ? ranks * bytes : bytes, true});
    operation = collective_name(call.kind);
  }
  device_->put_in_polled(
      lane_, operation, touched,
      [point = point_, rank = rank_, number = next_number_++,
       held = std::vector<LaneCall>(calls.begin(), calls.end())] { return point->meet(rank, number, held); });
}

bool MeetingTransport::abort() noexcept {
  point_->abort(rank_);
  return true;
}

MeetingControl::MeetingControl(std::shared_ptr<SimDevice> device, std::shared_ptr<MeetingPoint> point, int rank,
                               int world_size)
    : Communicator(rank, world_size), device_(std::move(device)), point_(std::move(point)) {}

void MeetingControl::exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) {
  start_exchange(mine, all, label)->wait();
}

WorkPtr MeetingControl::start_exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view) {
  point_->cause().check();
  point_->post(rank(), next_number_, mine);
  return std::make_shared<Exchange>(device_, point_, next_number_++, all);
}

void MeetingControl::abort(std::string_view reason) noexcept {
  point_->cause().set("rank " + std::to_string(rank()) + " aborted: " + std::string(reason), rank());
}

MeetingControl::Exchange::Exchange(std::shared_ptr<SimDevice> device, std::shared_ptr<MeetingPoint> point,
                                   std::uint64_t number, std::span<std::byte> all)
    : device_(std::move(device)), point_(std::move(point)), number_(number), all_(all) {}

void MeetingControl::Exchange::wait(Lane) {
  device_->run_until([&] { return point_->cause().is_set() || test(); });
  point_->cause().check();
  point_->copy_messages(number_, all_);
}

std::nullptr_t MeetingControl::refuse() { throw StateError("a control communicator only exchanges messages"); }

SimSchedule sim_schedule(std::uint32_t number) { return {number, static_cast<SimPolicy>(number % kSimPolicyNum)}; }

SimCollectives sim_collectives(std::uint32_t number) {
  return (number + number / kSimPolicyNum) % 2 == 0 ? SimCollectives::kMet : SimCollectives::kPulled;
}

SimWorld::SimWorld(int rank_num, const SimSchedule& schedule, SimCollectives collectives)
    : rank_num_(rank_num),
      schedule_(schedule),
      collectives_(collectives),
      turns_(rank_num, schedule.seed),
      gather_point_(std::make_shared<MeetingPoint>(rank_num)),
      reduce_point_(std::make_shared<MeetingPoint>(rank_num)),
      gather_peers_(std::make_shared<PeerWorld>(rank_num)),
      reduce_peers_(std::make_shared<PeerWorld>(rank_num)) {}

std::size_t SimWorld::push_gradient_bytes() const {
  constexpr std::array<std::size_t, 3> kBytes{64, 0, SIZE_MAX};
  return kBytes[schedule_.seed % kBytes.size()];
}

std::size_t SimWorld::splice_bytes() const {
  constexpr std::array<std::size_t, 4> kBytes{0, 64, 0, SIZE_MAX};
  return kBytes[schedule_.seed / 3 % kBytes.size()];
}

std::string SimWorld::text() const {
  return "lane schedule " + std::to_string(schedule_.seed) + ", policy " +
         std::to_string(static_cast<int>(schedule_.policy)) +
         (collectives_ == SimCollectives::kPulled ? ", pulled" : "");
}

std::shared_ptr<SimDevice> SimWorld::make_device(int rank, std::function<void(const std::string&)> report) {
  const SimSchedule of_rank{schedule_.seed * 64 + static_cast<std::uint32_t>(rank), schedule_.policy};
  const auto peers = std::make_shared<RankPeers>(turns_, rank);
  return report ? std::make_shared<SimDevice>(of_rank, peers, std::move(report))
                : std::make_shared<SimDevice>(of_rank, peers);
}

std::unique_ptr<Communicator> SimWorld::make_communicator(const std::shared_ptr<SimDevice>& device, int rank, Lane lane,
                                                          std::chrono::milliseconds timeout) {
  LaneOptions options;
  options.kind = "simulated";
  options.lane = lane;
  options.timeout = timeout;
  options.device = device;
  if (rank_num_ == 1) {
    options.transport = std::make_unique<SoloTransport>(device, lane);
    options.control = make_solo_communicator();
  } else {
    const auto& point = lane == Lane::kGather ? gather_point_ : reduce_point_;
    if (collectives_ == SimCollectives::kPulled) {
      // So small that most reductions take it several times.
      constexpr std::size_t kScratchBytes = 2048;
      const auto& peers = lane == Lane::kGather ? gather_peers_ : reduce_peers_;
      options.overhead = std::make_shared<MemoryOverhead>();
      auto link = std::make_unique<SimPeerLink>(device, peers, rank, rank_num_, lane, options.overhead);
      options.transport = std::make_unique<WatchedPeerTransport>(device, lane, std::move(link), kScratchBytes);
    } else {
      options.transport = std::make_unique<MeetingTransport>(device, point, rank, rank_num_, lane);
    }
    options.control = std::make_unique<MeetingControl>(device, point, rank, rank_num_);
  }
  return make_lane_communicator(std::move(options));
}

}  // namespace zb::test
