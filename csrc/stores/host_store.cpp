#include "stores/host_store.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "common/error.h"
#include "common/scope_exit.h"
#include "kernels/cpu_kernels.h"
#include "kernels/drain.h"
#include "memory/host_limits.h"
#include "stores/home_parameters.h"
#include "stores/host_link.h"
#include "stores/host_store_memory.h"

namespace zb {
namespace {

constexpr std::string_view kThread = "update thread";
constexpr const char* kStateAndGradients = "optimizer state and gradients on the host";

struct HostShard {
  ShardSpec spec;
  PinnedBlock gradient;
  std::vector<MarkPtr> arrived;  // by chunk: behind which its gradient is in `gradient`
  bool is_offered = false;
  std::size_t turn = 0;                // of its last update
  UpdateThread::Ticket ticket = 0;     // of the last work on it
  MarkPtr sent;                        // behind which the device has what that work sent
  std::array<bool, kLaneNum> knows{};  // lanes that stand behind it
};

// An update as the thread needs it.
struct Update {
  HostShard* shard;
  std::size_t index;
  std::byte* parameters;  // on the device; null where the host is their home
  DType gradient_dtype;
  std::vector<AdamScalars> rows;
  std::optional<std::vector<Segment>> segments;  // none: the shard's own
  const StepScalars* step;
  MarkPtr step_arrived;
  MarkPtr started;  // behind which the parameters on the device may be overwritten
  HomeParameters::Fetches fetches;
};

struct Outgoing {
  PinnedBlock memory;
  MarkPtr sent;
};

std::byte* at_element(void* base, DType dtype, std::size_t index) {
  return static_cast<std::byte*>(base) + index * dtype_bytes(dtype);
}

class HostStore final : public Store {
 public:
  HostStore(Ledger* ledger, const DeviceParts& parts, HostStoreOptions options)
      : ledger_(ledger),
        device_(parts.device),
        link_(parts.device),
        options_(std::move(options)),
        adam_(options_.adam ? options_.adam : make_cpu_adam(options_.thread_num, options_.cpus)) {
    ZB_EXPECT(chunk_numel_of(options_) > 0 && chunk_numel_of(options_) % 64 == 0,
              "chunk_numel must be a positive multiple of 64, got " + std::to_string(chunk_numel_of(options_)));
    ZB_EXPECT(options_.parameters != ParameterHome::kFiles || options_.paged,
              "parameters on NVMe need the optimizer state on NVMe, too");
    thread_ = std::make_unique<UpdateThread>(options_.updates_run);
  }
  ~HostStore() override {
    thread_.reset();
    const Drain drain(*device_);  // copies under way read and write this memory
  }

  Tier tier() const noexcept override { return options_.paged ? Tier::kNvme : Tier::kHost; }
  bool issues_at_once() const noexcept override { return false; }
  bool keeps_master(DType) const noexcept override { return true; }
  bool keeps_frozen() const noexcept override { return options_.parameters != ParameterHome::kDevice; }
  std::exception_ptr failure() const override {
    const std::exception_ptr fetch_failure = home_ ? home_->failure() : nullptr;
    return fetch_failure ? fetch_failure : thread_->failure();
  }

  void reserve(std::span<const ShardSpec> shards) override {
    reserved_.assign(shards.begin(), shards.end());
    spend_host_memory(reserved_, options_);
    const std::size_t ranks = options_.ranks_on_host;
    require_host_memory(ranks * host_store_bytes(reserved_, options_),
                        ranks == 1 ? kStateAndGradients
                                   : std::string(kStateAndGradients) + ", of " + std::to_string(ranks) + " ranks,");
  }

  std::size_t add_shard(const ShardSpec& spec, std::span<const float> initial) override {
    check_segments(spec);
    ZB_EXPECT(initial.size() == spec.numel, "a shard of " + std::to_string(spec.numel) +
                                                " elements needs as many initial values, got " +
                                                std::to_string(initial.size()));
    ZB_EXPECT(!spec.is_frozen || keeps_frozen(), "this store cannot keep frozen parameters");
    ZB_EXPECT_STATE(shards_.size() < reserved_.size(),
                    "all shards that were reserved in this host store have been added already");
    if (!pool_) take_memory();
    auto shard = std::make_unique<HostShard>();
    shard->spec = spec;
    shard->gradient = pool_->allocate(state_numel(spec) * dtype_bytes(spec.gradient_dtype), Category::kGradients,
                                      PinnedPool::kLineAlignment);
    if (home_) home_->add_shard(spec);
    shard->arrived.resize((state_numel(spec) + chunk_numel() - 1) / chunk_numel());
    states_->add_shard(state_numel(spec));
    shards_.push_back(std::move(shard));
    write_state(shards_.size() - 1, StateKind::kMaster, initial);
    return shards_.size() - 1;
  }

