// A store whose share on the host is chosen late: when a trial step has shown how much device memory is free.
//
// [Note: a share chosen late]
// Until then masters wait in pinned host memory and moments are zero, so the trial takes no update: the first step's
// forward and backward are the trial, and its update comes when the store that keeps the state from then on was made.
// Moments that are written before that (a state that is loaded) wait on the host, too.
#pragma once

#include <functional>
#include <memory>

#include "memory/pinned_mapping.h"
#include "stores/store.h"

namespace zb {

// A store with this share of its state on the host. It keeps masters as the trial does, but for one of share 0, where
// fp32 parameters may be their own.
using MakeStoreOfShare = std::function<std::unique_ptr<Store>(double host_share)>;

// `pinned` says where the memory of waiting state comes from, which `ranks_on_host` ranks take at the same time.
std::unique_ptr<Store> make_trial_store(Ledger* ledger, const DeviceParts& parts, PinnedOptions pinned,
                                        std::size_t ranks_on_host, MakeStoreOfShare make_store);

}  // namespace zb
