#include "common/interrupts.h"

#include <atomic>

namespace zb {
namespace {

std::atomic<RunSignalHandlers> signal_handlers{nullptr};

}  // namespace

void set_signal_handlers(RunSignalHandlers run) noexcept { signal_handlers.store(run); }

void SignalWatch::run_handlers() {
  if (const RunSignalHandlers run = signal_handlers.load()) run();
}

}  // namespace zb
