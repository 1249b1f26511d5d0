// A device in host memory whose lanes run late and in a bad order, for finding work that nothing orders.
//
// Work lies in its lane until the host blocks or chance runs it, and then only in the order that lanes and marks ask
// for. Which lane runs next is decided by a policy and a seed. A RaceDetector checks the order of all that is put in.
// All calls come from one thread, but has_passed.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cpu_kernels.h"
#include "optim/device_adam.h"
#include "sim/sim_races.h"
#include "sim/sim_range_log.h"

namespace zb::test {

// Which lanes run at once, as far as they can. The others run when the host blocks and nothing else is left to do.
enum class SimPolicy : std::uint8_t {
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
inline constexpr std::size_t kSimPolicyNum = 10;

struct SimSchedule {
  std::uint32_t seed = 0;
  SimPolicy policy = SimPolicy::kRandom;
};

// The peers of a rank, which run while it waits.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual void pause() {}  // now and then
  // Nothing of this rank can run. Throws when that lasts too long.
  virtual void idle();
  virtual void progressed() {}
};

class SimDevice final : public Device, public HostRegistrar, public std::enable_shared_from_this<SimDevice> {
 public:
  // Polled until it is true, which ends the work.
  using Work = std::function<bool()>;

  explicit SimDevice(
      const SimSchedule& schedule, std::shared_ptr<Peers> peers = std::make_shared<Peers>(),
      std::function<void(const std::string&)> report = [](const std::string& text) { ADD_FAILURE() << text; });

  // Work that touches this memory.
  void put_in(Lane lane, std::string_view operation, const std::vector<Touched>& touched, std::function<void()> work);
  void put_in_polled(Lane lane, std::string_view operation, const std::vector<Touched>& touched, Work work);
  Clock clock_of(Lane lane) const { return clocks_[index_of(lane)]; }
  // Whether the lane stands behind anything that was put into `other` since the last range of this name was pushed.
  bool is_behind(Lane lane, Lane other, const std::string& range) const;
  // As if it had been put into the lane when its clock was this.
  void touch_at(Lane lane, const Clock& clock, std::string_view operation, const std::vector<Touched>& touched);
  // Memory as torch's allocator gives it for the compute lane: when its owner lets go, later work there gets it.
  std::shared_ptr<std::byte> allocate_in_compute(std::size_t bytes, const std::string& what);

  // The host touches this memory now; what lanes did with it must have passed for the host.
  void touch_on_host(std::string_view operation, const Touched& touched);

  // Blocks of it that have owners.
  std::size_t block_num(const std::string& what) { return block_num_[what]; }

  // Runs lanes, and lets the peers run, until it is true.
  void run_until(const std::function<bool()>& is_reached);
  void pause() { peers_->pause(); }

  bool is_async() const noexcept override { return true; }
  void* stream(Lane) const noexcept override { return nullptr; }

  MarkPtr mark(Lane lane) override;
  void wait(Lane lane, const MarkPtr& mark) override;
  bool has_passed(const MarkPtr& mark) override;
  void synchronize(const MarkPtr& mark) override;
  void synchronize() override;

  // From now on nothing more can be allocated, or again.
  void set_full(bool is_full) { is_full_ = is_full; }
  // From now on whoever waits for the lanes gets an error, or no more.
  void set_failed(bool has_failed) { has_failed_ = has_failed; }

  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string_view what) override;
  // `memory` stays with its bytes when the owner lets go, as what peers have mapped does.
  std::shared_ptr<std::byte> adopt_mapped(std::size_t bytes, std::string_view what,
                                          const std::shared_ptr<std::byte>& memory);
  // Memory of a peer that this device reads and writes like its own.
  void map(const std::byte* of_peer, std::size_t bytes, std::string_view what) { races_.mapped(of_peer, bytes, what); }
  void unmap(const std::byte* of_peer) { races_.forget(of_peer); }
  RaceDetector& races() { return races_; }
  std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes) override { return allocate(bytes, "pinned memory"); }
  HostRegistrar* host_registrar() noexcept override { return this; }
  void register_host(std::byte* data, std::size_t bytes) override;
  void unregister_host(std::byte* data) noexcept override { races_.freed(data, clocks_[kHost]); }

  void cast(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
            std::size_t numel) override;
  void add(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
           std::size_t numel) override;
  void sum(Lane lane, void* destination, std::span<const void* const> sources, DType dtype, std::size_t numel) override;
  // The items run in any order.
  void pack(Lane lane, std::span<const PackItem> items) override;
  void zero(Lane lane, void* destination, std::size_t bytes) override;
  void copy(Lane lane, void* destination, const void* source, std::size_t bytes) override;
  void copy_to_pinned(Lane lane, std::byte* host, const void* source, std::size_t bytes) override;
  void copy_from_pinned(Lane lane, void* destination, const std::byte* host, std::size_t bytes) override;
  void sums_of_squares(Lane lane, DType dtype, std::span<const SquareSum> sums) override;
  void combine_norm(Lane lane, const NormArguments& arguments) override;

  void download(void* host, const void* source, std::size_t bytes) override;
  void upload(void* destination, const void* host, std::size_t bytes) override;

  void push_range(const char* name) override;
  void pop_range() noexcept override { ranges_.pop(); }
  RangeId start_range(const char* name) override { return ranges_.start(name); }
  void end_range(RangeId id) noexcept override { ranges_.end(id); }
  RangeLog& ranges() { return ranges_; }

  static Touched read(const void* data, DType dtype, std::size_t numel);
  static Touched written(const void* data, DType dtype, std::size_t numel);

 private:
  struct SimMark final : Mark {
    explicit SimMark(const Clock& at) : clock(at) {}
    Clock clock;
    mutable std::atomic<bool> is_passed{false};
  };
  struct Item {
    std::string operation;
    Work work;
  };
  static std::size_t index_of(Lane lane) { return static_cast<std::size_t>(lane); }

  static std::shared_ptr<std::byte> make_memory(std::size_t bytes);

  // These two are called where an owner lets go, so nothing runs in them.
  void free(const std::shared_ptr<std::byte>& memory, std::size_t bytes);
  void reuse_in_compute(const std::shared_ptr<std::byte>& memory, std::size_t bytes, const std::string& what);

  void host_touches(std::string_view operation, const Touched& touched);

  void expect_sound() const;

  void idle();

  bool runs_at_once(std::size_t lane) const;

  void run_some();

  // Runs what stands first in one lane, some lane that can go on. `eager`: of those that run at once.
  bool step(bool eager);

  const CpuKernels& kernels_ = cpu_kernels();
  std::thread::id owner_ = std::this_thread::get_id();
  bool is_full_ = false;
  bool has_failed_ = false;
  SimSchedule schedule_;
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

// The CPU's Adam in a lane of a SimDevice.
class SimAdam final : public DeviceAdam {
 public:
  explicit SimAdam(std::shared_ptr<SimDevice> device) : device_(std::move(device)) {}

  void update(Lane lane, std::span<const AdamRun> runs, const StepScalars* step) override;

  void read_masters(Lane lane, const AdamSpan& span, float* destination) override;
  void write_masters(Lane lane, const AdamSpan& span, const float* source) override;
  void copy_magnitudes(Lane lane, float* destination, const float* source, const float* signs,
                       std::size_t numel) override;

 private:
  static Touched remainders(const AdamSpan& span, bool is_written);

  std::shared_ptr<SimDevice> device_;
  std::shared_ptr<DeviceAdam> adam_ = make_cpu_adam(1, {});
};

}  // namespace zb::test
