#include <pybind11/stl.h>

#include <utility>

#include "bindings/bindings.h"
#include "bindings/offload.h"
#include "common/error.h"
#include "stores/split_store.h"

namespace py = pybind11;

namespace zb {

std::unique_ptr<Store> OffloadOptions::make_store(Ledger* ledger, const DeviceParts& parts) const {
  std::unique_ptr<Store> on_host = make_host_store(ledger, parts, host);
  if (ratio == 1.0) return on_host;
  return make_split_store(make_device_store_with_masters(ledger, parts), std::move(on_host), ratio);
}

void bind_stores(py::module_& m) {
  py::class_<OffloadOptions>(m, "OffloadOptions", "Optimizer state on the host (csrc/stores/host_store.h).")
      .def(py::init([](double ratio, bool parameters, std::size_t thread_num, std::vector<int> cpus, int numa_node,
                       bool lock, std::size_t ranks_on_host, std::size_t chunk_numel) {
             return OffloadOptions{.ratio = ratio,
                                   .host = {.thread_num = thread_num,
                                            .cpus = std::move(cpus),
                                            .numa_node = numa_node,
                                            .lock = lock ? PageLock::kLocked : PageLock::kNone,
                                            .ranks_on_host = ranks_on_host,
                                            .chunk_numel = chunk_numel,
                                            .parameters = parameters ? ParameterHome::kHost : ParameterHome::kDevice}};
           }),
           py::kw_only(), py::arg("ratio"), py::arg("parameters"), py::arg("thread_num"), py::arg("cpus"),
           py::arg("numa_node"), py::arg("lock"), py::arg("ranks_on_host"), py::arg("chunk_numel"),
           "ratio is the share of the state that lies on the host; parameters puts the shards of stage 3 there too.");
}

}  // namespace zb
