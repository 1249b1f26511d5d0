// A device in host memory whose lanes run late and in a bad order, for finding work that nothing orders.
//
// Work lies in its lane until the host blocks or chance runs it, and then only in the order that lanes and marks ask
// for. Which lane runs next is decided by a policy and a seed. A RaceDetector checks the order of all that is put in.
// All calls come from one thread, but has_passed.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/error.h"
#include "kernels/cpu_kernels.h"
#include "kernels/norm.h"
#include "lane_races.h"
#include "optim/device_adam.h"
#include "range_log.h"

namespace zb::test {

// Which lanes run at once, as far as they can. The others run when the host blocks and nothing else is left to do.
enum class LanePolicy : std::uint8_t {
  kRandom,  // now and then any lane runs
  kNone,
  kAllButCompute,
  kAllButGather,
  kAllButReduce,
  kCompute,
  kGather,
  kReduce,
  kToHost,
  kFromHost,
};
inline constexpr std::size_t kLanePolicyNum = 10;

struct LaneSchedule {
  std::uint32_t seed = 0;
  LanePolicy policy = LanePolicy::kRandom;
};

// The peers of a rank, which run while it waits.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual void pause() {}  // now and then
  // Nothing of this rank can run. Throws when that lasts too long.
  virtual void idle() { throw std::logic_error("the host waits for work that can never run"); }
  virtual void progressed() {}
};

class LaneDevice final : public Device, public HostRegistrar, public std::enable_shared_from_this<LaneDevice> {
 public:
  // Polled until it is true, which ends the work.
  using Work = std::function<bool()>;

  explicit LaneDevice(
      const LaneSchedule& schedule, std::shared_ptr<Peers> peers = std::make_shared<Peers>(),
      std::function<void(const std::string&)> report = [](const std::string& text) { ADD_FAILURE() << text; })
      : schedule_(schedule),
        random_(schedule.seed * 7919 + 1),
        peers_(std::move(peers)),
        races_(report),
        ranges_(std::move(report)) {}

  // Work that touches this memory.
  void put_in(Lane lane, std::string_view operation, const std::vector<Touched>& touched, std::function<void()> work) {
    put_in_polled(lane, operation, touched, [work = std::move(work)] {
      work();
      return true;
    });
  }
  void put_in_polled(Lane lane, std::string_view operation, const std::vector<Touched>& touched, Work work) {
    const std::size_t actor = index_of(lane);
    join(clocks_[actor], clocks_[kHost]);
    ++clocks_[actor][actor];
    for (const Touched& memory : touched) races_.touch(actor, clocks_[actor], operation, memory);
    lanes_[actor].push_back({std::string(operation), std::move(work)});
    run_some();
  }
  Clock clock_of(Lane lane) const { return clocks_[index_of(lane)]; }
  // Whether the lane stands behind anything that was put into `other` since the last range of this name was pushed.
  bool is_behind(Lane lane, Lane other, const std::string& range) const {
    return clock_of(lane)[index_of(other)] > at_ranges_.at(range)[index_of(other)][index_of(other)];
  }
  // As if it had been put into the lane when its clock was this.
  void touch_at(Lane lane, const Clock& clock, std::string_view operation, const std::vector<Touched>& touched) {
    for (const Touched& memory : touched) races_.touch(index_of(lane), clock, operation, memory);
  }
  // Memory as torch's allocator gives it for the compute lane: when its owner lets go, later work there gets it.
  std::shared_ptr<std::byte> allocate_in_compute(std::size_t bytes, const std::string& what) {
    auto memory = make_memory(bytes);
    ++block_num_[what];
    races_.allocated(memory.get(), bytes, what);
    put_in(Lane::kCompute, "whatever had the memory before", {{memory.get(), bytes, true}},
           [memory, bytes] { std::memset(memory.get(), 0xFF, bytes); });
    std::byte* const data = memory.get();
    return {data, [device = weak_from_this(), memory = std::move(memory), bytes, what](std::byte*) {
              if (const auto alive = device.lock()) alive->reuse_in_compute(memory, bytes, what);
            }};
  }

