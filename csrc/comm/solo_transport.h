// The transport of a world of one rank: copies in the lane, where source and destination are not the same.
#pragma once

#include <memory>
#include <utility>

#include "comm/lane_transport.h"

namespace zb {

class SoloTransport final : public LaneTransport {
 public:
  SoloTransport(std::shared_ptr<Device> device, Lane lane) : device_(std::move(device)), lane_(lane) {}

  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole, std::string_view what) override {
    return device_->allocate(bytes, what);
  }
  void put_in(std::span<const LaneCall> calls) override {
    for (const LaneCall& call : calls) {
      const bool reduces = call.kind == Collective::kReduceScatter || call.kind == Collective::kAllReduce;
      const std::size_t bytes = reduces ? call.num * dtype_bytes(call.dtype) : call.num;
      if (call.source != call.destination && bytes != 0) device_->copy(lane_, call.destination, call.source, bytes);
    }
  }

 private:
  std::shared_ptr<Device> device_;
  Lane lane_;
};

}  // namespace zb
