// The engine of blocking calls: `depth` threads, each with one pread or pwrite at a time.
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "common/process_owned.h"
#include "io/io_engine_kinds.h"
#include "io/io_thread.h"

namespace zb {
namespace {

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(const IoEngineOptions& options, std::vector<IoFile> files, System& system)
      : IoEngine(IoEngineKind::kThreads, std::move(files), options), system_(system) {
    threads_->reserve(options.depth);
    try {
      for (std::size_t i = 0; i < options.depth; ++i) threads_->push_back(start_io_thread([this] { work(); }));
    } catch (...) {
      end();
      throw;
    }
  }
  ~ThreadEngine() override {
    if (threads_.is_own()) end();
  }

 private:
  void work() {
    while (std::optional<Block> block = queue_.take()) {
      while (block) {
        const ssize_t result = call(*block);
        block = queue_.finish(std::move(*block), result);
      }
    }
  }

  ssize_t call(const Block& block) {
    const int fd = queue_.files()[block.file].fd;
    return block.direction == Direction::kRead ? system_.pread(fd, block.memory, block.bytes, block.offset)
                                               : system_.pwrite(fd, block.memory, block.bytes, block.offset);
  }

  void end() {
    queue_.stop();
    for (std::thread& thread : *threads_) thread.join();
  }

  System& system_;
  ProcessOwned<std::vector<std::thread>> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(const IoEngineOptions& options, std::vector<IoFile> files,
                                             System& system) {
  return std::make_unique<ThreadEngine>(options, std::move(files), system);
}

}  // namespace zb