  // The host touches this memory now; what lanes did with it must have passed for the host.
  void touch_on_host(std::string_view operation, const Touched& touched) {
    ++clocks_[kHost][kHost];
    races_.touch(kHost, clocks_[kHost], operation, touched);
  }

  // Blocks of it that have owners.
  std::size_t block_num(const std::string& what) { return block_num_[what]; }

  // Runs lanes, and lets the peers run, until it is true.
  void run_until(const std::function<bool()>& is_reached) {
    while (!is_reached()) {
      if (!step(true) && !step(false)) idle();
      if (random_() % 8 == 0) peers_->pause();
    }
  }
  void pause() { peers_->pause(); }

  bool is_async() const noexcept override { return true; }
  void* stream(Lane) const noexcept override { return nullptr; }

  MarkPtr mark(Lane lane) override {
    const std::size_t actor = index_of(lane);
    join(clocks_[actor], clocks_[kHost]);
    auto mark = std::make_shared<LaneMark>(clocks_[actor]);
    lanes_[actor].push_back({"a mark", [mark] {
                               mark->is_passed = true;
                               return true;
                             }});
    return mark;
  }
  void wait(Lane lane, const MarkPtr& mark) override {
    if (mark == nullptr) return;
    const auto waited = std::static_pointer_cast<const LaneMark>(mark);
    join(clocks_[index_of(lane)], waited->clock);
    lanes_[index_of(lane)].push_back({"a wait", [waited] { return waited->is_passed.load(); }});
  }
  bool has_passed(const MarkPtr& mark) override {
    if (mark == nullptr) return true;
    const auto& asked = static_cast<const LaneMark&>(*mark);
    if (std::this_thread::get_id() != owner_) return asked.is_passed;
    // Whoever asks again and again is to get an answer in the end.
    if (!asked.is_passed && !step(true) && !step(false)) idle();
    if (asked.is_passed) join(clocks_[kHost], asked.clock);
    return asked.is_passed;
  }
  void synchronize(const MarkPtr& mark) override {
    if (mark == nullptr) return;
    expect_sound();
    run_until([&] { return static_cast<const LaneMark&>(*mark).is_passed.load(); });
    join(clocks_[kHost], static_cast<const LaneMark&>(*mark).clock);
  }
  void synchronize() override {
    expect_sound();
    run_until([&] { return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane.empty(); }); });
    for (std::size_t lane = 0; lane < kLaneNum; ++lane) join(clocks_[kHost], clocks_[lane]);
    freed_.clear();
  }

  // From now on nothing more can be allocated, or again.
  void set_full(bool is_full) { is_full_ = is_full; }
  // From now on whoever waits for the lanes gets an error, or no more.
  void set_failed(bool has_failed) { has_failed_ = has_failed; }

  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string_view what) override {
    if (is_full_) throw OutOfMemoryError("no memory is left for " + std::string(what));
    std::shared_ptr<std::byte> memory = make_memory(bytes);
    races_.allocated(memory.get(), bytes, what);
    std::byte* const data = memory.get();
    return {data, [device = weak_from_this(), held = std::move(memory), bytes](std::byte*) {
              if (const auto alive = device.lock()) alive->free(held, bytes);
            }};
  }
  // `memory` stays with its bytes when the owner lets go, as what peers have mapped does.
  std::shared_ptr<std::byte> adopt_mapped(std::size_t bytes, std::string_view what,
                                          const std::shared_ptr<std::byte>& memory) {
    races_.allocated(memory.get(), bytes, what);
    return {memory.get(), [device = weak_from_this(), memory](std::byte*) {
              if (const auto alive = device.lock()) alive->races_.freed(memory.get(), alive->clocks_[kHost]);
            }};
  }
  // Memory of a peer that this device reads and writes like its own.
  void map(const std::byte* of_peer, std::size_t bytes, std::string_view what) { races_.mapped(of_peer, bytes, what); }
  void unmap(const std::byte* of_peer) { races_.forget(of_peer); }
  RaceDetector& races() { return races_; }
  std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes) override { return allocate(bytes, "pinned memory"); }
  HostRegistrar* host_registrar() noexcept override { return this; }
  void register_host(std::byte* data, std::size_t bytes) override {
    races_.allocated(data, bytes, "registered memory");
  }
  void unregister_host(std::byte* data) noexcept override { races_.freed(data, clocks_[kHost]); }

  void cast(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
            std::size_t numel) override {
    put_in(lane, "cast", {written(destination, destination_dtype, numel), read(source, source_dtype, numel)},
           [=, this] { kernels_.cast(destination, destination_dtype, source, source_dtype, numel); });
  }
  void add(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
           std::size_t numel) override {
    put_in(lane, "add", {written(destination, destination_dtype, numel), read(source, source_dtype, numel)},
           [=, this] { kernels_.add(destination, destination_dtype, source, source_dtype, numel); });
  }
  void sum(Lane lane, void* destination, std::span<const void* const> sources, DType dtype,
           std::size_t numel) override {
    std::vector<Touched> touched{written(destination, dtype, numel)};
    for (const void* source : sources) touched.push_back(read(source, dtype, numel));
    put_in(lane, "sum", touched, [=, this, held = std::vector<const void*>(sources.begin(), sources.end())] {
      kernels_.reduce(destination, held.data(), held.size(), dtype, numel);
    });
  }
  // The items run in any order.
  void pack(Lane lane, std::span<const PackItem> items) override {
    std::vector<PackItem> shuffled(items.begin(), items.end());
    std::shuffle(shuffled.begin(), shuffled.end(), random_);
    std::vector<Touched> touched;
    for (const PackItem& item : items) {
      touched.push_back(written(item.destination, item.destination_dtype, item.numel));
      if (item.source != nullptr) touched.push_back(read(item.source, item.source_dtype, item.numel));
    }
    put_in(lane, "pack", touched, [this, held = std::move(shuffled)] {
      for (const PackItem& item : held) {
        if (item.source == nullptr) {
          std::memset(item.destination, 0, item.bytes());
        } else {
          (item.accumulate ? kernels_.add : kernels_.cast)(item.destination, item.destination_dtype, item.source,
                                                           item.source_dtype, item.numel);
        }
      }
    });
  }
  void zero(Lane lane, void* destination, std::size_t bytes) override {
    put_in(lane, "zero", {{destination, bytes, true}}, [=] {
      if (bytes != 0) std::memset(destination, 0, bytes);
    });
  }
  void copy(Lane lane, void* destination, const void* source, std::size_t bytes) override {
    put_in(lane, "copy", {{destination, bytes, true}, {source, bytes, false}},
           [=, this] { kernels_.copy(destination, source, bytes); });
  }
  void copy_to_pinned(Lane lane, std::byte* host, const void* source, std::size_t bytes) override {
    put_in(lane, "copy_to_pinned", {{host, bytes, true}, {source, bytes, false}},
           [=] { std::memcpy(host, source, bytes); });
  }
  void copy_from_pinned(Lane lane, void* destination, const std::byte* host, std::size_t bytes) override {
    put_in(lane, "copy_from_pinned", {{destination, bytes, true}, {host, bytes, false}}, [=] {
      if (bytes != 0) std::memcpy(destination, host, bytes);
    });
  }
  void sums_of_squares(Lane lane, DType dtype, std::span<const SquareSum> sums) override {
    for (const SquareSum& sum : sums) {
      std::vector<Touched> touched{{sum.result, sizeof(double), true}};
      for (const FlatPiece& piece : sum.pieces) touched.push_back(read(piece.data, dtype, piece.numel));
      put_in(lane, "sums_of_squares", touched,
             [=, this, result = sum.result, pieces = std::vector<FlatPiece>(sum.pieces.begin(), sum.pieces.end())] {
               *result = 0.0;
               for (const FlatPiece& piece : pieces) {
                 *result += kernels_.sum_of_squares(piece.data, dtype, piece.numel);
               }
             });
    }
  }
  void combine_norm(Lane lane, const NormArguments& arguments) override {
    const std::size_t flat_bytes = arguments.flat_num * sizeof(double);
    put_in(lane, "combine_norm",
           {{arguments.partial_sums, arguments.rank_num * flat_bytes, false},
            {arguments.flat_sums, flat_bytes, true},
            {arguments.scalars, sizeof(StepScalars), true}},
           [=] { combine_partial_sums(arguments); });
  }

  void download(void* host, const void* source, std::size_t bytes) override {
    host_touches("download", {source, bytes, false});
    if (bytes != 0) std::memcpy(host, source, bytes);
  }
  void upload(void* destination, const void* host, std::size_t bytes) override {
    host_touches("upload", {destination, bytes, true});
    if (bytes != 0) std::memcpy(destination, host, bytes);
  }

  void push_range(const char* name) override {
    at_ranges_[name] = clocks_;
    ranges_.push(name);
  }
  void pop_range() noexcept override { ranges_.pop(); }
  RangeId start_range(const char* name) override { return ranges_.start(name); }
  void end_range(RangeId id) noexcept override { ranges_.end(id); }
  RangeLog& ranges() { return ranges_; }

  static Touched read(const void* data, DType dtype, std::size_t numel) {
    return {data, numel * dtype_bytes(dtype), false};
  }
  static Touched written(const void* data, DType dtype, std::size_t numel) {
    return {data, numel * dtype_bytes(dtype), true};
  }

 private:
  struct LaneMark final : Mark {
    explicit LaneMark(const Clock& at) : clock(at) {}
    Clock clock;
    mutable std::atomic<bool> is_passed{false};
  };
  struct Item {
    std::string operation;
    Work work;
  };
  static std::size_t index_of(Lane lane) { return static_cast<std::size_t>(lane); }

  static std::shared_ptr<std::byte> make_memory(std::size_t bytes) {
    constexpr std::size_t kAlignment = 256;
    const std::size_t rounded = (bytes + kAlignment) / kAlignment * kAlignment;  // never 0
    auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
    std::memset(data, 0, rounded);
    return {data, [](std::byte* held) { std::free(held); }};
  }

  // These two are called where an owner lets go, so nothing runs in them.
  void free(const std::shared_ptr<std::byte>& memory, std::size_t bytes) {
    races_.freed(memory.get(), clocks_[kHost]);
    std::memset(memory.get(), 0xFF, bytes);
    freed_.push_back(memory);  // what is put in may still touch it, if the caller is wrong
  }
  void reuse_in_compute(const std::shared_ptr<std::byte>& memory, std::size_t bytes, const std::string& what) {
    --block_num_[what];
    const std::size_t actor = index_of(Lane::kCompute);
    join(clocks_[actor], clocks_[kHost]);
    ++clocks_[actor][actor];
    races_.touch(actor, clocks_[actor], "whatever gets freed memory next", {memory.get(), bytes, true});
    races_.forget(memory.get());
    freed_.push_back(memory);
    lanes_[actor].push_back({"reuse", [memory, bytes] {
                               std::memset(memory.get(), 0xFF, bytes);
                               return true;
                             }});
  }

  void host_touches(std::string_view operation, const Touched& touched) {
    synchronize();
    touch_on_host(operation, touched);
  }

  void expect_sound() const {
    if (has_failed_) throw CudaError("the device has failed", 1);
  }

  void idle() {
    try {
      peers_->idle();
    } catch (const std::exception& error) {
      std::string text = error.what();
      for (const std::deque<Item>& lane : lanes_) text += lane.empty() ? ", -" : ", " + lane.front().operation;
      throw std::logic_error(text);
    }
  }

  bool runs_at_once(std::size_t lane) const {
    constexpr std::array<unsigned, kLanePolicyNum> kLanes{0b00000, 0b00000, 0b11110, 0b11101, 0b11011,
                                                          0b00001, 0b00010, 0b00100, 0b01000, 0b10000};
    return (kLanes[static_cast<std::size_t>(schedule_.policy)] >> lane & 1U) != 0;
  }

  void run_some() {
    if (schedule_.policy == LanePolicy::kRandom) {
      while (random_() % 2 == 0 && step(false)) {
      }
    }
    while (step(true)) {
    }
    if (random_() % 16 == 0) peers_->pause();
  }

  // Runs what stands first in one lane, some lane that can go on. `eager`: of those that run at once.
  bool step(bool eager) {
    std::array<std::size_t, kLaneNum> order;
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    for (const std::size_t lane : order) {
      if (lanes_[lane].empty() || (eager && !runs_at_once(lane)) || !lanes_[lane].front().work()) continue;
      lanes_[lane].pop_front();
      peers_->progressed();
      return true;
    }
    return false;
  }

  const CpuKernels& kernels_ = cpu_kernels();
  std::thread::id owner_ = std::this_thread::get_id();
  bool is_full_ = false;
  bool has_failed_ = false;
  LaneSchedule schedule_;
  std::mt19937 random_;
  std::shared_ptr<Peers> peers_;
  RaceDetector races_;
  RangeLog ranges_;
  std::map<std::string, std::array<Clock, kActorNum>> at_ranges_;
  std::array<Clock, kActorNum> clocks_{};
  std::map<std::string, std::size_t> block_num_;
  std::array<std::deque<Item>, kLaneNum> lanes_;
  std::vector<std::shared_ptr<std::byte>> freed_;  // until the lanes are empty
};

