// A quick look at what a path gives, and what that means for a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "io/raw_io.h"

namespace zb {

// Bytes per second of reads alone, of writes alone, and of both together (the sum).
struct IoRates {
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double both_bytes_per_s = 0;
};

struct ProbeOptions {
  std::string directory;
  std::string owner;
  std::uint64_t bytes = std::uint64_t{1} << 30;  // of the file, at most
  double seconds = 1.0;                          // in all, about
  RawOptions raw;
  bool direct = true;
};

// Writes a file of its own, reads it back, does both, and removes it. Throws IoError.
IoRates probe_path(const ProbeOptions& options, System& system = kernel_system());

// Seconds that the transfers of a step take: what is read and written together at the mixed rate, the rest alone.
double predict_io_s(const IoRates& rates, double read_bytes, double written_bytes);

}  // namespace zb
