// The threads of I/O: they get no signals, and where the system starts none, that is an IoError.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "common/blocked_signals.h"
#include "io/system.h"

namespace zb {

template <typename Body>
std::thread start_io_thread(Body body) {
  const BlockedSignals blocked;
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw_io(error.code().value(),
             "a thread for I/O could not be started; raise the limit on processes and threads (ulimit -u, or pids.max "
             "of the container), or lower io_depth",
             {});
  }
}

}  // namespace zb
