// What ranks do together over a communicator, and one fails at alone.
#pragma once

#include <exception>

#include "comm/communicator.h"

namespace zb {

// The peers of a rank that fails here learn why, instead of waiting for its part until their timeout.
template <typename Body>
auto or_abort(Communicator& communicator, const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& error) {
    communicator.abort(error.what());
    throw;
  }
}

}  // namespace zb
