#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/capsules.h"
#include "bindings/exchange.h"

#include "comm/buffer.h"
#include "comm/c10d_communicator.h"
#include "comm/c10d_dtype.h"
#include "comm/communicator.h"
#include "comm/paced_communicator.h"
#include "comm/paced_link.h"
#include "comm/shm_communicator.h"

namespace py = pybind11;

namespace zb {
namespace {

// Python holds communicators as this, so that an engine can take one over.
struct OwnedCommunicator {
  std::unique_ptr<Communicator> value;

  Communicator& get() const {
    ZB_EXPECT_STATE(value != nullptr, "this communicator was closed or given to an engine");
    return *value;
  }
};

struct PythonBuffer {
  std::shared_ptr<RegisteredBuffer> value;

  at::Tensor tensor(const std::string& dtype_text, std::optional<int> rank) const {
    const DType dtype = dtype_from_name(dtype_text);
    const auto numel = static_cast<std::int64_t>(value->bytes() / dtype_bytes(dtype));
    // Without an index, torch asks the driver on which device the address lies.
    const auto options =
        at::TensorOptions().dtype(scalar_type(dtype)).device(value->is_on_device() ? at::kCUDA : at::kCPU);
    return at::from_blob(rank ? part_of(*rank) : value->data(), {numel}, [keep = value](void*) {}, options);
  }

