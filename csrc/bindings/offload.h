// What Python says about optimizer state that is not on the device.
#pragma once

#include <memory>

#include "stores/host_store.h"

namespace zb {

struct OffloadOptions {
  double ratio = 1.0;  // of the elements, on the host
  HostStoreOptions host;

  std::unique_ptr<Store> make_store(Ledger* ledger, const DeviceParts& parts) const;
};

}  // namespace zb