  StoreTraffic traffic() override {
    for (const auto& shard : shards_) thread_->wait(shard->ticket);
    if (paged_ != nullptr) paged_->flush();
    if (home_) home_->flush();
    return link_.traffic();
  }
  double waited_ms() const override { return waited_ms_ + fetch_waited_ms(); }
  double waited_for_files_ms() const override { return waited_for_files_ms_ + fetch_waited_ms(); }
  PinnedStats pinned() const override { return pool_ ? pool_->stats() : PinnedStats(); }
  std::size_t chunk_numel() const override { return chunk_numel_of(options_); }
  void set_timeline(Timeline* timeline) override {
    timeline_ = timeline;
    if (home_) home_->set_timeline(timeline);
  }

  void offer_gradient(std::size_t index, const ShardGradient& gradient) override {
    HostShard& shard = at(index);
    device_->wait(Lane::kToHost, gradient.ready);
    fetch_gradient(shard, gradient.data, gradient.dtype);
    shard.is_offered = true;
  }
  void drop_gradients(Lane lane) override {
    for (const auto& shard : shards_) shard->is_offered = false;
    device_->wait(lane, device_->mark(Lane::kToHost));
  }

  void start_update(std::size_t index, const ShardUpdate& update) override {
    HostShard& shard = at(index);
    if (shard.spec.numel == 0) return;
    ZB_EXPECT(update.gradient != nullptr && update.step_on_host != nullptr,
              "an update of shard " + std::to_string(index) + " needs its gradient and the step's scalars on the host");
    ZB_EXPECT(
        (update.parameters == nullptr) == (home_ != nullptr),
        "an update of shard " + std::to_string(index) +
            (home_ ? " was given parameters that the store keeps itself" : " needs its parameters on the device"));
    check_rows(index, segments_of(update, shard.spec.segments), update.rows.size());
    const MarkPtr started = device_->mark(update.lane);
    if (home_) home_->begin_update(index);
    if (!std::exchange(shard.is_offered, false)) {
      device_->wait(Lane::kToHost, started);
      fetch_gradient(shard, update.gradient, update.gradient_dtype);
    }
    shard.turn = update.turn;
    queue(shard,
          [this, task = Update{.shard = &shard,
                               .index = index,
                               .parameters = static_cast<std::byte*>(update.parameters),
                               .gradient_dtype = update.gradient_dtype,
                               .rows = {update.rows.begin(), update.rows.end()},
                               .segments = update.segments == nullptr ? std::nullopt : std::optional(*update.segments),
                               .step = update.step_on_host,
                               .step_arrived = update.step_arrived,
                               .started = started,
                               .fetches = take_fetches(index)}] { run(task); });
  }
  bool is_issued(std::size_t index) const override {
    return thread_->is_done(shards_.at(index)->ticket) && (!home_ || home_->is_read(index));
  }
  void wait_update(std::size_t index, Lane lane) override {
    HostShard& shard = at(index);
    wait_for(shard);
    if (std::exchange(shard.knows[static_cast<std::size_t>(lane)], true)) return;
    device_->wait(lane, shard.sent);  // the thread itself has waited for the gradient to leave
  }

