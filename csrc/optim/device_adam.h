// Adam on the shards of a device: the sequence of adam.h wherever the memory lies.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "common/thread_pool.h"
#include "kernels/device.h"
#include "optim/adam.h"

namespace zb {

// One run of a shard and the param group that holds there.
struct AdamRun {
  AdamSpan span;
  AdamScalars scalars;  // grad_factor is not read: StepScalars::factor takes its place
};

class DeviceAdam {
 public:
  virtual ~DeviceAdam() = default;
  // Updates all runs, unless `step` (device memory) says that the step is skipped.
  virtual void update(Lane lane, std::span<const AdamRun> runs, const StepScalars* step) = 0;

  // What adam.h has under the same names, in a lane and in device memory.
  virtual void read_masters(Lane lane, const AdamSpan& span, float* destination) = 0;
  virtual void write_masters(Lane lane, const AdamSpan& span, const float* source) = 0;
  virtual void copy_magnitudes(Lane lane, float* destination, const float* source, const float* signs,
                               std::size_t numel) = 0;
};

// `cpus` as ThreadPool takes them.
std::shared_ptr<DeviceAdam> make_cpu_adam(std::size_t thread_num, std::vector<int> cpus);

// A device and what computes on it.
struct DeviceParts {
  std::shared_ptr<Device> device;
  std::shared_ptr<DeviceAdam> adam;
};

}  // namespace zb
