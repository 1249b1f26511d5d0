// An exchange among ranks as Python asks for it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>
#include <string>

namespace zb {

// Every rank's bytes, one after the other. `exchange` takes this rank's and where all go, and runs without the GIL.
template <typename Exchange>
pybind11::bytes exchanged(const pybind11::bytes& message, int world_size, const Exchange& exchange) {
  const std::string mine = message;
  std::string all(mine.size() * static_cast<std::size_t>(world_size), '\0');
  {
    const pybind11::gil_scoped_release release;
    exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  }
  return pybind11::bytes(all);
}

}  // namespace zb
