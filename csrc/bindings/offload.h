// What Python says about optimizer state that is not on the device.
#pragma once

#include <memory>
#include <optional>

#include "stores/host_store.h"

namespace zb {

struct OffloadOptions {
  std::optional<double> ratio = 1.0;  // of the elements, on the host; none: chosen behind a trial step
  HostStoreOptions host;

  std::unique_ptr<Store> make_store(Ledger* ledger, const DeviceParts& parts) const;
  std::unique_ptr<Store> make_store_of(double share, Ledger* ledger, const DeviceParts& parts) const;
};

}  // namespace zb
