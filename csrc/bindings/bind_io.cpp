#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "common/error.h"
#include "io/pager.h"
#include "io/raw_io.h"
#include "memory/host_buffer.h"

namespace py = pybind11;

namespace zb {
namespace {

IoMode mode_from_name(const std::string& name) {
  if (name == "read") return IoMode::kRead;
  if (name == "write") return IoMode::kWrite;
  if (name == "both") return IoMode::kBoth;
  throw ArgumentError("the I/O mode '" + name + "' is unknown: choose read, write or both");
}

// Swap files with a pager over them, and the plain loops over the same files: what bench io and tune io time.
class IoBench {
 public:
  IoBench(std::vector<std::string> directories, std::size_t chunk_bytes, std::size_t chunk_num, bool direct)
      : space_({.directories = std::move(directories),
                .owner = "bench",
                .slot_bytes = chunk_bytes,
                .slot_num = chunk_num,
                .direct = direct}) {}

  // Random bytes in every frame of this much memory, so that no device can squeeze them.
  void reserve_memory(std::size_t bytes) {
    if (bytes <= memory_.bytes()) return;
    close();
    memory_ = HostBuffer(bytes, "the buffers of an I/O benchmark");
    std::mt19937_64 random(1);
    for (std::size_t i = 0; i < bytes / sizeof(std::uint64_t); ++i) memory_.as<std::uint64_t>()[i] = random();
  }

  // A pager over the files, with an engine of its own.
  void open(const std::string& engine, std::size_t block_bytes, std::size_t depth, std::size_t frame_num) {
    const PagerPlan plan = plan_pager(space_.slot_num(), 0, frame_num);
    ZB_EXPECT(plan.swapped_num() > 0, "nothing would be swapped: all chunks of the files fit into the " +
                                          std::to_string(frame_num) + " frames; use larger files or fewer frames");
    close();
    reserve_memory(frame_num * space_.slot_bytes());
    const std::span<std::byte> memory[] = {{memory_.data(), frame_num * space_.slot_bytes()}};
    engine_ = make_io_engine({.kind = io_engine_from_name(engine), .block_bytes = block_bytes, .depth = depth},
                             space_.files(), memory);
    pager_.emplace(plan, std::vector<std::size_t>(space_.slot_num(), space_.slot_bytes()), space_, *engine_, memory[0],
                   PagerOptions{.on_disk = is_filled()});
    mode_.reset();
  }

  void close() {
    pager_.reset();
    engine_.reset();
  }

  // Takes `chunk_num` chunks through memory, going on where the last call ended, of this pager or one before.
  std::pair<double, std::uint64_t> run(const std::string& mode_name, std::size_t chunk_num) {
    ZB_EXPECT_STATE(pager_.has_value(), "open a pager first");
    const IoMode mode = mode_from_name(mode_name);
    ZB_EXPECT_STATE(mode == IoMode::kWrite || is_filled(), "fill the files before reading them");
    if (mode_ != mode) {
      std::vector<std::size_t> order(mode == IoMode::kWrite ? 0 : space_.slot_num());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = (cursor_ + i) % order.size();
      pager_->set_order(order);
      pager_->flush();
      mode_ = mode;
    }
    const PagerStats before = pager_->stats();
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < chunk_num; ++i, cursor_ = (cursor_ + 1) % space_.slot_num()) {
      pager_->acquire(cursor_, mode == IoMode::kWrite ? Content::kOverwritten : Content::kKept);
      pager_->release(cursor_, mode == IoMode::kRead ? Change::kClean : Change::kDirty);
    }
    pager_->flush();
    const double time_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const PagerStats after = pager_->stats();
    return {time_s, after.read_bytes - before.read_bytes + after.written_bytes - before.written_bytes};
  }

  // Writes so many of the chunks that nothing was written to, and says how many are left.
  std::size_t fill(std::size_t chunk_num) {
    const std::size_t num = std::min(chunk_num, space_.slot_num() - filled_num_);
    run("write", num);
    filled_num_ += num;
    return space_.slot_num() - filled_num_;
  }

