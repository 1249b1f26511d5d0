#include "comm/cuda_paced_transport.h"

#include <algorithm>
#include <utility>

namespace zb {
namespace {

std::uint64_t full_bytes_of(const LaneCall& call, int world_size) noexcept {
  const auto ranks = static_cast<std::uint64_t>(world_size);
  switch (call.kind) {
    case Collective::kAllGather:
      return ranks * call.num;
    case Collective::kReduceScatter:
      return ranks * call.num * dtype_bytes(call.dtype);
    case Collective::kAllReduce:
      return call.num * dtype_bytes(call.dtype);
    default:
      return call.num;
  }
}

class PacedTransport final : public LaneTransport {
 public:
  PacedTransport(std::unique_ptr<LaneTransport> inner, Lane lane, int world_size, std::shared_ptr<DeviceLink> link)
      : inner_(std::move(inner)), lane_(lane), world_size_(world_size), link_(std::move(link)) {}

  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole role, std::string_view what) override {
    return inner_->allocate(bytes, role, what);
  }
  std::uint64_t place_of(const LaneCall& call) const override { return inner_->place_of(call); }
  void put_in(std::span<const LaneCall> calls) override {
    WireCost cost;
    for (const LaneCall& call : calls) {
      const WireCost one = wire_cost(Algorithms::kRing, call.kind, full_bytes_of(call, world_size_), world_size_);
      cost.bytes += one.bytes;
      cost.rounds = std::max(cost.rounds, one.rounds);  // a group's messages travel together
    }
    link_->depart(lane_, cost);
    inner_->put_in(calls);
    link_->arrive(lane_);
  }
  void enter_thread() override { inner_->enter_thread(); }
  std::optional<std::string> failure() override { return inner_->failure(); }
  bool abort() noexcept override { return inner_->abort(); }
  void finish() noexcept override { inner_->finish(); }

 private:
  std::unique_ptr<LaneTransport> inner_;
  Lane lane_;
  int world_size_;
  std::shared_ptr<DeviceLink> link_;
};

}  // namespace

DeviceLink::DeviceLink(std::shared_ptr<Device> device, LinkSpeed speed)
    : device_(std::move(device)), speed_(speed), memory_(device_->allocate(sizeof(Times), "a paced link")) {}

DeviceLink::Times* DeviceLink::times() const noexcept { return reinterpret_cast<Times*>(memory_.get()); }

void DeviceLink::depart(Lane lane, WireCost cost) {
  const auto nanoseconds = [](std::chrono::nanoseconds time) { return static_cast<std::uint64_t>(time.count()); };
  put_in_departure(&times()->link, &times()->arrival_ns[static_cast<std::size_t>(lane)],
                   nanoseconds(speed_.transfer(cost.bytes)), nanoseconds(cost.rounds * speed_.latency),
                   static_cast<cudaStream_t>(device_->stream(lane)));
}

void DeviceLink::arrive(Lane lane) {
  put_in_arrival(&times()->arrival_ns[static_cast<std::size_t>(lane)],
                 static_cast<cudaStream_t>(device_->stream(lane)));
}

std::unique_ptr<LaneTransport> make_paced_transport(std::unique_ptr<LaneTransport> inner, Lane lane, int world_size,
                                                    std::shared_ptr<DeviceLink> link) {
  return std::make_unique<PacedTransport>(std::move(inner), lane, world_size, std::move(link));
}

}  // namespace zb
