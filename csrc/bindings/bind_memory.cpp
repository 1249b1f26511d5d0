#include <pybind11/stl.h>

#include <map>
#include <string>

#include "bindings/bindings.h"
#include "bindings/cpu_allocator.h"
#include "memory/ledger.h"

namespace py = pybind11;

namespace zb {

void bind_memory(py::module_& m) {
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
