#include "sim/sim_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "common/error.h"
#include "kernels/norm.h"

namespace zb::test {

void Peers::idle() { throw std::logic_error("the host waits for work that can never run"); }

SimDevice::SimDevice(const SimSchedule& schedule, std::shared_ptr<Peers> peers,
                     std::function<void(const std::string&)> report)
    : schedule_(schedule),
      random_(schedule.seed * 7919 + 1),
      peers_(std::move(peers)),
      races_(report),
      ranges_(std::move(report)) {}

void SimDevice::put_in(Lane lane, std::string_view operation, const std::vector<Touched>& touched,
                       std::function<void()> work) {
  put_in_polled(lane, operation, touched, [work = std::move(work)] {
    work();
    return true;
  });
}

void SimDevice::put_in_polled(Lane lane, std::string_view operation, const std::vector<Touched>& touched, Work work) {
  const std::size_t actor = index_of(lane);
  join(clocks_[actor], clocks_[kHost]);
  ++clocks_[actor][actor];
  for (const Touched& memory : touched) races_.touch(actor, clocks_[actor], operation, memory);
  lanes_[actor].push_back({std::string(operation), std::move(work)});
  run_some();
}

bool SimDevice::is_behind(Lane lane, Lane other, const std::string& range) const {
  return clock_of(lane)[index_of(other)] > at_ranges_.at(range)[index_of(other)][index_of(other)];
}

void SimDevice::touch_at(Lane lane, const Clock& clock, std::string_view operation,
                         const std::vector<Touched>& touched) {
  for (const Touched& memory : touched) races_.touch(index_of(lane), clock, operation, memory);
}

std::shared_ptr<std::byte> SimDevice::allocate_in_compute(std::size_t bytes, const std::string& what) {
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

void SimDevice::touch_on_host(std::string_view operation, const Touched& touched) {
  ++clocks_[kHost][kHost];
  races_.touch(kHost, clocks_[kHost], operation, touched);
}

void SimDevice::run_until(const std::function<bool()>& is_reached) {
  while (!is_reached()) {
    if (!step(true) && !step(false)) idle();
    if (random_() % 8 == 0) peers_->pause();
  }
}

MarkPtr SimDevice::mark(Lane lane) {
  const std::size_t actor = index_of(lane);
  join(clocks_[actor], clocks_[kHost]);
  auto mark = std::make_shared<SimMark>(clocks_[actor]);
  lanes_[actor].push_back({"a mark", [mark] {
                             mark->is_passed = true;
                             return true;
                           }});
  return mark;
}

void SimDevice::wait(Lane lane, const MarkPtr& mark) {
  if (mark == nullptr) return;
  const auto waited = std::static_pointer_cast<const SimMark>(mark);
  join(clocks_[index_of(lane)], waited->clock);
  lanes_[index_of(lane)].push_back({"a wait", [waited] { return waited->is_passed.load(); }});
}

bool SimDevice::has_passed(const MarkPtr& mark) {
  if (mark == nullptr) return true;
  const auto& asked = static_cast<const SimMark&>(*mark);
  if (std::this_thread::get_id() != owner_) return asked.is_passed;
  // Whoever asks again and again is to get an answer in the end.
  if (!asked.is_passed && !step(true) && !step(false)) idle();
  if (asked.is_passed) join(clocks_[kHost], asked.clock);
  return asked.is_passed;
}

void SimDevice::synchronize(const MarkPtr& mark) {
  if (mark == nullptr) return;
  expect_sound();
  run_until([&] { return static_cast<const SimMark&>(*mark).is_passed.load(); });
  join(clocks_[kHost], static_cast<const SimMark&>(*mark).clock);
}

void SimDevice::synchronize() {
  expect_sound();
  run_until([&] { return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane.empty(); }); });
  for (std::size_t lane = 0; lane < kLaneNum; ++lane) join(clocks_[kHost], clocks_[lane]);
  freed_.clear();
}

std::shared_ptr<std::byte> SimDevice::allocate(std::size_t bytes, std::string_view what) {
  if (is_full_) throw OutOfMemoryError("no memory is left for " + std::string(what));
  std::shared_ptr<std::byte> memory = make_memory(bytes);
  races_.allocated(memory.get(), bytes, what);
  std::byte* const data = memory.get();
  return {data, [device = weak_from_this(), held = std::move(memory), bytes](std::byte*) {
            if (const auto alive = device.lock()) alive->free(held, bytes);
          }};
}