// The CPU's Adam in a lane of a LaneDevice.
class LaneAdam final : public DeviceAdam {
 public:
  explicit LaneAdam(std::shared_ptr<LaneDevice> device) : device_(std::move(device)) {}

  void update(Lane lane, std::span<const AdamRun> runs, const StepScalars* step) override {
    std::vector<Touched> touched{{step, sizeof(StepScalars), false}};
    for (const AdamRun& run : runs) {
      const AdamSpan& span = run.span;
      touched.push_back(LaneDevice::read(span.gradient, span.gradient_dtype, span.numel));
      if (span.remainder != nullptr) touched.push_back(remainders(span, true));
      for (const float* state : {span.master, span.exp_avg, span.exp_avg_sq}) {
        if (state != nullptr) touched.push_back(LaneDevice::written(state, DType::kFloat32, span.numel));
      }
      if (span.low_precision != nullptr) {
        touched.push_back(LaneDevice::written(span.low_precision, span.low_precision_dtype, span.numel));
      }
    }
    device_->put_in(lane, "adam", touched,
                    [adam = adam_, held = std::vector<AdamRun>(runs.begin(), runs.end()), lane, step] {
                      adam->update(lane, held, step);
                    });
  }

  void read_masters(Lane lane, const AdamSpan& span, float* destination) override {
    device_->put_in(lane, "masters read",
                    {remainders(span, false), LaneDevice::read(span.low_precision, DType::kBFloat16, span.numel),
                     LaneDevice::read(span.exp_avg_sq, DType::kFloat32, span.numel),
                     LaneDevice::written(destination, DType::kFloat32, span.numel)},
                    [adam = adam_, lane, span, destination] { adam->read_masters(lane, span, destination); });
  }
  void write_masters(Lane lane, const AdamSpan& span, const float* source) override {
    device_->put_in(lane, "masters written",
                    {remainders(span, true), LaneDevice::read(span.low_precision, DType::kBFloat16, span.numel),
                     LaneDevice::written(span.exp_avg_sq, DType::kFloat32, span.numel),
                     LaneDevice::read(source, DType::kFloat32, span.numel)},
                    [adam = adam_, lane, span, source] { adam->write_masters(lane, span, source); });
  }
  void copy_magnitudes(Lane lane, float* destination, const float* source, const float* signs,
                       std::size_t numel) override {
    std::vector<Touched> touched{LaneDevice::written(destination, DType::kFloat32, numel),
                                 LaneDevice::read(source, DType::kFloat32, numel)};
    if (signs != nullptr) touched.push_back(LaneDevice::read(signs, DType::kFloat32, numel));
    device_->put_in(lane, "magnitudes", touched, [adam = adam_, lane, destination, source, signs, numel] {
      adam->copy_magnitudes(lane, destination, source, signs, numel);
    });
  }

 private:
  static Touched remainders(const AdamSpan& span, bool is_written) {
    return is_written ? LaneDevice::written(span.remainder, DType::kBFloat16, span.numel)
                      : LaneDevice::read(span.remainder, DType::kBFloat16, span.numel);
  }

  std::shared_ptr<LaneDevice> device_;
  std::shared_ptr<DeviceAdam> adam_ = make_cpu_adam(1, {});
};

}  // namespace zb::test