  std::byte* part_of(int rank) const {
    const auto* const buffer = dynamic_cast<const Buffer*>(value.get());
    ZB_EXPECT(buffer != nullptr && rank >= 0 && rank < buffer->parts().world_size,
              "the part of rank " + std::to_string(rank) +
                  " of this buffer is not in this process's memory: only shared buffers of the shm communicator have "
                  "the parts of all ranks there");
    return buffer->data_of(rank);
  }
};

Region region(const PythonBuffer& buffer, std::size_t offset_bytes, std::size_t bytes) {
  ZB_EXPECT(offset_bytes <= buffer.value->bytes() && bytes <= buffer.value->bytes() - offset_bytes,
            "the region [" + std::to_string(offset_bytes) + ", " + std::to_string(offset_bytes + bytes) +
                ") lies outside its buffer of " + std::to_string(buffer.value->bytes()) + " bytes");
  return {buffer.value, offset_bytes};
}

constexpr const char* kLabel = "python";

// For benchmarks: `calls` times in a loop without Python, as the engine calls collectives. `numel` is of a shard, or of
// the whole buffer for all_reduce.
void repeat_collective(const OwnedCommunicator& communicator, const std::string& collective, std::size_t calls,
                       const std::optional<PythonBuffer>& source, const std::optional<PythonBuffer>& destination,
                       std::size_t numel, const std::string& dtype_text) {
  Communicator& comm = communicator.get();
  const DType dtype = dtype_from_name(dtype_text);
  const std::size_t bytes = numel * dtype_bytes(dtype);
  const std::size_t full_bytes = bytes * static_cast<std::size_t>(comm.world_size());
  const auto place = [](const std::optional<PythonBuffer>& buffer, std::size_t region_bytes) {
    ZB_EXPECT(buffer.has_value(), "this collective needs a source, and a destination unless it works in place");
    return region(*buffer, 0, region_bytes);
  };
  const auto repeat = [&](const auto& start) {
    for (std::size_t i = 0; i < calls; ++i) start()->wait();
  };
  if (collective == "barrier") {
    for (std::size_t i = 0; i < calls; ++i) comm.barrier(kLabel);
  } else if (collective == "all_gather") {
    const AllGather args{place(source, bytes), place(destination, full_bytes), bytes, kLabel};
    repeat([&] { return comm.start_all_gather(args); });
  } else if (collective == "reduce_scatter") {
    const ReduceScatter args{place(source, full_bytes), place(destination, bytes), numel, dtype, kLabel};
    repeat([&] { return comm.start_reduce_scatter(args); });
  } else {
    ZB_EXPECT(collective == "all_reduce", "the collective '" + collective +
                                              "' is unknown: choose barrier, all_gather, reduce_scatter or all_reduce");
    const AllReduce args{place(source, bytes), numel, dtype, kLabel};
    repeat([&] { return comm.start_all_reduce(args); });
  }
}

void bind_communicator(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<OwnedCommunicator>(m, "Communicator", "Collectives over registered buffers (csrc/comm/communicator.h).")
      .def_property_readonly("rank", [](const OwnedCommunicator& c) { return c.get().rank(); })
      .def_property_readonly("world_size", [](const OwnedCommunicator& c) { return c.get().world_size(); })
      .def_property_readonly("kind", [](const OwnedCommunicator& c) { return std::string(c.get().kind()); })
      .def(
          "allocate",
          [](const OwnedCommunicator& c, std::size_t bytes, bool shared) {
            return PythonBuffer{c.get().allocate(bytes, shared ? BufferRole::kShared : BufferRole::kPrivate, nullptr,
                                                 Category::kStaging)};
          },
          py::arg("bytes"), py::kw_only(), py::arg("shared"), Release(),
          "Registered memory; shared memory is a collective call and may be a source.")
      .def(
          "start_all_gather",
          [](const OwnedCommunicator& c, const PythonBuffer& source, const PythonBuffer& destination,
             std::size_t shard_bytes, std::size_t source_offset_bytes, std::size_t destination_offset_bytes) {
            const std::size_t full_bytes = shard_bytes * static_cast<std::size_t>(c.get().world_size());
            return c.get().start_all_gather({.source = region(source, source_offset_bytes, shard_bytes),
                                             .destination = region(destination, destination_offset_bytes, full_bytes),
                                             .shard_bytes = shard_bytes,
                                             .label = kLabel});
          },
          py::arg("source"), py::arg("destination"), py::kw_only(), py::arg("shard_bytes"),
          py::arg("source_offset_bytes") = 0, py::arg("destination_offset_bytes") = 0, Release())
      .def(
          "start_reduce_scatter",
          [](const OwnedCommunicator& c, const PythonBuffer& source, const PythonBuffer& destination,
             std::size_t shard_numel, const std::string& dtype_text, std::size_t source_offset_bytes,
             std::size_t destination_offset_bytes) {
            const DType dtype = dtype_from_name(dtype_text);
            const std::size_t shard_bytes = shard_numel * dtype_bytes(dtype);
            const std::size_t full_bytes = shard_bytes * static_cast<std::size_t>(c.get().world_size());
            return c.get().start_reduce_scatter(
                {.source = region(source, source_offset_bytes, full_bytes),
                 .destination = region(destination, destination_offset_bytes, shard_bytes),
                 .shard_numel = shard_numel,
                 .dtype = dtype,
                 .label = kLabel});
          },
          py::arg("source"), py::arg("destination"), py::kw_only(), py::arg("shard_numel"), py::arg("dtype"),
          py::arg("source_offset_bytes") = 0, py::arg("destination_offset_bytes") = 0, Release())
      .def(
          "start_all_reduce",
          [](const OwnedCommunicator& c, const PythonBuffer& buffer, std::size_t numel, const std::string& dtype_text,
             std::size_t offset_bytes) {
            const DType dtype = dtype_from_name(dtype_text);
            return c.get().start_all_reduce({.buffer = region(buffer, offset_bytes, numel * dtype_bytes(dtype)),
                                             .numel = numel,
                                             .dtype = dtype,
                                             .label = kLabel});
          },
          py::arg("buffer"), py::kw_only(), py::arg("numel"), py::arg("dtype"), py::arg("offset_bytes") = 0, Release())
      .def(
          "start_broadcast",
          [](const OwnedCommunicator& c, const PythonBuffer& buffer, std::size_t bytes, int root) {
            return c.get().start_broadcast(
                {.buffer = region(buffer, 0, bytes), .bytes = bytes, .root = root, .label = kLabel});
          },
          py::arg("buffer"), py::kw_only(), py::arg("bytes"), py::arg("root") = 0, Release())
      .def(
          "barrier", [](const OwnedCommunicator& c) { c.get().barrier(kLabel); }, Release())
      .def(
          "exchange",
          [](const OwnedCommunicator& c, const py::bytes& mine) {
            return exchanged(mine, c.get().world_size(),
                             [&](auto own, auto all) { c.get().exchange(own, all, kLabel); });
          },
          py::arg("mine"), "Every rank's bytes, one after the other; all ranks give equally many.")
      .def(
          "begin_group", [](const OwnedCommunicator& c) { c.get().begin_group(); }, Release(),
          "What is started until end_group may be put in together.")
      .def(
          "end_group", [](const OwnedCommunicator& c) { c.get().end_group(); }, Release())
      .def(
          "progress", [](const OwnedCommunicator& c) { c.get().progress(); }, Release())
      .def(
          "abort", [](const OwnedCommunicator& c, const std::string& reason) { c.get().abort(reason); },
          py::arg("reason"), Release())
      .def(
          "poisoned",
          [](const OwnedCommunicator& c) -> std::optional<std::string> {
            const auto cause = c.get().poisoned();
            return cause ? std::optional<std::string>(cause->what()) : std::nullopt;
          },
          "The original cause, once this communicator is poisoned.")
      .def("communication_bytes",
           [](const OwnedCommunicator& c) {
             std::map<std::string, std::uint64_t> result;
             for (std::size_t i = 0; i < kCollectiveNum; ++i) {
               result[std::string(collective_name(static_cast<Collective>(i)))] = c.get().counters().bytes[i];
             }
             return result;
           })
      .def(
          "repeat", &repeat_collective, py::arg("collective"), py::arg("calls"), py::kw_only(),
          py::arg("source") = std::nullopt, py::arg("destination") = std::nullopt, py::arg("numel") = 0,
          py::arg("dtype") = "float32", Release(),
          "Runs a collective `calls` times without Python in between: barrier, all_gather, reduce_scatter, all_reduce.")
      .def("close", [](OwnedCommunicator& c) { c.value.reset(); }, Release());
}

}  // namespace

std::unique_ptr<Communicator> take_communicator(const py::object& object) {
  auto& owned = object.cast<OwnedCommunicator&>();
  static_cast<void>(owned.get());
  return std::move(owned.value);
}

void bind_comm(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<PythonBuffer>(m, "RegisteredBuffer", "Memory that collectives may name.")
      .def_property_readonly("bytes", [](const PythonBuffer& b) { return b.value->bytes(); })
      .def("tensor", &PythonBuffer::tensor, py::arg("dtype"), py::kw_only(), py::arg("rank") = py::none(),
           "The whole buffer, or another rank's part of it, as a flat torch tensor that keeps it alive.");
  py::class_<Work, WorkPtr>(m, "Work", "A started collective.")
      .def("test", &Work::test, Release())
      .def(
          "wait", [](Work& w) { w.wait(); }, Release())
      .def("test_source_free", &Work::test_source_free, Release())
      .def("wait_source_free", [](Work& w) { w.wait_source_free(); }, Release());
  bind_communicator(m);
  m.def(
      "make_shm_communicator",
      [](int rank, int world_size, const std::string& rendezvous, double timeout_s) {
        ZB_EXPECT(timeout_s > 0 && std::isfinite(timeout_s),
                  "timeout_s must be a positive number of seconds, got " + std::to_string(timeout_s));
        return OwnedCommunicator{
            make_shm_communicator({.rank = rank,
                                   .world_size = world_size,
                                   .rendezvous = rendezvous,
                                   .timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1e3))})};
      },
      py::kw_only(), py::arg("rank"), py::arg("world_size"), py::arg("rendezvous"), py::arg("timeout_s") = 300.0,
      Release(), "Connects the ranks of one host over shared memory. Blocks until all are there.");
  py::class_<PeerHosts, std::shared_ptr<PeerHosts>>(m, "PeerHosts", "The hosts of all ranks.")
      .def(py::init([](const std::vector<std::tuple<std::string, std::string, std::uint16_t>>& ranks, int own,
                       int listener) {
             std::vector<PeerHost> peers;
             for (const auto& [host, address, port] : ranks) peers.push_back({host, address, port});
             return std::make_shared<PeerHosts>(std::move(peers), own, shm::FileDescriptor(listener));
           }),
           py::arg("ranks"), py::kw_only(), py::arg("own"), py::arg("listener"),
           "`ranks` has each rank's host, and the address and port where the rank listens. Takes over the file "
           "descriptor `listener`, -1 for none.")
      .def("close", &PeerHosts::close, Release(), "Stops listening.");
  m.def(
      "make_c10d_communicator",
      [](const std::string& group_name, std::shared_ptr<PeerHosts> hosts) {
        return OwnedCommunicator{make_c10d_communicator(group_name, std::move(hosts))};
      },
      py::arg("group_name"), py::kw_only(), py::arg("hosts") = py::none(), Release(),
      "Wraps a live CPU process group of torch.distributed by its group_name. `hosts` lets an error name a lost rank.");
  py::class_<PacedLink, std::shared_ptr<PacedLink>>(m, "PacedLink", "A link that ranks pretend to have.")
      .def(py::init([](double bytes_per_s, double latency_s) {
             return std::make_shared<PacedLink>(link_speed(bytes_per_s, latency_s));
           }),
           py::kw_only(), py::arg("bytes_per_s"), py::arg("latency_s"));
  m.def(
      "make_paced_communicator",
      [](const py::object& communicator, std::shared_ptr<PacedLink> link) {
        return OwnedCommunicator{
            make_paced_communicator(take_communicator(communicator), Algorithms::kGloo, std::move(link))};
      },
      py::arg("communicator"), py::kw_only(), py::arg("link"),
      "Takes over a c10d communicator, whose operations then take the time that `link` needs.");
  m.def(
      "release_communicator",
      [](const py::object& communicator) { return to_capsule(take_communicator(communicator)); },
      py::arg("communicator"), "Gives a communicator to another module, as a capsule.");
  m.def(
      "adopt_communicator",
      [](const py::object& capsule) {
        OwnedCommunicator owned{std::move(in_capsule<std::unique_ptr<Communicator>>(capsule))};
        static_cast<void>(owned.get());
        return owned;
      },
      py::arg("capsule"), "Takes over the communicator that another module made.");
}

}  // namespace zb