std::shared_ptr<std::byte> SimDevice::adopt_mapped(std::size_t bytes, std::string_view what,
                                                   const std::shared_ptr<std::byte>& memory) {
  races_.allocated(memory.get(), bytes, what);
  return {memory.get(), [device = weak_from_this(), memory](std::byte*) {
            if (const auto alive = device.lock()) alive->races_.freed(memory.get(), alive->clocks_[kHost]);
          }};
}

void SimDevice::register_host(std::byte* data, std::size_t bytes) {
  races_.allocated(data, bytes, "registered memory");
}

void SimDevice::cast(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
                     std::size_t numel) {
  put_in(lane, "cast", {written(destination, destination_dtype, numel), read(source, source_dtype, numel)},
         [=, this] { kernels_.cast(destination, destination_dtype, source, source_dtype, numel); });
}

void SimDevice::add(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
                    std::size_t numel) {
  put_in(lane, "add", {written(destination, destination_dtype, numel), read(source, source_dtype, numel)},
         [=, this] { kernels_.add(destination, destination_dtype, source, source_dtype, numel); });
}

void SimDevice::sum(Lane lane, void* destination, std::span<const void* const> sources, DType dtype,
                    std::size_t numel) {
  std::vector<Touched> touched{written(destination, dtype, numel)};
  for (const void* source : sources) touched.push_back(read(source, dtype, numel));
  put_in(lane, "sum", touched, [=, this, held = std::vector<const void*>(sources.begin(), sources.end())] {
    kernels_.reduce(destination, held.data(), held.size(), dtype, numel);
  });
}

