// Descriptors passed between ranks that are threads, over a real shm communicator and real sockets.
#include "comm/descriptor_mesh.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "comm/shm_communicator.h"
#include "comm/shm_memory.h"

namespace zb {
namespace {

using namespace std::chrono_literals;

void run_ranks(int world_size, const std::function<void(Communicator& control)>& body) {
  static int number = 0;
  const std::string rendezvous = "mesh-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([=] {
      try {
        const auto control =
            make_shm_communicator({.rank = rank, .world_size = world_size, .rendezvous = rendezvous, .timeout = 20s});
        body(*control);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::size_t size_of(const shm::FileDescriptor& descriptor) {
  struct stat status{};
  EXPECT_EQ(::fstat(descriptor.get(), &status), 0);
  return static_cast<std::size_t>(status.st_size);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return "no CommunicationError";
}

TEST(DescriptorMesh, EveryRankGetsThoseOfAllPeersInTheirPlaces) {
  for (const int world_size : {2, 3, 8}) {
    run_ranks(world_size, [&](Communicator& control) {
      DescriptorMesh mesh(control, 20s);
      for (std::uint64_t round = 1; round <= 5; ++round) {
        const std::size_t unit = shm::page_bytes() * round;
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
    const auto mine = shm::create_memfd(shm::page_bytes());
    const std::string error = error_of([&] { mesh->exchange(mine, 1); });
    EXPECT_NE(error.find("rank 1 died or left"), std::string::npos) << error;
  });
}

TEST(DescriptorMesh, AnotherAllocationIsNoticed) {
  run_ranks(2, [](Communicator& control) {
    DescriptorMesh mesh(control, 20s);
    const auto mine = shm::create_memfd(shm::page_bytes());
    const std::string error = error_of([&] { mesh.exchange(mine, control.rank() == 0 ? 1 : 2); });
    EXPECT_NE(error.find("another allocation"), std::string::npos) << error;
    control.barrier("end");
  });
}

TEST(DescriptorMesh, AnAbortEndsTheWait) {
  run_ranks(2, [](Communicator& control) {
    const auto mine = shm::create_memfd(shm::page_bytes());
    const std::string error = error_of([&] {
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
