#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "bindings/bindings.h"
#include "bindings/capsules.h"
#include "bindings/cpu_allocator.h"
#include "memory/host_limits.h"
#include "memory/ledger.h"
#include "memory/numa.h"
#include "memory/pinned_pool.h"

namespace py = pybind11;

namespace zb {
namespace {

PinnedPool make_pinned_pool(std::size_t bytes, std::size_t thread_num, std::vector<int> cpus, int numa_node, bool lock,
                            const py::object& parts) {
  PinnedOptions options{.thread_num = thread_num,
                        .cpus = std::move(cpus),
                        .numa_node = numa_node,
                        .lock = lock ? PageLock::kLocked : PageLock::kNone};
  if (!parts.is_none()) options.registrar = host_registrar(in_capsule<DeviceParts>(parts).device);
  const py::gil_scoped_release release;
  return {bytes, nullptr, options};
}

at::Tensor pinned_tensor(PinnedPool& pool, std::size_t bytes) {
  auto block = std::make_shared<PinnedBlock>(pool.allocate(bytes, Category::kStaging));
  return at::from_blob(
      block->data(), {static_cast<std::int64_t>(bytes)}, [block](void*) {},
      at::TensorOptions().dtype(c10::ScalarType::Byte));
}

void bind_pinned(py::module_& m) {
  m.def("available_host_bytes", &available_host_bytes, "What the machine and this process's cgroups still have.");
  m.def("lockable_bytes", [] { return lockable_bytes(); }, "What mlock may still lock (RLIMIT_MEMLOCK).");
  m.def(
      "numa_node_of_cpus", [](const std::vector<int>& cpus) { return node_of_cpus(cpus, numa_nodes()); },
      py::arg("cpus"), "The NUMA node that most of these CPUs belong to; -1 where the machine lists none.");
  m.def(
      "cpus_of_numa_node",
      [](int node) {
        for (const NumaNode& listed : numa_nodes()) {
          if (listed.number == node) return listed.cpus;
        }
        return std::vector<int>{};
      },
      py::arg("node"), "CPUs of a NUMA node, whether this process may run there or not; none for an unknown one.");
  py::class_<PinnedStats>(m, "PinnedStats", "What lies under a PinnedPool's blocks.")
      .def_readonly("mapped_bytes", &PinnedStats::mapped_bytes)
      .def_readonly("requested_bytes", &PinnedStats::requested_bytes)
      .def_readonly("peak_requested_bytes", &PinnedStats::peak_requested_bytes)
      .def_readonly("huge_bytes", &PinnedStats::huge_bytes)
      .def_readonly("is_on_node", &PinnedStats::is_on_node)
      .def_readonly("is_registered", &PinnedStats::is_registered)
      .def_readonly("fill_ms", &PinnedStats::fill_ms)
      .def_readonly("register_ms", &PinnedStats::register_ms);
  py::class_<PinnedPool>(m, "PinnedPool", "Pinned host memory in exact sizes (csrc/memory/pinned_pool.h).")
      .def(py::init(&make_pinned_pool), py::arg("size_bytes"), py::kw_only(), py::arg("thread_num"),
           py::arg("cpus") = std::vector<int>{}, py::arg("numa_node") = kAnyNode, py::arg("lock") = false,
           py::arg("parts") = py::none(),
           "parts is a device's capsule whose driver then knows the memory; without one it is plain memory, which lock "
           "keeps from being swapped out.")
      .def("tensor", &pinned_tensor, py::arg("size_bytes"), py::call_guard<py::gil_scoped_release>(),
           "A block of the pool as bytes, given back with its last reference.")
      .def("stats", &PinnedPool::stats, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_memory(py::module_& m) {
  bind_pinned(m);
  m.def("install_counting_allocator", &install_counting_allocator,
        "Counts torch's CPU tensors from now on, so that process_usage_peak_bytes covers them.");
  m.def(
      "process_usage_bytes", [] { return process_usage().current_bytes(); },
      "Bytes of CPU tensors and engine buffers alive in this process.");
  m.def(
      "process_usage_peak_bytes", [] { return process_usage().peak_bytes(); },
      "Largest process_usage_bytes since the last reset.");
  m.def("reset_process_usage_peak", [] { process_usage().reset_peak(); });

  py::class_<Ledger>(m, "Ledger", "Bytes that an engine holds, by tier and category.")
      .def(
          "bytes",
          [](const Ledger& ledger, bool peak) {
            std::map<std::string, std::map<std::string, std::int64_t>> result;
            for (std::size_t tier = 0; tier < kTierNum; ++tier) {
              for (std::size_t category = 0; category < kCategoryNum; ++category) {
                const Ledger::Entry entry = ledger.entry(static_cast<Tier>(tier), static_cast<Category>(category));
                const std::int64_t bytes = peak ? entry.peak_bytes : entry.current_bytes;
                if (bytes == 0) continue;
                result[std::string(tier_name(static_cast<Tier>(tier)))]
                      [std::string(category_name(static_cast<Category>(category)))] = bytes;
              }
            }
            return result;
          },
          py::kw_only(), py::arg("peak"), "{tier: {category: bytes}}, now or at each category's peak.")
      .def("reset_peaks", &Ledger::reset_peaks);
}

}  // namespace zb