  void fetch_parameters(std::size_t index, Lane lane, void* destination) override {
    HostShard& shard = at(index);
    if (!home_) {
      send(shard, index, lane, destination, shard.spec.param_dtype, StateKind::kMaster);
      return;
    }
    wait_for(shard);
    home_->fetch(index, lane, destination);
  }
  void read_state(std::size_t index, StateKind kind, std::span<float> destination) override {
    HostShard& shard = at(index);
    expect_numel(index, destination.size());
    ZB_EXPECT_STATE(!shard.spec.is_frozen, "frozen parameters have no state; fetch them");
    send(shard, index, Lane::kCompute, destination.data(), DType::kFloat32, kind);
  }
  void write_state(std::size_t index, StateKind kind, std::span<const float> source) override {
    HostShard& shard = at(index);
    expect_numel(index, source.size());
    queue(shard, [this, &shard, index, kind, source, ready = device_->mark(Lane::kCompute),
                  fetches = take_fetches(index)] {
      device_->bind_thread();
      if (home_) home_->end_fetches(index, fetches);
      device_->wait(Lane::kFromHost, ready);
      for_each_chunk(shard, [&](std::size_t begin, std::size_t end) {
        Outgoing& buffer = next_outgoing();
        link_.to_host(Lane::kFromHost, buffer.memory.data(), source.data() + begin, (end - begin) * sizeof(float));
        device_->synchronize(device_->mark_for_host(Lane::kFromHost));
        if (kind == StateKind::kMaster && home_) {
          home_->write(index, begin, [&](std::byte* parameters) {
            cpu_kernels().cast(parameters, shard.spec.param_dtype, buffer.memory.data(), DType::kFloat32, end - begin);
          });
        }
        if (shard.spec.is_frozen) return;
        const StateChunk chunk = states_->borrow(index, begin, end);
        cpu_kernels().copy(state_of(chunk, kind), buffer.memory.data(), (end - begin) * sizeof(float));
        states_->give_back(index, begin, end, ChunkUse::kWritten);
      });
    });
    thread_->wait(shard.ticket);  // the source may change now
  }

  SwapStats swap_stats() const override {
    SwapStats sum;
    if (paged_ != nullptr) {
      const PagerStats stats = paged_->stats();
      sum = {stats.read_bytes, stats.written_bytes, stats.wait_s, std::string(paged_->engine()), paged_->notes()};
    }
    if (home_) {
      if (paged_ == nullptr) sum.engine = home_->engine();
      const PagerStats more = home_->stats();
      sum.read_bytes += more.read_bytes;
      sum.written_bytes += more.written_bytes;
      sum.wait_s += more.wait_s;
      for (const std::string& note : home_->notes()) sum.notes.push_back("parameters: " + note);
    }
    return sum;
  }

 private:
  void take_memory() {
    const std::size_t outgoing_bytes = outgoing_numel(reserved_, chunk_numel()) * sizeof(float);
    pool_ = std::make_shared<PinnedPool>(host_store_bytes(reserved_, options_), ledger_,
                                         PinnedOptions{.thread_num = options_.thread_num,
                                                       .cpus = options_.cpus,
                                                       .numa_node = options_.numa_node,
                                                       .lock = options_.lock,
                                                       .registrar = host_registrar(device_),
                                                       .what = kStateAndGradients});
    for (Outgoing& outgoing : outgoing_) {
      outgoing.memory = pool_->allocate(outgoing_bytes, Category::kStaging);
    }
    if (options_.paged && !std::ranges::all_of(reserved_, &ShardSpec::is_frozen)) {
      take_files();
    } else {
      states_ = make_resident_state(pool_);
    }
    if (options_.parameters == ParameterHome::kDevice) return;
    home_ = std::make_unique<HomeParameters>(options_, reserved_, *pool_, device_, link_, ledger_);
    home_->set_timeline(timeline_);
  }

  void take_files() {
    const std::vector<std::size_t> numels = state_numels_of(reserved_);
    frames_ = pool_->allocate(paged_state_bytes(numels, chunk_numel(), *options_.paged));
    if (timeline_ != nullptr) {
      options_.paged->on_transfer = [this](const StateTransfer& transfer) {
        timeline_->add("disk", transfer.direction == Direction::kRead ? "read" : "write",
                       reserved_[transfer.shard].unit, transfer.begin, transfer.end);
      };
    }
    auto paged = make_paged_state(numels, chunk_numel(), *options_.paged, {frames_.data(), frames_.bytes()}, ledger_,
                                  *options_.system);
    paged_ = paged.get();
    states_ = std::move(paged);
  }

  void wait_for(const HostShard& shard) {
    if (thread_->is_done(shard.ticket)) return thread_->wait(shard.ticket);  // an error of the thread surfaces there
    const TimelineScope recorded(timeline_, "computing thread", "wait for an update", shard.spec.unit);
    const auto begin = std::chrono::steady_clock::now();
    const double files_before_s = file_wait_s();
    const ScopeExit count([&] {
      waited_ms_ += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      waited_for_files_ms_ += (file_wait_s() - files_before_s) * 1e3;
    });
    thread_->wait(shard.ticket);
  }