  // As many bytes by a plain loop, going on round the files likewise.
  std::pair<double, std::uint64_t> run_raw(const std::string& engine, const std::string& mode_name,
                                           std::size_t block_bytes, std::size_t depth, std::size_t chunk_num) {
    const IoMode mode = mode_from_name(mode_name);
    ZB_EXPECT(chunk_num <= space_.slot_num(), "the files have only " + std::to_string(space_.slot_num()) +
                                                  " chunks, got chunk_num " + std::to_string(chunk_num));
    reserve_memory(depth * block_bytes);
    if (raw_cursor_ + chunk_num > space_.slot_num()) raw_cursor_ = 0;
    const std::size_t piece_bytes = space_.file_bytes() / space_.slot_num();
    const std::size_t first = raw_cursor_ * piece_bytes;
    raw_cursor_ += chunk_num;
    const double time_s = time_raw_io({io_engine_from_name(engine), block_bytes, depth}, mode, space_.files(), first,
                                      first + chunk_num * piece_bytes, {memory_.data(), memory_.bytes()});
    return {time_s, chunk_num * space_.slot_bytes() * (mode == IoMode::kBoth ? 2 : 1)};
  }

  const SwapSpace& space() const { return space_; }

 private:
  bool is_filled() const { return filled_num_ == space_.slot_num(); }

  SwapSpace space_;
  HostBuffer memory_;
  std::unique_ptr<IoEngine> engine_;
  std::optional<Pager> pager_;
  std::optional<IoMode> mode_;
  std::size_t cursor_ = 0;      // next chunk of the pager's runs
  std::size_t raw_cursor_ = 0;  // and of the plain loops'
  std::size_t filled_num_ = 0;
};

void bind_io_bench(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<IoBench>(m, "IoBench", "Swap files with a pager over them, beside plain loops over the same files.")
      .def(py::init<std::vector<std::string>, std::size_t, std::size_t, bool>(), py::kw_only(), py::arg("directories"),
           py::arg("chunk_bytes"), py::arg("chunk_num"), py::arg("direct") = true, Release())
      .def("open", &IoBench::open, py::kw_only(), py::arg("engine"), py::arg("block_bytes"), py::arg("depth"),
           py::arg("frame_num"), Release(), "A new pager of so many frames, with an engine of its own.")
      .def("close", &IoBench::close, Release(), "Ends the pager and its engine.")
      .def("fill", &IoBench::fill, py::kw_only(), py::arg("chunk_num"), Release(),
           "Writes so many more chunks with random bytes, before all else; how many are left.")
      .def("run", &IoBench::run, py::arg("mode"), py::kw_only(), py::arg("chunk_num"), Release(),
           "Takes chunks through the pager: read, write or both. Seconds and bytes moved.")
      .def("run_raw", &IoBench::run_raw, py::arg("engine"), py::kw_only(), py::arg("mode"), py::arg("block_bytes"),
           py::arg("depth"), py::arg("chunk_num"), Release(),
           "The same bytes of the same files by a plain loop. Seconds and bytes moved.")
      .def_property_readonly("chunk_bytes", [](const IoBench& bench) { return bench.space().slot_bytes(); })
      .def_property_readonly("paths", [](const IoBench& bench) {
        std::vector<std::string> paths;
        for (const IoFile& file : bench.space().files()) paths.push_back(file.path);
        return paths;
      });
}

}  // namespace

void bind_io(py::module_& m) {
  bind_io_bench(m);
  m.def(
      "remove_stale_swap_files", [](const std::string& directory) { return remove_stale_swap_files(directory); },
      py::arg("directory"), "Removes what crashed runs left in the directory; returns how many files.");
  m.def(
      "io_uring_refusal",
      []() -> std::optional<std::string> {
        try {
          const Ring ring(kernel_system(), 1);
          return std::nullopt;
        } catch (const IoError& error) {
          return error.what();
        }
      },
      "Why io_uring is not usable here; None where it is.");
}

}  // namespace zb
