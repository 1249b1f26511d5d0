// A store of two: the first elements of every shard in one, the rest in another.
#pragma once

#include <memory>

#include "stores/store.h"

namespace zb {

// `second_share` of a shard's elements goes to the second store, in whole cache lines. Both stores keep a master
// (Store::keeps_master) of every dtype. Throws ArgumentError for a share outside [0, 1].
std::unique_ptr<Store> make_split_store(std::unique_ptr<Store> first, std::unique_ptr<Store> second,
                                        double second_share);

}  // namespace zb
