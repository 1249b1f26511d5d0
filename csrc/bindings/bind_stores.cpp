#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/offload.h"
#include "common/error.h"
#include "stores/split_store.h"
#include "stores/trial_store.h"

namespace py = pybind11;

namespace zb {

std::unique_ptr<Store> OffloadOptions::make_store(Ledger* ledger, const DeviceParts& parts) const {
  if (ratio) return make_store_of(*ratio, ledger, parts);
  const PinnedOptions pinned{
      .thread_num = host.thread_num, .cpus = host.cpus, .numa_node = host.numa_node, .lock = host.lock};
  return make_trial_store(ledger, parts, pinned, host.ranks_on_host, [held = *this, ledger, parts](double share) {
    return held.make_store_of(share, ledger, parts);
  });
}

std::unique_ptr<Store> OffloadOptions::make_store_of(double share, Ledger* ledger, const DeviceParts& parts) const {
  if (share == 0.0) return make_device_store(ledger, parts);
  std::unique_ptr<Store> on_host = make_host_store(ledger, parts, host);
  if (share == 1.0) return on_host;
  return make_split_store(make_device_store_with_masters(ledger, parts), std::move(on_host), share);
}

namespace {

ParameterHome home_from_name(const std::string& name) {
  if (name == "device") return ParameterHome::kDevice;
  if (name == "host") return ParameterHome::kHost;
  ZB_EXPECT(name == "nvme", "the place of parameters '" + name + "' is unknown: choose device, host or nvme");
  return ParameterHome::kFiles;
}

}  // namespace

void bind_stores(py::module_& m) {
  py::class_<PagedStateOptions>(m, "PagedStateOptions", "Optimizer state in files (csrc/stores/paged_state.h).")
      .def(py::init([](std::vector<std::string> directories, std::string owner, const std::string& engine,
                       std::size_t block_bytes, std::size_t depth, bool allow_fallback, bool checksums) {
             return PagedStateOptions{.directories = std::move(directories),
                                      .owner = std::move(owner),
                                      .engine = {.kind = io_engine_from_name(engine),
                                                 .allow_fallback = allow_fallback,
                                                 .block_bytes = block_bytes,
                                                 .depth = depth},
                                      .checksums = checksums};
           }),
           py::kw_only(), py::arg("directories"), py::arg("owner"), py::arg("engine"), py::arg("block_bytes"),
           py::arg("depth"), py::arg("allow_fallback"), py::arg("checksums"));
  py::class_<OffloadOptions>(m, "OffloadOptions", "Optimizer state on the host (csrc/stores/host_store.h).")
      .def(
          py::init([](std::optional<double> ratio, const std::string& parameters, std::size_t thread_num,
                      std::vector<int> cpus, int numa_node, bool lock, std::size_t ranks_on_host,
                      std::optional<std::size_t> chunk_numel, const std::optional<PagedStateOptions>& paged,
                      std::optional<std::size_t> memory_bytes) {
            return OffloadOptions{.ratio = ratio,
                                  .host = {.thread_num = thread_num,
                                           .cpus = std::move(cpus),
                                           .numa_node = numa_node,
                                           .lock = lock ? PageLock::kLocked : PageLock::kNone,
                                           .ranks_on_host = ranks_on_host,
                                           .chunk_numel = chunk_numel,
                                           .parameters = home_from_name(parameters),
                                           .paged = paged,
                                           .memory_bytes = memory_bytes}};
          }),
          py::kw_only(), py::arg("ratio"), py::arg("parameters"), py::arg("thread_num"), py::arg("cpus"),
          py::arg("numa_node"), py::arg("lock"), py::arg("ranks_on_host"), py::arg("chunk_numel"),
          py::arg("paged") = std::nullopt, py::arg("memory_bytes") = std::nullopt,
          "ratio is the share of the state that is not on the device, None leaves it to Engine.place_state; parameters "
          "says where the shards of stage 3 are: device, host or nvme; paged puts the state into files, but for what "
          "memory_bytes of the host hold. Where chunk_numel is None it goes by them.");
}

}  // namespace zb
