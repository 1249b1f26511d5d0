#include "io/io_engine.h"

#include <utility>

#include "common/error.h"
#include "io/io_engine_kinds.h"

namespace zb {
namespace {

constexpr std::size_t kLargestDepth = 4096;

}  // namespace

std::string_view io_engine_name(IoEngineKind kind) noexcept {
  return kind == IoEngineKind::kIoUring ? "io_uring" : "threads";
}

IoEngineKind io_engine_from_name(std::string_view name) {
  for (const IoEngineKind kind : {IoEngineKind::kIoUring, IoEngineKind::kThreads}) {
    if (io_engine_name(kind) == name) return kind;
  }
  throw ArgumentError("the I/O engine '" + std::string(name) + "' is unknown: choose io_uring or threads");
}

IoTicket IoEngine::start(std::span<const IoTransfer> transfers, IoCallback on_end) {
  IoTicket ticket = queue_.push(transfers, std::move(on_end));
  wake();
  return ticket;
}

std::unique_ptr<IoEngine> make_io_engine(const IoEngineOptions& options, std::vector<IoFile> files,
                                         std::span<const std::span<std::byte>> memory, System& system) {
  ZB_EXPECT(options.depth >= 1 && options.depth <= kLargestDepth,
            "the I/O depth must be 1 to " + std::to_string(kLargestDepth) + ", got " + std::to_string(options.depth));
  if (options.kind == IoEngineKind::kThreads) return make_thread_engine(options, std::move(files), system);
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