void SimDevice::pack(Lane lane, std::span<const PackItem> items) {
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

void SimDevice::zero(Lane lane, void* destination, std::size_t bytes) {
  put_in(lane, "zero", {{destination, bytes, true}}, [=] {
    if (bytes != 0) std::memset(destination, 0, bytes);
  });
}

void SimDevice::copy(Lane lane, void* destination, const void* source, std::size_t bytes) {
  put_in(lane, "copy", {{destination, bytes, true}, {source, bytes, false}},
         [=, this] { kernels_.copy(destination, source, bytes); });
}

void SimDevice::copy_to_pinned(Lane lane, std::byte* host, const void* source, std::size_t bytes) {
  put_in(lane, "copy_to_pinned", {{host, bytes, true}, {source, bytes, false}},
         [=] { std::memcpy(host, source, bytes); });
}

void SimDevice::copy_from_pinned(Lane lane, void* destination, const std::byte* host, std::size_t bytes) {
  put_in(lane, "copy_from_pinned", {{destination, bytes, true}, {host, bytes, false}}, [=] {
    if (bytes != 0) std::memcpy(destination, host, bytes);
  });
}

void SimDevice::sums_of_squares(Lane lane, DType dtype, std::span<const SquareSum> sums) {
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

void SimDevice::combine_norm(Lane lane, const NormArguments& arguments) {
  const std::size_t flat_bytes = arguments.flat_num * sizeof(double);
  put_in(lane, "combine_norm",
         {{arguments.partial_sums, arguments.rank_num * flat_bytes, false},
          {arguments.flat_sums, flat_bytes, true},
          {arguments.scalars, sizeof(StepScalars), true}},
         [=] { combine_partial_sums(arguments); });
}

void SimDevice::download(void* host, const void* source, std::size_t bytes) {
  host_touches("download", {source, bytes, false});
  if (bytes != 0) std::memcpy(host, source, bytes);
}

void SimDevice::upload(void* destination, const void* host, std::size_t bytes) {
  host_touches("upload", {destination, bytes, true});
  if (bytes != 0) std::memcpy(destination, host, bytes);
}

void SimDevice::push_range(const char* name) {
  at_ranges_[name] = clocks_;
  ranges_.push(name);
}

Touched SimDevice::read(const void* data, DType dtype, std::size_t numel) {
  return {data, numel * dtype_bytes(dtype), false};
}

Touched SimDevice::written(const void* data, DType dtype, std::size_t numel) {
  return {data, numel * dtype_bytes(dtype), true};
}

std::shared_ptr<std::byte> SimDevice::make_memory(std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  const std::size_t rounded = (bytes + kAlignment) / kAlignment * kAlignment;  // never 0
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  std::memset(data, 0, rounded);
  return {data, [](std::byte* held) { std::free(held); }};
}

void SimDevice::free(const std::shared_ptr<std::byte>& memory, std::size_t bytes) {
  races_.freed(memory.get(), clocks_[kHost]);
  std::memset(memory.get(), 0xFF, bytes);
  freed_.push_back(memory);  // what is put in may still touch it, if the caller is wrong
}

void SimDevice::reuse_in_compute(const std::shared_ptr<std::byte>& memory, std::size_t bytes, const std::string& what) {
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

void SimDevice::host_touches(std::string_view operation, const Touched& touched) {
  synchronize();
  touch_on_host(operation, touched);
}

void SimDevice::expect_sound() const {
  if (has_failed_) throw CudaError("the device has failed", 1);
}

void SimDevice::idle() {
  try {
    peers_->idle();
  } catch (const std::exception& error) {
    std::string text = error.what();
    for (const std::deque<Item>& lane : lanes_) text += lane.empty() ? ", -" : ", " + lane.front().operation;
    throw std::logic_error(text);
  }
}

bool SimDevice::runs_at_once(std::size_t lane) const {
  constexpr std::array<unsigned, kSimPolicyNum> kLanes{0b00000, 0b00000, 0b11110, 0b11101, 0b11011,
                                                       0b00001, 0b00010, 0b00100, 0b01000, 0b10000};
  return (kLanes[static_cast<std::size_t>(schedule_.policy)] >> lane & 1U) != 0;
}

void SimDevice::run_some() {
  if (schedule_.policy == SimPolicy::kRandom) {
    while (random_() % 2 == 0 && step(false)) {
    }
  }
  while (step(true)) {
  }
  if (random_() % 16 == 0) peers_->pause();
}

bool SimDevice::step(bool eager) {
  std::array<std::size_t, kLaneNum> order;
  auto end = order.begin();
  for (std::size_t lane = 0; lane < kLaneNum; ++lane) {
    if (!lanes_[lane].empty() && (!eager || runs_at_once(lane))) *end++ = lane;
  }
  std::shuffle(order.begin(), end, random_);
  for (auto lane_at = order.begin(); lane_at != end; ++lane_at) {
    const std::size_t lane = *lane_at;
    if (!lanes_[lane].front().work()) continue;
    lanes_[lane].pop_front();
    peers_->progressed();
    return true;
  }
  return false;
}

void SimAdam::update(Lane lane, std::span<const AdamRun> runs, const StepScalars* step) {
  std::vector<Touched> touched{{step, sizeof(StepScalars), false}};
  for (const AdamRun& run : runs) {
    const AdamSpan& span = run.span;
    touched.push_back(SimDevice::read(span.gradient, span.gradient_dtype, span.numel));
    if (span.remainder != nullptr) touched.push_back(remainders(span, true));
    for (const float* state : {span.master, span.exp_avg, span.exp_avg_sq}) {
      if (state != nullptr) touched.push_back(SimDevice::written(state, DType::kFloat32, span.numel));
    }
    if (span.low_precision != nullptr) {
      touched.push_back(SimDevice::written(span.low_precision, span.low_precision_dtype, span.numel));
    }
  }
  device_->put_in(lane, "adam", touched,
                  [adam = adam_, held = std::vector<AdamRun>(runs.begin(), runs.end()), lane, step] {
                    adam->update(lane, held, step);
                  });
}

void SimAdam::read_masters(Lane lane, const AdamSpan& span, float* destination) {
  device_->put_in(lane, "masters read",
                  {remainders(span, false), SimDevice::read(span.low_precision, DType::kBFloat16, span.numel),
                   SimDevice::read(span.exp_avg_sq, DType::kFloat32, span.numel),
                   SimDevice::written(destination, DType::kFloat32, span.numel)},
                  [adam = adam_, lane, span, destination] { adam->read_masters(lane, span, destination); });
}

void SimAdam::write_masters(Lane lane, const AdamSpan& span, const float* source) {
  device_->put_in(lane, "masters written",
                  {remainders(span, true), SimDevice::read(span.low_precision, DType::kBFloat16, span.numel),
                   SimDevice::written(span.exp_avg_sq, DType::kFloat32, span.numel),
                   SimDevice::read(source, DType::kFloat32, span.numel)},
                  [adam = adam_, lane, span, source] { adam->write_masters(lane, span, source); });
}

void SimAdam::copy_magnitudes(Lane lane, float* destination, const float* source, const float* signs,
                              std::size_t numel) {
  std::vector<Touched> touched{SimDevice::written(destination, DType::kFloat32, numel),
                               SimDevice::read(source, DType::kFloat32, numel)};
  if (signs != nullptr) touched.push_back(SimDevice::read(signs, DType::kFloat32, numel));
  device_->put_in(lane, "magnitudes", touched, [adam = adam_, lane, destination, source, signs, numel] {
    adam->copy_magnitudes(lane, destination, source, signs, numel);
  });
}

Touched SimAdam::remainders(const AdamSpan& span, bool is_written) {
  return is_written ? SimDevice::written(span.remainder, DType::kBFloat16, span.numel)
                    : SimDevice::read(span.remainder, DType::kBFloat16, span.numel);
}

}  // namespace zb::test