  double file_wait_s() const { return paged_ == nullptr ? 0.0 : paged_->stats().wait_s; }

  double fetch_waited_ms() const { return home_ ? home_->waited_ms() : 0.0; }
  HomeParameters::Fetches take_fetches(std::size_t index) {
    return home_ ? home_->take_fetches(index) : HomeParameters::Fetches{};
  }

  template <class Body>
  void for_each_chunk(const HostShard& shard, const Body& body) const {
    for (std::size_t begin = 0; begin < shard.spec.numel; begin += chunk_numel()) {
      body(begin, std::min(begin + chunk_numel(), shard.spec.numel));
    }
  }

  void queue(HostShard& shard, std::function<void()> work) {
    shard.knows = {};
    shard.ticket = thread_->queue(shard.turn, std::move(work));
  }

  // The lane to the host has been told what to wait for.
  void fetch_gradient(HostShard& shard, const void* gradient, DType dtype) {
    ZB_EXPECT(dtype == shard.spec.gradient_dtype, "a shard of " + std::string(dtype_name(shard.spec.gradient_dtype)) +
                                                      " gradients was given " + std::string(dtype_name(dtype)));
    for_each_chunk(shard, [&](std::size_t begin, std::size_t end) {
      const std::size_t offset_bytes = begin * dtype_bytes(dtype);
      link_.to_host(Lane::kToHost, shard.gradient.data() + offset_bytes,
                    static_cast<const std::byte*>(gradient) + offset_bytes, (end - begin) * dtype_bytes(dtype));
      shard.arrived[begin / chunk_numel()] = device_->mark_for_host(Lane::kToHost);
    });
  }

  // In the update thread, which alone uses the lane from the host and the outgoing buffers, and until its ticket is
  // done the shard's `sent`.
  void run(const Update& update) {
    HostShard& shard = *update.shard;
    device_->bind_thread();
    const std::string& unit = shard.spec.unit;
    {
      const TimelineScope recorded(timeline_, kThread, "wait for the step's scalars", unit);
      if (home_) home_->end_fetches(update.index, update.fetches);
      device_->synchronize(update.step_arrived);
    }
    if (update.step->is_skipped != 0) {
      device_->synchronize(shard.arrived.back());  // the gradient may be written again
      return;
    }
    if (!home_) device_->wait(Lane::kFromHost, update.started);
    const DType dtype = shard.spec.param_dtype;
    for_each_chunk(shard, [&](std::size_t begin, std::size_t end) {
      Outgoing* outgoing = nullptr;
      {
        const TimelineScope recorded(timeline_, kThread, "wait for the device", unit);
        device_->synchronize(shard.arrived[begin / chunk_numel()]);
        if (!home_) outgoing = &next_outgoing();
      }
      const StateChunk chunk = borrow(update, begin, end);
      {
        const TimelineScope recorded(timeline_, kThread, "adam", unit);
        if (outgoing != nullptr) {
          update_chunk(update, chunk, outgoing->memory.data(), begin, end);
        } else {
          home_->write(update.index, begin,
                       [&](std::byte* parameters) { update_chunk(update, chunk, parameters, begin, end); });
        }
      }
      states_->give_back(update.index, begin, end, ChunkUse::kWritten);
      if (outgoing == nullptr) return;
      link_.to_device(Lane::kFromHost, at_element(update.parameters, dtype, begin), outgoing->memory.data(),
                      (end - begin) * dtype_bytes(dtype));
      outgoing->sent = shard.sent = device_->mark_for_host(Lane::kFromHost);
    });
  }

  StateChunk borrow(const Update& update, std::size_t begin, std::size_t end) {
    const TimelineScope recorded(timeline_, kThread, "wait for files", update.shard->spec.unit);
    return states_->borrow(update.index, begin, end);
  }

