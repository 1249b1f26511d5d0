#include "io/engine.h"

#include <utility>

#include "common/error.h"
#include "io/engines.h"

namespace zb {
namespace {

constexpr std::size_t kLargestDepth = 4096;

}  // namespace

std::string_view engine_name(EngineKind kind) noexcept { return kind == EngineKind::kIoUring ? "io_uring" : "threads"; }

EngineKind engine_from_name(std::string_view name) {
  for (const EngineKind kind : {EngineKind::kIoUring, EngineKind::kThreads}) {
    if (engine_name(kind) == name) return kind;
  }
  throw ArgumentError("the I/O engine '" + std::string(name) + "' is unknown: choose io_uring or threads");
}

IoTicket IoEngine::start(std::span<const IoTransfer> transfers, IoCallback on_end) {
  IoTicket ticket = queue_.push(transfers, std::move(on_end));
  wake();
  return ticket;
}

std::unique_ptr<IoEngine> make_engine(const EngineOptions& options, std::vector<IoFile> files,
                                      std::span<const std::span<std::byte>> memory, System& system) {
  ZB_EXPECT(options.depth >= 1 && options.depth <= kLargestDepth,
            "the I/O depth must be 1 to " + std::to_string(kLargestDepth) + ", got " + std::to_string(options.depth));
  if (options.kind == EngineKind::kThreads) return make_thread_engine(options, std::move(files), system);
  try {
    return make_uring_engine(options, files, memory, system);
  } catch (const IoError& error) {
    if (!options.allow_fallback) throw;
    auto engine = make_thread_engine(options, std::move(files), system);
    engine->note_ = std::string("threads instead of io_uring: ") + error.what();
    return engine;
  }
}

}  // namespace zb
