// Make each kind of IoEngine. Only make_io_engine calls these.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "io/io_engine.h"

namespace zb {

std::unique_ptr<IoEngine> make_thread_engine(const IoEngineOptions& options, std::vector<IoFile> files, System& system);
// Throws IoError where the kernel refuses.
std::unique_ptr<IoEngine> make_uring_engine(const IoEngineOptions& options, std::vector<IoFile> files,
                                            std::span<const std::span<std::byte>> memory, System& system);

}  // namespace zb