  // Adam where a param group holds; elsewhere lie padding and held parameters, which keep their values.
  void update_chunk(const Update& update, const StateChunk& chunk, std::byte* parameters, std::size_t begin,
                    std::size_t end) {
    const ShardSpec& spec = update.shard->spec;
    runs_.clear();
    std::size_t cursor = begin;
    const auto keep_until = [&](std::size_t stop) {
      if (stop <= cursor) return;
      cpu_kernels().cast(at_element(parameters, spec.param_dtype, cursor - begin), spec.param_dtype,
                         chunk.master + (cursor - begin), DType::kFloat32, stop - cursor);
    };
    for (const Segment& segment : update.segments ? *update.segments : spec.segments) {
      const std::size_t first = std::max(begin, segment.begin);
      const std::size_t last = std::min(end, segment.end);
      if (first >= last) continue;
      keep_until(first);
      cursor = last;
      const std::size_t offset = first - begin;
      runs_.push_back({.span = {.master = chunk.master + offset,
                                .exp_avg = chunk.exp_avg + offset,
                                .exp_avg_sq = chunk.exp_avg_sq + offset,
                                .gradient = at_element(update.shard->gradient.data(), update.gradient_dtype, first),
                                .gradient_dtype = update.gradient_dtype,
                                .low_precision = at_element(parameters, spec.param_dtype, offset),
                                .low_precision_dtype = spec.param_dtype,
                                .numel = last - first},
                       .scalars = update.rows[static_cast<std::size_t>(segment.row)]});
    }
    keep_until(end);
    if (!runs_.empty()) adam_->update(Lane::kFromHost, runs_, update.step);
  }

  // The next buffer in turn, once nothing is sent from it any more.
  Outgoing& next_outgoing() {
    Outgoing& outgoing = outgoing_[next_outgoing_++ % kOutgoingNum];
    device_->synchronize(std::exchange(outgoing.sent, nullptr));
    return outgoing;
  }
  static float* state_of(const StateChunk& chunk, StateKind kind) {
    if (kind == StateKind::kMaster) return chunk.master;
    return kind == StateKind::kExpAvg ? chunk.exp_avg : chunk.exp_avg_sq;
  }

  // A state to device memory, for what is put into `lane` later.
  void send(HostShard& shard, std::size_t index, Lane lane, void* destination, DType dtype, StateKind kind) {
    queue(shard, [this, &shard, index, destination, dtype, kind, ready = device_->mark(lane)] {
      device_->bind_thread();
      device_->wait(Lane::kFromHost, ready);
      for_each_chunk(shard, [&](std::size_t begin, std::size_t end) {
        Outgoing& outgoing = next_outgoing();
        const StateChunk chunk = states_->borrow(index, begin, end);
        cpu_kernels().cast(outgoing.memory.data(), dtype, state_of(chunk, kind), DType::kFloat32, end - begin);
        states_->give_back(index, begin, end, ChunkUse::kRead);
        link_.to_device(Lane::kFromHost, at_element(destination, dtype, begin), outgoing.memory.data(),
                        (end - begin) * dtype_bytes(dtype));
        outgoing.sent = shard.sent = device_->mark_for_host(Lane::kFromHost);
      });
    });
    wait_update(index, lane);
  }

  HostShard& at(std::size_t index) {
    ZB_EXPECT(index < shards_.size(), "shard " + std::to_string(index) + " is out of range: the store has " +
                                          std::to_string(shards_.size()) + " shards, numbered from 0");
    return *shards_[index];
  }
  void expect_numel(std::size_t index, std::size_t numel) {
    ZB_EXPECT(numel == at(index).spec.numel, "shard " + std::to_string(index) + " has " +
                                                 std::to_string(at(index).spec.numel) +
                                                 " elements, the other side of the copy has " + std::to_string(numel));
  }

  Ledger* ledger_;
  std::shared_ptr<Device> device_;
  HostLink link_;
  HostStoreOptions options_;
  std::shared_ptr<DeviceAdam> adam_;
  std::vector<ShardSpec> reserved_;
  std::shared_ptr<PinnedPool> pool_;
  double waited_ms_ = 0.0;  // of the caller's thread
  double waited_for_files_ms_ = 0.0;
  Timeline* timeline_ = nullptr;
  std::array<Outgoing, kOutgoingNum> outgoing_;
  std::size_t next_outgoing_ = 0;
  PinnedBlock frames_;  // of state in files
  std::unique_ptr<StateSpace> states_;
  PagedState* paged_ = nullptr;           // states_, where it is that
  std::unique_ptr<HomeParameters> home_;  // null where parameters live on the device
  std::vector<std::unique_ptr<HostShard>> shards_;
  std::vector<AdamRun> runs_;
  std::unique_ptr<UpdateThread> thread_;
};

}  // namespace

std::unique_ptr<Store> make_host_store(Ledger* ledger, const DeviceParts& parts, HostStoreOptions options) {
  return std::make_unique<HostStore>(ledger, parts, std::move(options));
}

}  // namespace zb
