#include "io/probe.h"

#include <algorithm>
#include <random>

#include "common/error.h"
#include "io/swap_file.h"
#include "memory/host_buffer.h"

namespace zb {
namespace {

constexpr std::uint64_t kFirstBytes = std::uint64_t{16} << 20;

// The rate of the largest piece that the time allows, beginning small: a slow path must not hold up a start.
double rate(const ProbeOptions& options, IoMode mode, const IoFile& file, std::uint64_t most_bytes, double most_s,
            std::span<std::byte> memory, System& system, std::uint64_t* reached_bytes) {
  const std::uint64_t sides = mode == IoMode::kBoth ? 2 : 1;
  std::uint64_t bytes = std::min(kFirstBytes, most_bytes);
  double spent_s = 0;
  for (;;) {
    const double time_s = time_raw_io(options.raw, mode, {&file, 1}, 0, bytes, memory, system);
    spent_s += time_s;
    *reached_bytes = std::max(*reached_bytes, bytes);
    const double left_s = most_s - spent_s;
    const double per_byte_s = time_s / static_cast<double>(bytes);
    const auto fitting = static_cast<std::uint64_t>(std::max(0.0, left_s / per_byte_s));
    const std::uint64_t next = std::min(most_bytes, fitting) / options.raw.block_bytes * options.raw.block_bytes;
    if (next <= bytes) return static_cast<double>(sides * bytes) / time_s;
    bytes = next;
  }
}

}  // namespace

IoRates probe_path(const ProbeOptions& options, System& system) {
  ZB_EXPECT(options.bytes >= options.raw.block_bytes && options.raw.block_bytes % 4096 == 0,
            "a probe needs at least one block, of a multiple of 4096 bytes");
  const SwapFile swap({.directory = options.directory,
                       .owner = options.owner,
                       .bytes = options.bytes,
                       .direct = options.direct,
                       .allow_fallback = false},
                      system);
  const IoFile file{swap.fd(), swap.path()};
  const HostBuffer buffer(options.raw.depth * options.raw.block_bytes, "the blocks of a probe");
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < buffer.bytes() / sizeof(std::uint64_t); ++i) buffer.as<std::uint64_t>()[i] = random();
  const std::span<std::byte> memory{buffer.data(), buffer.bytes()};
  // Written first: what was never written is not read from the disk.
  std::uint64_t written_bytes = 0;
  std::uint64_t other_bytes = 0;
  const double part_s = options.seconds / 3;
  IoRates rates;
  rates.write_bytes_per_s = rate(options, IoMode::kWrite, file, options.bytes, part_s, memory, system, &written_bytes);
  rates.read_bytes_per_s = rate(options, IoMode::kRead, file, written_bytes, part_s, memory, system, &other_bytes);
  rates.both_bytes_per_s = rate(options, IoMode::kBoth, file, written_bytes, part_s, memory, system, &other_bytes);
  return rates;
}

double predict_io_s(const IoRates& rates, double read_bytes, double written_bytes) {
  ZB_EXPECT(rates.read_bytes_per_s > 0 && rates.write_bytes_per_s > 0 && rates.both_bytes_per_s > 0,
            "a prediction needs rates above zero");
  const double both = std::min(read_bytes, written_bytes);
  return 2 * both / rates.both_bytes_per_s + (read_bytes - both) / rates.read_bytes_per_s +
         (written_bytes - both) / rates.write_bytes_per_s;
}

}  // namespace zb
