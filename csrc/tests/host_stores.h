// Host stores as tests make them: many chunks even of small shards, and on devices with lanes in the caller's thread,
// with an Adam that tells the device what the host touches.
#pragma once

#include <memory>
#include <utility>

#include "sim/sim_device.h"
#include "stores/host_store.h"

namespace zb::test {

// Of a store on the host, which keeps no remainders.
class HostAdam : public DeviceAdam {
 public:
  void read_masters(Lane, const AdamSpan&, float*) override;
  void write_masters(Lane, const AdamSpan&, const float*) override;
  void copy_magnitudes(Lane, float*, const float*, const float*, std::size_t) override;
};

class TouchingAdam final : public HostAdam {
 public:
  explicit TouchingAdam(std::shared_ptr<SimDevice> device) : device_(std::move(device)) {}

  void update(Lane lane, std::span<const AdamRun> runs, const StepScalars* step) override;

 private:
  std::shared_ptr<SimDevice> device_;
  std::shared_ptr<DeviceAdam> adam_ = make_cpu_adam(1, {});
};

HostStoreOptions small_chunks(const DeviceParts& parts, std::size_t thread_num = 1);

std::unique_ptr<Store> make_small_host_store(Ledger* ledger, const DeviceParts& parts);

// Shards of parameters on the host, too.
std::unique_ptr<Store> make_home_store(Ledger* ledger, const DeviceParts& parts);

// Files that go with the test process's folder; tests of stores make engines in many threads.
std::unique_ptr<Store> make_paged_store(Ledger* ledger, const DeviceParts& parts, std::size_t resident_bytes,
                                        ParameterHome parameters = ParameterHome::kDevice);

// All state in files, and half of it.
std::unique_ptr<Store> make_swapping_store(Ledger* ledger, const DeviceParts& parts);
std::unique_ptr<Store> make_half_swapping_store(Ledger* ledger, const DeviceParts& parts);

// Parameters in files too: all that swaps, and with memory for some of both.
std::unique_ptr<Store> make_swapping_home_store(Ledger* ledger, const DeviceParts& parts);
std::unique_ptr<Store> make_half_swapping_home_store(Ledger* ledger, const DeviceParts& parts);

// A third of every shard stays on the device.
std::unique_ptr<Store> make_third_store(Ledger* ledger, const DeviceParts& parts);

// The share on the host is chosen behind the first backward: all, a part, or none.
std::unique_ptr<Store> make_store_on_trial(Ledger* ledger, const DeviceParts& parts);

}  // namespace zb::test
