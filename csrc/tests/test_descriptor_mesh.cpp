// Descriptors passed between ranks that are threads, over a real shm communicator and real sockets.
#include "comm/descriptor_mesh.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "comm/shm_memory.h"
#include "common/page.h"
#include "shm_support.h"

namespace zb {
namespace {

using namespace std::chrono_literals;
using test::communication_error;
using test::shm::run_ranks;

std::size_t size_of(const shm::FileDescriptor& descriptor) {
  struct stat status{};
  EXPECT_EQ(::fstat(descriptor.get(), &status), 0);
  return static_cast<std::size_t>(status.st_size);
}

TEST(DescriptorMesh, EveryRankGetsThoseOfAllPeersInTheirPlaces) {
  for (const int world_size : {2, 3, 8}) {
    run_ranks(world_size, [&](Communicator& control) {
      DescriptorMesh mesh(control, 20s);
      for (std::uint64_t round = 1; round <= 5; ++round) {
        const std::size_t unit = page_bytes() * round;
        const auto mine = shm::create_memfd(unit * static_cast<std::size_t>(control.rank() + 1));
        const auto all = mesh.exchange(mine, round);
        ASSERT_EQ(all.size(), static_cast<std::size_t>(world_size));
        for (int rank = 0; rank < world_size; ++rank) {
          const shm::FileDescriptor& descriptor = all[static_cast<std::size_t>(rank)];
          ASSERT_EQ(static_cast<bool>(descriptor), rank != control.rank());
          if (descriptor) {
            EXPECT_EQ(size_of(descriptor), unit * static_cast<std::size_t>(rank + 1));
          }
        }
      }
      control.barrier("end");
    });
  }
}

TEST(DescriptorMesh, ARankThatLeftIsNamed) {
  run_ranks(2, [](Communicator& control) {
    std::optional<DescriptorMesh> mesh(std::in_place, control, 20s);
    if (control.rank() == 1) {
      mesh.reset();
      control.barrier("left");
      return;
    }
    control.barrier("left");
    const auto mine = shm::create_memfd(page_bytes());
    const std::string error = communication_error([&] { mesh->exchange(mine, 1); });
    EXPECT_NE(error.find("rank 1 died or left"), std::string::npos) << error;
  });
}

TEST(DescriptorMesh, AnotherAllocationIsNoticed) {
  run_ranks(2, [](Communicator& control) {
    DescriptorMesh mesh(control, 20s);
    const auto mine = shm::create_memfd(page_bytes());
    const std::string error = communication_error([&] { mesh.exchange(mine, control.rank() == 0 ? 1 : 2); });
    EXPECT_NE(error.find("another allocation"), std::string::npos) << error;
    EXPECT_TRUE(control.poisoned());
  });
}

TEST(DescriptorMesh, AnAbortEndsTheWait) {
  run_ranks(2, [](Communicator& control) {
    const auto mine = shm::create_memfd(page_bytes());
    const std::string error = communication_error([&] {
      DescriptorMesh mesh(control, 20s);
      control.barrier("connected");
      if (control.rank() == 1) {
        control.abort("enough");
        throw CommunicationError("enough", 1);
      }
      mesh.exchange(mine, 1);
    });
    EXPECT_TRUE(error.find("enough") != std::string::npos || error.find("died or left") != std::string::npos) << error;
  });
}

}  // namespace
}  // namespace zb
