#include "host_stores.h"

#include <gtest/gtest.h>

#include "io_support.h"
#include "stores/split_store.h"
#include "stores/trial_store.h"

namespace zb::test {

void HostAdam::read_masters(Lane, const AdamSpan&, float*) { FAIL(); }

void HostAdam::write_masters(Lane, const AdamSpan&, const float*) { FAIL(); }

void HostAdam::copy_magnitudes(Lane, float*, const float*, const float*, std::size_t) { FAIL(); }

void TouchingAdam::update(Lane lane, std::span<const AdamRun> runs, const StepScalars* step) {
  device_->touch_on_host("the scalars of a host Adam", {step, sizeof(StepScalars), false});
  for (const AdamRun& run : runs) {
    const AdamSpan& span = run.span;
    device_->touch_on_host("a host Adam", SimDevice::read(span.gradient, span.gradient_dtype, span.numel));
    device_->touch_on_host("a host Adam", SimDevice::written(span.low_precision, span.low_precision_dtype, span.numel));
    for (const float* state : {span.master, span.exp_avg, span.exp_avg_sq}) {
      device_->touch_on_host("a host Adam", SimDevice::written(state, DType::kFloat32, span.numel));
    }
  }
  adam_->update(lane, runs, step);
}

HostStoreOptions small_chunks(const DeviceParts& parts, std::size_t thread_num) {
  HostStoreOptions options{.thread_num = thread_num, .chunk_numel = 128};
  if (const auto sim_device = std::dynamic_pointer_cast<SimDevice>(parts.device)) {
    options.updates_run = UpdatesRun::kInCaller;
    options.adam = std::make_shared<TouchingAdam>(sim_device);
  }
  return options;
}

std::unique_ptr<Store> make_small_host_store(Ledger* ledger, const DeviceParts& parts) {
  return make_host_store(ledger, parts, small_chunks(parts));
}

std::unique_ptr<Store> make_home_store(Ledger* ledger, const DeviceParts& parts) {
  HostStoreOptions options = small_chunks(parts);
  options.parameters = ParameterHome::kHost;
  return make_host_store(ledger, parts, options);
}

std::unique_ptr<Store> make_paged_store(Ledger* ledger, const DeviceParts& parts, std::size_t resident_bytes,
                                        ParameterHome parameters) {
  static const Folder folder;
  HostStoreOptions options = small_chunks(parts);
  options.paged = PagedStateOptions{.directories = {folder.path(), folder.path()},
                                    .engine = {.allow_fallback = true, .block_bytes = 4096, .depth = 1},
                                    .resident_bytes = resident_bytes,
                                    .checksums = true};
  options.parameters = parameters;
  options.resident_parameter_bytes = resident_bytes / 3;
  if (resident_bytes == 0) options.ahead_parameter_bytes = 0;  // with more all of the toy stays in memory
  return make_host_store(ledger, parts, options);
}

std::unique_ptr<Store> make_swapping_store(Ledger* ledger, const DeviceParts& parts) {
  return make_paged_store(ledger, parts, 0);
}

std::unique_ptr<Store> make_half_swapping_store(Ledger* ledger, const DeviceParts& parts) {
  return make_paged_store(ledger, parts, 6 * 8192);
}

std::unique_ptr<Store> make_swapping_home_store(Ledger* ledger, const DeviceParts& parts) {
  return make_paged_store(ledger, parts, 0, ParameterHome::kFiles);
}

std::unique_ptr<Store> make_half_swapping_home_store(Ledger* ledger, const DeviceParts& parts) {
  return make_paged_store(ledger, parts, 6 * 8192, ParameterHome::kFiles);
}

std::unique_ptr<Store> make_third_store(Ledger* ledger, const DeviceParts& parts) {
  return make_split_store(make_device_store_with_masters(ledger, parts), make_small_host_store(ledger, parts), 2.0 / 3);
}

std::unique_ptr<Store> make_store_on_trial(Ledger* ledger, const DeviceParts& parts) {
  return make_trial_store(ledger, parts, {}, 1, [ledger, parts](double share) {
    if (share == 0.0) return make_device_store(ledger, parts);
    std::unique_ptr<Store> on_host = make_small_host_store(ledger, parts);
    if (share == 1.0) return on_host;
    return make_split_store(make_device_store_with_masters(ledger, parts), std::move(on_host), share);
  });
}

}  // namespace zb::test
